"""Requested is not engaged: the known silent fallbacks are refused, and both are shown."""

import json
import shlex

import launches
import pytest
import torch
from places import ROOT, SCRIPTS
from transformers.training_args import OptimizerNames

from toolkit.configs.optimizers import (
    EVERYWHERE,
    OF_WHOLE,
    OF_WHOLE_OR_FLAT,
    optimizer_problem,
)
from toolkit.measuring.attestation import Requested, compare, kept_whole
from toolkit.measuring.launcher import launcher_words, refusal_of
from toolkit.strategies import STRATEGIES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fallbacks")


@pytest.fixture(scope="module")
def outcomes(launch, folder):
    done = launch("ddp", SCRIPTS / "fallbacks.py", folder, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "fsdp_sharded"])
def test_what_engaged_as_asked_is_not_refused_and_leaves_a_model(outcomes, folder, name):
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for rank in outcomes:
        assert rank[name]["ended"] == "trained", rank[name]
        assert rank[name]["engaged"]["num_processes"] == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ddp_alone", "distributed_type: asked MULTI_GPU, engaged NO"),
        ("fsdp_alone", "distributed_type: asked FSDP, engaged NO"),
        ("fsdp_on_cpu", "distributed_type: asked FSDP, engaged MULTI_CPU"),
        ("zero2_on_cpu", "distributed_type: asked DEEPSPEED, engaged MULTI_CPU"),
        ("fsdp_use_cpu", "distributed_type: asked FSDP, engaged MULTI_CPU"),
        ("fsdp_no_wrap", "layers_wrapped: asked True, engaged False"),
        ("loop_no_accumulation", "gradient_accumulation_steps: asked 2, engaged 1"),
        ("loop_exported_accumulation", "gradient_accumulation_steps: asked 2, engaged 4"),
        ("loop_bf16_auto", "precision: asked bf16, engaged no"),
        ("loop_clipping_auto", "gradient_clipping: asked 0.0, engaged 1.0"),
        ("zero2_sums_in_bf16", "accumulation_dtype: asked bfloat16, engaged ['float32']"),
        ("loop_context_parallel", "model_split_by: asked none, engaged context 2"),
        ("own_zero2_under_ddp", "config asks for ddp, and --deepspeed for zero2. Take"),
        *(
            (f"loop_{backend}_{setting}", f"{setting}: asked {asked}, engaged [{engaged}]")
            for backend in ("ddp", "fsdp", "zero3")
            for setting, asked, engaged in (
                ("weight_decay", 0.01, 0.011),
                ("betas", (0.9, 0.999), (0.9, 0.99)),
            )
        ),
    ],
)
def test_a_silent_fallback_is_refused_on_every_rank_and_both_are_shown(outcomes, name, said):
    for rank in outcomes:
        assert rank[name]["ended"] == "refused", rank[name]
        assert said in rank[name]["text"]


def test_what_is_set_otherwise_on_the_way_and_does_no_harm_is_not_refused(outcomes):
    for rank in outcomes:
        assert rank["loop"]["ended"] == "trained", rank["loop"]
        assert rank["loop"]["notes"] == []
        trained = rank["exported_accumulation"]
        assert trained["ended"] == "trained", trained  # with 2, not with the 4 that is exported
        assert trained["engaged"]["gradient_accumulation_steps"] == 2
        assert rank["zero2_no_bf16"]["ended"] == "trained", rank["zero2_no_bf16"]
        assert rank["zero2_no_bf16"]["engaged"]["precision"] == "bf16"


def test_what_the_config_asks_beside_the_strategy_is_seen_where_it_engages(outcomes):
    for rank in outcomes:
        checkpointed, plain = rank["fsdp_checkpointing"], rank["fsdp"]
        assert checkpointed["engaged"]["activation_checkpointing"] is True, checkpointed
        assert plain["engaged"]["activation_checkpointing"] is False
        for name, dtype in (("zero3_sums_in_bf16", "bfloat16"), ("zero1_sums_in_fp32", "float32")):
            assert rank[name]["ended"] == "trained", rank[name]
            assert dtype in rank[name]["engaged"]["accumulation_dtype"]
        # DeepSpeed's optimizer for bf16 keeps its parameters under another name: `bf16_groups`.
        assert rank["zero1_sums_in_fp32"]["engaged"]["weight_decay"] == [0.0, 0.25]


def test_what_the_arguments_ask_by_themselves_is_attested_where_no_config_asks(outcomes):
    for rank in outcomes:
        assert rank["own_zero2"]["engaged"]["zero_stage"] == 2, rank["own_zero2"]
        summed = rank["own_zero3_sums_in_bf16"]["engaged"]["accumulation_dtype"]
        assert summed == ["bfloat16"], rank["own_zero3_sums_in_bf16"]
        assert rank["own_fsdp"]["engaged"]["wrapper"] == "FSDPModule", rank["own_fsdp"]


def test_every_optimizer_that_is_not_refused_by_name_trains_and_is_attested(outcomes):
    offered = {one.value for one in OptimizerNames}
    asked = {name for name in offered if not optimizer_problem(name, STRATEGIES["single"])}
    assert asked == {*EVERYWHERE, *OF_WHOLE_OR_FLAT, *OF_WHOLE}
    trained = {f"{name}_ddp" for name in asked}
    trained |= {f"{name}_zero3" for name in (*EVERYWHERE, *OF_WHOLE_OR_FLAT)}
    trained |= {f"{name}_fsdp" for name in EVERYWHERE}
    for rank in outcomes:
        for name in sorted(trained):
            assert rank[name]["ended"] == "trained", (name, rank[name])
            share = rank[name]["engaged"].get("optimizer_fraction")
            if not name.startswith("sgd_"):  # it has no states to tell by
                assert share == pytest.approx(1.0 if name.endswith("_ddp") else 0.5, abs=0.05), name


def test_an_optimizer_that_cannot_step_is_refused_by_name():
    for name, strategy, words in (
        ("adafactor", "fsdp", "cannot step on parameters that FSDP2 shards (fsdp)"),
        ("adagrad", "zero2", "cannot step on parameters that DeepSpeed cuts (zero2)"),
        ("sgd", "zero2_offload", "is not known to train where DeepSpeed offloads its optimizer"),
        ("galore_adamw", "ddp", "is not known to train with the toolkit"),
    ):
        assert words in optimizer_problem(name, STRATEGIES[strategy])


def test_parameters_that_zero3_keeps_whole_are_named(outcomes):
    for rank in outcomes:
        assert rank["loop_persistent"]["ended"] == "trained", rank["loop_persistent"]
        assert rank["loop_persistent"]["engaged"]["sharded_fraction"] == 0.5
        (note,) = rank["loop_persistent"]["notes"]
        assert "stage3_param_persistence_threshold" in note


def test_what_zero3_keeps_gathered_is_said_beside_the_share():
    every = {"zero_stage": 3, "resident_fraction": 1.5, "held_fraction": 0.5}
    (note,) = kept_whole(every)
    assert note.startswith(
        "each rank keeps 100% of the parameters gathered between steps, beside its own share of "
        "50% of all: ZeRO-3 does not let go of those with fewer elements than"
    )
    (note,) = kept_whole(every | {"resident_fraction": 0.7})
    assert "keeps 20% of the parameters gathered" in note
    assert kept_whole(every | {"resident_fraction": 0.5}) == []


def test_a_fact_that_was_not_asked_for_is_not_compared():
    asked = Requested(strategy=STRATEGIES["zero3"], num_processes=2).after_first_step()
    assert "gradient_dtypes" not in asked
    assert "gradient_clipping" not in asked


def test_every_difference_is_listed_with_its_rank():
    asked = Requested(strategy=STRATEGIES["zero3"], num_processes=2, precision="bf16")
    wanted = asked.before_first_step()
    engaged = wanted | {"zero_stage": 2, "held_fraction": 0.53, "parameter_dtypes": ["float32"]}
    found = compare(wanted, engaged, rank=1)
    assert [str(mismatch) for mismatch in found] == [
        "zero_stage: asked 3, engaged 2 (rank 1)",
        "parameter_dtypes: asked ['bfloat16'], engaged ['float32'] (rank 1)",
    ]


def test_a_fact_that_nobody_saw_is_a_difference():
    asked = Requested(
        strategy=STRATEGIES["ddp"], num_processes=2, precision="no"
    ).after_first_step()
    found = {mismatch.what: mismatch.engaged for mismatch in compare(asked, {}, rank=0)}
    assert found == {"reduce_dtype": "unknown", "gradient_dtypes": "unknown"}


def test_a_bare_process_on_two_gpus_is_refused_with_the_way_out(tmp_path):
    """Where the Trainer would turn to nn.DataParallel; two GPUs are told to its arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from toolkit import ToolkitTrainer, UsageError

    args = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    assert args.device == torch.device("cpu")
    args._n_gpu = 2
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with pytest.raises(UsageError, match="nn.DataParallel") as caught:
        ToolkitTrainer(model=LlamaForCausalLM(config), args=args)
    assert "accelerate launch" in str(caught.value)


CONFIGS = ROOT / "accelerate_configs"


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (f"--config_file {CONFIGS}/fsdp.yaml --cpu -m toolkit.train", "2 ranks of FSDP"),
        (
            f"--config_file {CONFIGS}/zero3.yaml --cpu --num_processes 4 a.py",
            "4 ranks of DEEPSPEED",
        ),
        (f"--config_file {CONFIGS}/ddp.yaml --cpu a.py", "2 ranks ("),
        (f"--config_file {CONFIGS}/fsdp.yaml --cpu --num_processes 1 a.py", "1 rank of FSDP"),
        ("--use_fsdp --cpu a.py", "ranks of FSDP"),
        ("--num_processes 2 -m toolkit.train", "2 ranks (--num_processes 2)"),
        ("--num_machines 2 --machine_rank 1 --num_processes 2 a.py", "2 ranks ("),
        ("a.py", None),
        ("--num_processes 1 -m toolkit.train", None),
        ("--cpu a.py --num_processes 4 --use_fsdp", None),  # flags of the script
        (f"--config_file {CONFIGS}/single.yaml a.py", None),
        (f"--config_file {CONFIGS}/ddp.yaml --cpu --num_processes 1 a.py", None),
        ("--mixed_precision bf16 a.py", None),
        ("--a_flag_of_another_release a.py", None),
    ],
)
def test_what_a_launcher_of_one_process_was_asked_for_is_read_as_accelerate_reads_it(line, asked):
    refusal = refusal_of(shlex.split(line))
    assert asked in refusal if asked else refusal is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/usr/bin/python3 -P /usr/bin/accelerate launch --cpu a.py", ["--cpu", "a.py"]),
        ("python -m accelerate.commands.launch --cpu a.py", ["--cpu", "a.py"]),
        ("python -m accelerate.commands.accelerate_cli launch a.py", ["a.py"]),
        ("python /usr/bin/accelerate-launch a.py", ["a.py"]),
        ("python /usr/bin/torchrun --nproc_per_node 2 a.py", None),
        ("python -m torch.distributed.run --nproc_per_node 2 a.py", None),
        ("python /usr/bin/deepspeed --num_gpus 2 a.py", None),
        ("mpirun -np 2 python a.py", None),
        ("python -m ipykernel_launcher -f kernel.json", None),
        ("bash -c 'accelerate launch --num_processes 2 a.py'", None),
        ("python /usr/bin/accelerate test", None),
    ],
)
def test_only_accelerates_own_launcher_is_asked(command, words):
    assert launcher_words(shlex.split(command)) == words


def test_a_launch_that_lost_its_ranks_or_its_backend_on_the_way_is_refused(
    cold_environment, launch_environment, tmp_path
):
    trains = ["-m", "toolkit.train", "--output_dir", tmp_path / "out"]
    with_config = ["--config_file", CONFIGS / "fsdp.yaml", "--cpu", *trains]
    script = SCRIPTS / "plain_accelerator.py"
    lines = [
        with_config,
        ["--num_processes", 2, *trains],
        ["--num_processes", 1, "-m", "toolkit.rehearse", script],
    ]

    # Below a warm launcher, a process that forks stands between it and its rank.
    variables = [cold_environment, launch_environment, launch_environment]
    on_cpu, without_config, alone = (
        launches.run([*launches.TYPED, *line], environment=environment)
        for line, environment in zip(lines, variables, strict=True)
    )
    for done, asked in ((on_cpu, "2 ranks of FSDP"), (without_config, "2 ranks")):
        assert f"refused: accelerate launch was asked for {asked} (" in done.stdout, done.stdout
        assert "and started one process without a backend" in done.stdout
        assert "returned non-zero exit status 3" in done.stdout
    assert not (tmp_path / "out").exists()
    assert alone.returncode == 0, alone.stdout
    assert "attested single" in alone.stdout
