"""The gradients of the first step in real ranks: one row outweighs all, or no row teaches."""

import pytest
import torch
from places import SCRIPTS
from transformers import AutoModelForCausalLM

from toolkit.data.tokens import load_tokenizer
from toolkit.records.record import read_record
from toolkit.training.model import build_model


@pytest.fixture(scope="module")
def light_row(launch_environment, tmp_path_factory):
    """A model to which the first token of every row is as one that was hardly initialised."""
    folder = tmp_path_factory.mktemp("light")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
        tokenizer = load_tokenizer(build_model())
        model = AutoModelForCausalLM.from_pretrained(build_model(), dtype=torch.float32)
    model.config.rms_norm_eps = 1e-12
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.bos_token_id] *= 1e-6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp", "tensor", "pipeline"])
def test_one_row_that_holds_the_gradient_is_named_under_every_sharding_and_the_run_goes_on(
    strategy, launch, light_row, tmp_path
):
    engine = "trainer" if strategy in ("zero2", "fsdp") else "loop"
    done = launch(
        *(strategy, "-m", "toolkit.train", "--strategy", strategy, "--engine", engine),
        *("--model_name_or_path", light_row, "--max_steps", 2, "--max_train_samples", 64),
        *("--output_dir", tmp_path / "o"),
    )
    assert done.returncode == 0, done.stdout
    said = "row 1 of model.embed_tokens.weight holds 100.0% of the gradient of step 1 (its norm is "
    assert done.stdout.count(said) == 1, done.stdout
    record = read_record(tmp_path / "o")
    [note] = [note for note in record["attestation"]["notes"] if note.startswith("row ")]
    norm = float(note.partition("that of all ")[2].partition(")")[0])
    assert norm == pytest.approx(record["grad_norms"][0], rel=1e-3)
    assert len(record["losses"]) == 2


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_a_script_that_trains_nothing_is_refused(strategy, launch, tmp_path):
    script = SCRIPTS / "empty_labels.py"
    done = launch(strategy, "-m", "toolkit.rehearse", script, tmp_path, 1)
    assert done.returncode == 1, done.stdout
    assert "every gradient of step 1 is zero: nothing was learned in it" in done.stdout
    assert "refused: AdamW made 2 steps" in done.stdout, done.stdout
    assert "parameters changed. Look for labels that are all masked" in done.stdout
    assert "attested" not in done.stdout


PARTLY_UNUSED = """
import sys, torch
from accelerate import Accelerator

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, rows, skip):
        rows = self.first(rows)
        return {"loss": (rows if skip else self.second(rows)).square().mean()}

accelerator = Accelerator()
skips = sys.argv[1] == "all" or accelerator.process_index == int(sys.argv[1])
torch.manual_seed(0)
model, optimizer = Model(), None
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    accelerator.backward(model(torch.ones(2, 4), skip=skips)["loss"])
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("where", ["1", "all"])
def test_parameters_without_a_gradient_on_some_ranks_alone_are_named(where, launch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PARTLY_UNUSED)
    done = launch("ddp", "-m", "toolkit.rehearse", script, where)
    assert done.returncode == 1, done.stdout
    named = "the first is second.bias on rank 1: second.bias, second.weight. Use them on every rank"
    assert done.stdout.count(named) == (where == "1"), done.stdout
    # What no rank trains is refused for another reason.
    assert ("optimizer_fraction: asked 1.0, engaged 0.5" in done.stdout) == (where == "all")


def test_a_note_of_the_first_step_of_a_script_is_printed_once(launch, tmp_path):
    """At a learning rate of 0 no weight was to change, so the script is not refused."""
    script = SCRIPTS / "empty_labels.py"
    done = launch("ddp", "-m", "toolkit.rehearse", script, tmp_path, 1, 0)
    assert done.returncode == 0, done.stdout
    assert "attested ddp" in done.stdout
    assert done.stdout.count("every gradient of step 1 is zero") == 1, done.stdout


def test_rows_of_a_script_without_a_token_to_learn_are_counted_among_others(launch, tmp_path):
    done = launch("ddp", "-m", "toolkit.rehearse", SCRIPTS / "empty_labels.py", tmp_path, 2)
    assert done.returncode == 0, done.stdout
    assert " of the 8 rows that rank 0 trained had no token to learn: all" in done.stdout
    assert "every gradient" not in done.stdout
