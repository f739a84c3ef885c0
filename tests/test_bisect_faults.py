"""Two real processes train a step with each fault, and the first thing that differs is named."""

import json
from pathlib import Path

import pytest
from fault_runs import start, write_model

from toolkit.comparing.bisect.finding import Bisection, StepResult, as_lines, bisect
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.records.evidence import read_evidence
from toolkit.records.record import read_record

FAULTS = {
    "other_initial_weights": ("initial weights", "differs by up to"),
    "other_data_order": ("batch", "is read by ddp and not by single"),
    "same_data_on_both_ranks": ("batch", "is read twice in ddp, by ranks 0 and 1"),
    "prompt_learned_in_one_row": ("batch", "the labels of row"),
    "dropout_with_a_seed_per_rank": ("loss of the rows", "forward computes something else"),
    "mean_of_means": ("loss weighting", "averages its micro-batches by themselves"),
    "divided_by_the_accumulation_twice": (
        "loss weighting",
        "counts 0.5 times as much in ddp as in single, one by the number of processes (2) or one "
        "by the accumulation steps (2)",
    ),
    "gradients_doubled": ("loss weighting", "every token counts 2 times as much"),
    "gradients_not_synchronised": ("gradients", "the ranks of ddp hold different gradients"),
    "gradients_summed_over_the_ranks": ("gradients", "every tensor is 2 times single's: a scale"),
    "gradients_rounded_to_bf16": ("gradients", "of their norm, most in"),
    "clipped_by_the_norm_of_a_shard": ("clipping norm", "clipping took"),
    "not_clipped": (
        "clipping norm",
        "(limit 0.2, gradients multiplied by 1) in ddp: ddp does not clip",
    ),
    "learning_rate_doubled": ("learning rate", "0.001 in single, 0.002 in ddp"),
    "adam_for_adamw": ("optimizer settings", "single steps with AdamW, ddp with Adam"),
    "adam_epsilon_1e_6": ("optimizer settings", "eps is 1e-08 in single and 1e-06 in ddp"),
    "no_weight_decay": ("optimizer settings", "weight_decay is 0.01 in single and 0.0 in ddp"),
    "weights_kept_in_bf16": ("update", "what the step adds to the weights differs by"),
    "layer_frozen": (
        "trained parameters",
        "model.layers.1.mlp.gate_proj.weight (the first of 3) is trained by single and not by ddp",
    ),
    "saved_in_bf16": ("saved weights", "ddp saved other numbers than its ranks held: "),
    "scheduler_stepped_by_every_rank": (
        "learning rate of the next step",
        "0.0005 in single, 0 in ddp",
    ),
}
"""Each fault, the link that is the first to differ, and what is said of it."""

LATE = {
    "prompt_learned_in_one_row": ("batch", "the labels of row"),
    "attention_dropped": ("loss of the rows", "forward computes something else"),
    "gradients_doubled": ("loss weighting", "every token counts 2 times as much"),
    "gradients_summed_over_the_ranks": ("gradients", "every tensor is 2 times single's: a scale"),
    "not_clipped": ("clipping norm", "ddp does not clip"),
    "rate_doubled": ("learning rate", "0.000375 in single, 0.00075 in ddp"),
    "decay_dropped": ("optimizer settings", "weight_decay is 0.01 in single and 0.0 in ddp"),
    "weights_kept_in_bf16": ("update", "what the step adds to the weights differs by"),
}
"""Of faults that begin with step 6, the same."""

BEFORE = {
    "rate_doubled_before": ("learning rate", "0.000375 in single, 0.00075 in ddp"),
    "rate_doubled_once_before": ("weights before the step", "steps 1 to 5 left them apart by 1"),
    "weights_of_one_rank_moved": (
        "weights before the step",
        "the ranks of ddp hold different weights before the step",
    ),
}
"""Of faults that had begun before it, whether they still act in it or not."""

UNDER_BF16 = {
    "gradients_summed_over_the_ranks": ("gradients", "every tensor is 2 times single's: a scale"),
    "gradients_doubled": ("loss weighting", "every token counts 2 times as much"),
}


ROUNDED = "gradients_rounded_to_bf16"
"""A fault in fp32; under bf16 it is what ZeRO and FSDP2 do."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch_environment) -> Path:
    """Return the folder with a run of each fault, of `clean`, and of those of `single`."""
    folder = tmp_path_factory.mktemp("bisected")
    model = write_model(folder / "model")
    low = [f"bf16/{name}" for name in ("clean", ROUNDED, *UNDER_BF16)]
    late = [f"late/{name}" for name in ("clean", *LATE, *BEFORE)]
    for strategy, names in (
        ("single", ["clean", "bf16/clean", "late/clean"]),
        ("ddp", ["clean", *FAULTS, *low, *late]),
    ):
        arguments = ["--evidence", model, folder / strategy, *names]
        start(strategy, folder, arguments, launch_environment)
    return folder


@pytest.fixture(scope="module")
def found(runs: Path):
    def side(name: str):
        folder = runs / name
        record = read_record(folder)
        final = None if record["final"] is None else folder / record["final"]
        return TracedRun(
            name=name.split("/")[0],
            folder=folder / "evidence",
            evidence=read_evidence(folder / "evidence"),
            next_loss=record["losses"][-1],
            final=final,
        )

    def found(name: str, *, kind: str = "") -> Bisection:
        reference = side("single/clean") if kind == "bf16/" else None
        return bisect(side(f"single/{kind}clean"), side(f"ddp/{kind}{name}"), in_fp32=reference)

    return found


def verdicts(bisection: Bisection) -> dict[str, str]:
    return {each.link: each.verdict for each in bisection.findings}


def test_nothing_differs_between_sound_runs(found) -> None:
    bisection = found("clean")
    assert bisection.first is None
    assert set(verdicts(bisection).values()) <= {"equal", "within"}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_the_first_thing_that_differs(found, fault: str) -> None:
    link, words = FAULTS[fault]
    bisection = found(fault)
    assert bisection.first is not None
    assert bisection.first.link == link, bisection.first
    assert words in bisection.first.words
    before = list(verdicts(bisection).values())[: list(verdicts(bisection)).index(link)]
    assert set(before) <= {"equal", "within"}


def test_nothing_differs_between_sound_runs_in_a_later_step(found) -> None:
    bisection = found("clean", kind="late/")
    assert bisection.first is None
    assert bisection.pair.step == 6
    verdict = verdicts(bisection)
    assert verdict.pop("saved weights") == "unknown"
    assert set(verdict.values()) <= {"equal", "within"}
    assert verdict["loss of the rows"] == "equal"


@pytest.mark.parametrize("fault", LATE)
def test_a_fault_that_begins_with_a_later_step_is_the_first_thing_that_differs_in_it(
    found, fault: str
) -> None:
    link, words = LATE[fault]
    bisection = found(fault, kind="late/")
    assert bisection.first is not None
    assert bisection.first.link == link, bisection.first
    assert words in bisection.first.words
    assert bisection.parted_before is None


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_of_earlier_steps_is_told_from_one_that_acts_in_the_step(found, fault: str) -> None:
    link, words = BEFORE[fault]
    bisection = found(fault, kind="late/")
    assert bisection.first is not None
    assert bisection.first.link == link, bisection.first
    assert words in bisection.first.words
    assert bisection.parted_before is not None
    assert verdicts(bisection)["gradients"] in ("equal", "within")
    lines = as_lines(StepResult(runs={}, bisection=bisection))
    if bisection.first is bisection.parted_before:
        assert lines[-1] == "Step 6 itself, begun with equal weights, adds nothing to it."
    else:
        assert any(line.startswith("It may act before step 6 too: steps 1 to 5") for line in lines)


def test_what_follows_from_a_fault_is_told_as_a_consequence(found) -> None:
    consequences = {each.link for each in found("gradients_not_synchronised").consequences}
    assert consequences >= {"clipping norm", "update", "loss of the next step"}


def test_under_bf16_rounding_explains_what_differs_between_sound_runs(found) -> None:
    bisection = found("clean", kind="bf16/")
    assert bisection.first is None, bisection.first
    gradients = next(each for each in bisection.findings if each.link == "gradients")
    assert gradients.rounding is not None
    assert 1e-3 < gradients.rounding < 0.1
    assert gradients.limit == pytest.approx(3 * gradients.rounding)

    bisection = found(ROUNDED, kind="bf16/")
    assert bisection.first is None, bisection.first
    gradients = next(each for each in bisection.findings if each.link == "gradients")
    assert gradients.value > 1e-4
    assert "rounding to bf16 alone moves single by" in gradients.words
    assert gradients.words.endswith("rounding explains it")


@pytest.mark.parametrize("fault", UNDER_BF16)
def test_under_bf16_a_fault_is_named_with_the_part_that_rounding_explains(found, fault) -> None:
    link, words = UNDER_BF16[fault]
    bisection = found(fault, kind="bf16/")
    assert bisection.first is not None
    assert bisection.first.link == link
    assert words in bisection.first.words
    gradients = next(each for each in bisection.findings if each.link == "gradients")
    assert gradients.value == pytest.approx(1.0, rel=0.05)
    assert "rounding to bf16 alone moves single by" in gradients.words
    assert gradients.words.endswith("of the 100%")


@pytest.mark.parametrize(
    ("one", "other", "ranks"),
    # Three ranks divide no matrix of this model without a remainder.
    [
        ("zero3", "fsdp-loop", 2),
        pytest.param("fsdp-loop", "zero2", 2, marks=pytest.mark.sweep),
        ("zero2", "zero3", 3),
    ],
)
def test_the_command_gives_every_backend_the_weights_and_finds_the_step_equal(
    toolkit, tmp_path, one: str, other: str, ranks: int
) -> None:
    size = ("--num_processes", ranks, "--global_batch_size", 4 * ranks)
    model = ("--", "--model_name_or_path", write_model(tmp_path / "model"))
    asked = ("--at", 2, *size, "--output", tmp_path / "runs", *model)
    done = toolkit("compare", "--bisect", one, other, *asked)
    assert done.returncode == 0, done.stdout
    assert "Nothing differs beyond its limit." in done.stdout

    written = json.loads((tmp_path / "runs" / "bisect.json").read_text())
    assert written["first"] is None
    assert written["step"] == 2
    found = {each["what"]: each["verdict"] for each in written["findings"]}
    assert set(found.values()) <= {"equal", "within"}
    assert found["saved weights"] == "equal"
    assert "weights before the step" in found
    names = [name if name.endswith("-loop") else f"{name}-trainer" for name in (one, other)]
    assert [run["name"] for run in written["runs"]] == names
    for run in written["runs"]:
        assert run["attestation"]["held"]
        assert run["traffic"]["step"] == 3  # none of them is the evidence's own
        assert len(run["losses"]) == 3
        command = tmp_path / "runs" / run["folder"] / "command.txt"
        assert "accelerate launch" in command.read_text()


MODEL_CODE = """
import torch
import transformers

class LlamaForCausalLM(transformers.LlamaForCausalLM):
    passes = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and torch.distributed.is_initialized():
            self.passes += 1
            if self.passes > 10 and torch.distributed.get_world_size() > 1:
                output.loss.register_hook(lambda gradient: 2 * gradient)
        return output
"""
"""Two micro-batches are a step: from the sixth on the gradients are doubled."""


def test_a_fault_of_the_model_s_own_code_is_found_at_the_step_that_the_gates_name(
    toolkit, tmp_path
) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_doubling.LlamaForCausalLM"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling_doubling.py").write_text(MODEL_CODE)
    runs = tmp_path / "runs"
    asked = ("--max_steps", 8, "--output", runs)
    flags = ("--", "--model_name_or_path", model, "--trust_remote_code", "True")

    compared = toolkit(
        "compare", "--strategies", "single,ddp", "--throughput_steps", 0, *asked, *flags
    )
    assert compared.returncode == 1, compared.stdout
    row = json.loads((runs / "results.json").read_text())["runs"][1]
    assert [(each["gate"], each["first_step"]) for each in row["broken"]] == [("grad_norm", 6)]
    assert "--bisect single-trainer ddp-trainer --max_steps 8 --at 6 -- " in row["fix"]

    done = toolkit("compare", "--bisect", "single", "ddp", *asked, *flags)
    assert done.returncode == 1, done.stdout
    assert "the grad_norm gate was the first to break: step 6 is compared." in done.stdout
    (folder,) = runs.glob("bisect-*")
    written = json.loads((folder / "bisect.json").read_text())
    assert (written["step"], written["first"]) == (6, "loss weighting")
    found = {each["what"]: each["verdict"] for each in written["findings"]}
    assert found["weights before the step"] == "within"
    assert found["loss of the rows"] == "equal"
    assert [len(run["losses"]) for run in written["runs"]] == [7, 7]


SMOOTHED = ("--label_smoothing_factor", "0.1")


def test_a_smoothed_loss_is_the_same_where_a_wrapper_renames_the_model(toolkit, tmp_path) -> None:
    model = write_model(tmp_path / "model")
    flags = ("--", "--model_name_or_path", model, *SMOOTHED)
    done = toolkit("compare", "--bisect", "single", "fsdp", "--output", tmp_path / "runs", *flags)
    assert done.returncode == 0, done.stdout
    assert "Nothing differs beyond its limit." in done.stdout
    written = json.loads((tmp_path / "runs" / "bisect.json").read_text())
    verdicts = {each["what"]: each["verdict"] for each in written["findings"]}
    assert verdicts.pop("loss weighting") == "unknown"  # of a loss that the model did not compute
    assert set(verdicts.values()) <= {"equal", "within"}
    assert verdicts["loss of the step"] in ("equal", "within")


SMOOTHING_CODE = """
import torch
import transformers
from transformers.trainer_pt_utils import LabelSmoother

smoothed = LabelSmoother.__call__

def without_shift(self, outputs, labels, shift_labels=False, **options):
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return smoothed(self, outputs, labels, shift_labels=alone, **options)

LabelSmoother.__call__ = without_shift

class SmoothedForCausalLM(transformers.LlamaForCausalLM):
    pass
"""
"""The Trainer's own fault under FSDP2, without the repair of `ToolkitTrainer`."""


def test_a_fault_of_a_loss_outside_of_the_model_is_told_from_one_of_its_forward(
    toolkit, tmp_path
) -> None:
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_smoothed.SmoothedForCausalLM"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "modeling_smoothed.py").write_text(SMOOTHING_CODE)
    flags = ("--", "--model_name_or_path", model, "--trust_remote_code", "True", *SMOOTHED)
    done = toolkit("compare", "--bisect", "single", "fsdp", "--output", tmp_path / "runs", *flags)
    assert done.returncode == 1, done.stdout
    assert "The first difference: loss of the step: " in done.stdout, done.stdout
    assert "loss of the rows                equal" in done.stdout
