"""What `translate` and `explain` say, held against two ranks that train."""

import json
import re

import pytest
import yaml
from places import ROOT, SCRIPTS
from test_explain import explained, of_fsdp1

from toolkit.configs.check.translate import translate


def printed(done, marker):
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{marker} ")]
    return json.loads(line.removeprefix(marker))


@pytest.mark.parametrize(
    ("sharding", "bundled"), [("FULL_SHARD", "fsdp"), ("SHARD_GRAD_OP", "fsdp_grad_op")]
)
def test_a_translated_file_trains_with_the_losses_of_the_bundled_one(
    launch, tmp_path, sharding, bundled
):
    mine = of_fsdp1()
    mine["fsdp_config"]["fsdp_sharding_strategy"] = sharding
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(mine, sort_keys=False))
    file.write_text(translate(file).text)
    words = ["-m", "toolkit.rehearse", SCRIPTS / "plain_accelerator.py", "1.0"]
    ours = launch(file, *words)
    assert f"attested {bundled}:" in ours.stdout, ours.stdout
    assert printed(ours, "LOSSES") == printed(launch(bundled, *words), "LOSSES")


FLAGS = (
    *("--max_steps", "1", "--per_device_train_batch_size", "2", "--bf16", "True"),
    *("--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5", "--learning_rate", "1e-4"),
)


@pytest.mark.parametrize(
    ("strategy", "least"), [("zero1", 60), ("zero2_offload", 70), ("zero3", 60), ("fsdp", 9)]
)
def test_the_settings_of_a_run_are_those_that_were_explained(launch, tmp_path, strategy, least):
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    words = ["-m", "toolkit.rehearse", SCRIPTS / "settings_of_run.py", *FLAGS]
    done = launch(strategy, *words, "--output_dir", tmp_path)
    real = printed(done, "SETTINGS")
    explained_ones = {name: one.value for name, one in explained(file, *FLAGS).items()}
    common = real.keys() & explained_ones.keys()
    assert {"distributed_type", "num_processes", "mixed precision"} < common
    assert len(common) >= least
    other = {name for name in common if real[name] != explained_ones[name]}
    # A machine without GPUs has no memory to pin, which the rehearsal says.
    pinned = {
        f"zero_optimization.{name}" for name in re.findall(r"(\w+\.pin_memory): true", done.stdout)
    }
    assert other == pinned
