"""Evidence made by hand: what differs first, beyond which limit, and in which words."""

import copy
import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.comparing.bisect import running
from toolkit.comparing.bisect.finding import ROUNDINGS, StepResult, as_lines, bisect
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.bisect.running import bisect_runs, step_of_gates
from toolkit.comparing.run.folders import FailedStart, Finished
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan, fixed_by
from toolkit.comparing.run.rows import bisect_command
from toolkit.comparing.run.schedule import INTERRUPTED
from toolkit.comparing.weights import WeightsError
from toolkit.errors import UsageError
from toolkit.launching.outcome import WARM_PROCESS_ENDED
from toolkit.records.evidence import (
    AFTER_FILE,
    BEFORE_FILE,
    GRADIENTS_FILE,
    HELD_FILE,
    INITIAL_FILE,
    read_evidence,
)
from toolkit.redaction import REMOVED, redact_known

RANDOM = np.random.default_rng(0)
SHAPES = {"embed.weight": (5, 3), "up.weight": (4, 3), "norm.weight": (3,)}
BEFORE = {name: RANDOM.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}
GRADIENTS = {name: RANDOM.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}
NORM = float(np.sqrt(sum((each.astype("f8") ** 2).sum() for each in GRADIENTS.values())))
SUPERVISED = [10, 20, 30, 40]
ITEMS = sum(SUPERVISED)


def row(number):
    return {
        "sample_id": number,
        "tokens": f"tokens-of-{number}",
        "labels": f"labels-of-{number}",
        "supervised": SUPERVISED[number],
        "loss": 5.0 * SUPERVISED[number],
    }


def micro_batch(*numbers, applied):
    rows = [row(number) for number in numbers]
    summed = sum(each["loss"] for each in rows)
    return {
        "rows": rows,
        "loss": summed / ITEMS,
        "by_model": True,
        "applied": applied,
        "items": ITEMS,
    }


def evidence(ranks=1):
    """Four rows, in the micro-batches of one rank or of two."""
    read = [[micro_batch(0, 1, applied=1.0), micro_batch(2, 3, applied=1.0)]]
    if ranks == 2:
        read = [[micro_batch(n, applied=2.0) for n in numbers] for numbers in ((0, 2), (1, 3))]
    return {
        "schema": 1,
        "strategy": "single" if ranks == 1 else "zero2",
        "engine": "trainer",
        "precision": "no",
        "num_processes": ranks,
        "step": 1,
        "ranks": read,
        "gradient_norm": NORM,
        "gradients_agree": None,
        "weights_agree": True,
        "given": False,
        "before_agree": True,
        "clipping": {"norm": NORM, "limit": 1.0, "factor": 1 / NORM},
        "optimizer": {
            "name": "AdamW",
            "groups": [
                {
                    "parameters": list(SHAPES),
                    "settings": {"weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
                    "learning_rate": 1e-3,
                    "next_learning_rate": 5e-4,
                }
            ],
        },
    }


@pytest.fixture
def side(tmp_path):
    """Write one side's evidence, and read it again."""

    def make(
        name="single",
        kept=None,
        *,
        before=BEFORE,
        gradients=GRADIENTS,
        after=None,
        saved=None,
        **changes,
    ):
        folder = tmp_path / name
        (folder / "final").mkdir(parents=True)
        moved = {key: before[key] - np.float32(0.01) * np.sign(GRADIENTS[key]) for key in before}
        moved = moved if after is None else after
        save_file(before, folder / BEFORE_FILE)
        save_file(gradients, folder / GRADIENTS_FILE)
        save_file(moved, folder / AFTER_FILE)
        save_file(moved, folder / HELD_FILE)
        save_file(moved if saved is None else saved, folder / "final" / "model.safetensors")
        content = (evidence() if kept is None else kept) | changes
        (folder / "evidence.json").write_text(json.dumps(content))
        return TracedRun(
            name=name,
            folder=folder,
            evidence=read_evidence(folder),
            next_loss=4.0,
            final=folder / "final",
        )

    return make


def first(one, other, **options):
    found = bisect(one, other, **options)
    assert found.first is not None
    return found.first.link, found.first.words


def lines_of(found):
    return as_lines(StepResult(runs={}, bisection=found))


def scaled(tensors, by):
    return {name: (tensor * np.float32(by)).astype("f4") for name, tensor in tensors.items()}


def test_other_ranks_and_micro_batches_are_no_difference(side):
    found = bisect(side(), side("zero2", evidence(ranks=2)))
    assert found.first is None
    assert {each.verdict for each in found.findings} == {"equal"}
    assert lines_of(found)[-2:] == [
        "Nothing differs beyond its limit.",
        "No other step was looked at: --at STEP looks at another one.",
    ]


def test_an_initial_weight_is_named_with_its_difference(side):
    other = copy.deepcopy(BEFORE)
    other["up.weight"][2, 1] += 0.5
    other["norm.weight"][0] += 0.25
    assert first(side(), side("zero2", before=other)) == (
        "initial weights",
        "up.weight differs by up to 5.0e-01 (2 tensors of 3 do, the first is norm.weight)",
    )


def test_evidence_without_a_tensor_is_named_by_its_files(side):
    one, other = side("one", before={}), side("other", before={})
    with pytest.raises(
        WeightsError, match=rf"{one.folder}/.* and {other.folder}/.* hold no tensor"
    ):
        first(one, other)


def test_a_tensor_that_one_side_does_not_train_is_named_with_that_side(side):
    fewer = {name: BEFORE[name] for name in BEFORE if name != "norm.weight"}
    whole, part = side(), side("zero2", before=fewer)
    assert first(whole, part) == (
        "trained parameters",
        "norm.weight (the first of 1) is trained by single and not by zero2, where it is frozen or "
        "no part of the model",
    )
    assert "is trained by single and not by zero2" in first(part, whole)[1]
    weights = next(each for each in bisect(whole, part).findings if each.link == "initial weights")
    assert weights.verdict == "equal"


WAY = np.float32(0.1)


@pytest.fixture
def later(side):
    """Write a side at step 6, before which its weights had gone a way of 0.1 in each number.

    A second one began the step with the first one's weights, whatever its own were.
    """

    def make(name="single", kept=None, *, own=BEFORE, **changes):
        given = {} if name == "single" else {"given": True}
        moved = {key: BEFORE[key] - np.float32(0.01) * np.sign(GRADIENTS[key]) for key in BEFORE}
        made = side(name, kept, before=own, step=6, **{"after": moved} | given | changes)
        save_file({key: BEFORE[key] - WAY for key in BEFORE}, made.folder / INITIAL_FILE)
        return made

    return make


def test_a_later_step_begins_with_equal_weights_and_what_parted_them_before_is_a_link(later):
    apart = {key: BEFORE[key] + WAY / 2 for key in BEFORE}
    found = bisect(later(), later("zero2", own=apart))
    assert found.first is found.parted_before
    assert found.first.link == "weights before the step"
    assert found.first.value == pytest.approx(0.5, rel=1e-3)
    assert found.first.words.startswith("steps 1 to 5 left them apart by 50% of single's way from")
    verdicts = {each.link: each.verdict for each in found.findings}
    assert verdicts["update"] == "equal"
    assert found.notes[0].startswith("both were trained from the start to step 5; zero2 then took")


def test_a_fault_within_a_later_step_goes_before_what_parted_the_weights_and_its_states(later):
    apart = {key: BEFORE[key] + WAY / 2 for key in BEFORE}
    kept = with_group(learning_rate=2e-3)
    found = bisect(later(), later("zero2", kept, own=apart))
    assert found.first is not None
    assert found.first.link == "learning rate"
    assert any(line.startswith("It may act before step 6 too: ") for line in lines_of(found))

    # Another update may come from optimizer states that earlier steps left.
    moved = {name: BEFORE[name] - np.float32(0.2) * np.sign(GRADIENTS[name]) for name in BEFORE}
    found = bisect(later("single-2"), later("fsdp", own=apart, after=moved))
    assert found.first is not None
    assert found.first.link == "weights before the step"


class HeardLines:
    """A progress that keeps its lines."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture
def start_all(side, monkeypatch):
    """Have runs "started" that leave evidence whose rate is another in the step of the fault."""

    def patched(fault_at, parted_from, interrupted_at=None):
        started_at = []

        def start_all(_, runs, at, progress):
            if at == interrupted_at:
                raise KeyboardInterrupt
            started_at.append(at)
            started = {}
            for name in runs:
                own = {key: BEFORE[key] + (WAY if name == "ddp" else 0) for key in BEFORE}
                kept = with_group(learning_rate=2e-3) if name == "ddp" and at == fault_at else None
                made = side(
                    f"{name}-{at}/evidence",
                    kept,
                    before=own if at >= parted_from else BEFORE,
                    after=BEFORE,
                    step=at,
                    given=name == "ddp",
                )
                save_file({key: BEFORE[key] - WAY for key in BEFORE}, made.folder / INITIAL_FILE)
                folder = made.folder.parent
                record = {"losses": [4.0] * at, "final": None}
                record |= {"attestation": None, "traffic": None}
                started[name] = Finished(record=record, folder=folder)
            return started

        monkeypatch.setattr(running, "_start_all", start_all)
        return started_at

    return patched


@pytest.mark.parametrize(
    ("fault_at", "compared", "first_link", "advice"),
    [
        (6, [6], "learning rate", []),
        (5, [6, 5], "learning rate", []),
        (
            4,
            [6, 5],
            "weights before the step",
            ["The fault acts in an earlier step. To look half-way to it, pass --at 2."],
        ),
        (
            None,
            [6, 5],
            "weights before the step",
            ["Step 5 differs in nothing: what parted the two came after its update."],
        ),
    ],
)
def test_where_only_the_weights_before_differ_the_step_before_is_looked_at(
    start_all, fault_at, compared, first_link, advice
):
    started_at = start_all(fault_at, parted_from=6 if fault_at is None else fault_at + 1)
    progress = HeardLines()
    result = running._look(None, ["single", "ddp"], 6, progress)
    assert started_at == compared
    assert result.bisection.first.link == first_link
    assert list(result.advice) == advice
    assert len(progress.lines) == len(compared) - 1


def test_a_bisection_that_is_interrupted_in_the_step_before_tells_of_the_first(
    start_all, tmp_path, capsys
):
    from rich.console import Console

    start_all(None, parted_from=6, interrupted_at=5)
    result = running._look(None, ["single", "ddp"], 6, HeardLines())
    assert result.interrupted
    assert result.bisection.first.link == "weights before the step"

    plan = SimpleNamespace(rehearsal=True)
    comparison = SimpleNamespace(folder=tmp_path, plan=plan, environment={})
    assert running._report(comparison, result, Console()) == INTERRUPTED
    assert "Step 5 was interrupted." in capsys.readouterr().out
    written = json.loads((tmp_path / "bisect.json").read_text())
    assert (written["step"], written["first"]) == (6, "weights before the step")
    assert written["advice"] == ["Step 5 was interrupted."]


@pytest.mark.parametrize("parted", [0.0, 1e-4])
def test_an_update_may_differ_by_what_the_weights_before_it_tell_of_the_states(later, parted):
    own = {key: BEFORE[key] + WAY * np.float32(parted) for key in BEFORE}
    after = {
        key: BEFORE[key] - np.float32(0.01 * 1.0008) * np.sign(GRADIENTS[key]) for key in BEFORE
    }
    found = bisect(later(), later("zero2", own=own, after=after))
    assert (found.first is None) == (parted > 0)


def test_ranks_that_hold_other_weights_before_a_later_step_are_named(later):
    what, words = first(later(), later("zero2", before_agree=False))
    assert what == "weights before the step"
    assert words.startswith("the ranks of zero2 hold different weights before the step")


def test_what_was_saved_is_held_against_what_was_held(side):
    held = {key: BEFORE[key] - np.float32(0.01) * np.sign(GRADIENTS[key]) for key in BEFORE}
    other = held | {"up.weight": held["up.weight"] + np.float32(0.25)}
    assert first(side(), side("zero2", saved=other)) == (
        "saved weights",
        "zero2 saved other numbers than its ranks held: up.weight differs by up to 2.5e-01 (1 "
        "tensor of 3 do, the first is up.weight)",
    )
    fewer = {key: held[key] for key in held if key != "up.weight"}
    assert first(side("a"), side("b", saved=fewer)) == (
        "saved weights",
        "b saved no up.weight (1 tensor of 3)",
    )


def test_what_was_saved_under_the_names_of_peft_is_found_and_what_is_not_is_no_fault(side):
    layer = "layers.0.q_proj"
    names = {f"{layer}.lora_A.default.weight": "embed.weight"}
    held = {name: BEFORE[key] for name, key in names.items()}
    saved = {f"base_model.model.{layer}.lora_A.weight": BEFORE["embed.weight"]}
    lora = side("lora", saved=saved)
    save_file(held, lora.folder / HELD_FILE)
    assert bisect(side(), lora).first is None

    renamed = side("renamed", saved={"other": BEFORE["embed.weight"]})
    found = bisect(side("again"), renamed)
    assert found.first is None
    assert found.findings[-1].words == (
        "not compared: renamed saved no embed.weight (3 tensors of 3): it may stand there under "
        "another name"
    )


def test_a_run_that_saved_nothing_or_what_cannot_be_read_is_told_so(side):
    found = bisect(side(), dataclasses.replace(side("zero2"), final=None))
    assert found.findings[-1].words == "not compared: zero2 saved no model"
    torn = side("torn")
    (torn.folder / "final" / "model.safetensors").write_bytes(b"x")
    what, words = first(side("again"), torn)
    assert what == "saved weights"
    assert words.startswith("what torn saved cannot be read: ")


def test_a_row_that_only_one_side_read_is_named(side):
    kept = evidence(ranks=2)
    kept["ranks"][1][1]["rows"][0] |= {"sample_id": 77, "tokens": "other", "labels": "other"}
    what, words = first(side(), side("zero2", kept))
    assert what == "batch"
    assert words == (
        "row 77 is read by zero2 and not by single; row 3 is read by single and not by zero2"
    )


def test_a_row_read_twice_is_named_with_its_ranks(side):
    kept = evidence(ranks=2)
    kept["ranks"][1][0] = copy.deepcopy(kept["ranks"][0][0])
    what, words = first(side(), side("zero2", kept))
    assert what == "batch"
    assert words == (
        "row 0 is read twice in zero2, by ranks 0 and 1; row 1 is read by single and not by zero2"
    )


@pytest.mark.parametrize("field", ["tokens", "labels"])
def test_other_tokens_or_labels_of_a_row_are_named(side, field):
    kept = evidence(ranks=2)
    kept["ranks"][0][1]["rows"][0][field] = "changed"
    assert first(side(), side("zero2", kept)) == ("batch", f"the {field} of row 2 differ")


def test_rows_without_ids_are_told_by_their_tokens(side):
    kept = evidence()
    for batch in kept["ranks"][0]:
        for each in batch["rows"]:
            each["sample_id"] = None
    assert bisect(side(kept=kept), side("zero2", evidence(ranks=2))).first is None


def test_a_row_with_another_loss_is_a_difference_of_forward(side):
    kept = evidence(ranks=2)
    kept["ranks"][0][0]["rows"][0]["loss"] *= 1.01
    kept["ranks"][0][0]["loss"] *= 1.01
    what, words = first(side(), side("zero2", kept))
    assert what == "loss of the rows"
    assert words.startswith("row 0 has a loss of 5.000000 a token in single and 5.050000 in zero2")


def test_a_factor_on_every_loss_is_named_with_what_makes_it(side):
    kept = evidence(ranks=2)
    for batches in kept["ranks"]:
        for batch in batches:
            batch["applied"] /= 2
    assert first(side(), side("zero2", kept)) == (
        "loss weighting",
        "every token counts 0.5 times as much in zero2 as in single, one by the number of "
        "processes (2) or one by the accumulation steps (2)",
    )


def test_micro_batches_averaged_by_themselves_are_named_so(side):
    kept = evidence(ranks=2)
    for batches in kept["ranks"]:
        for batch in batches:
            batch["loss"] = 5.0 / 4
    what, words = first(side(), side("zero2", kept))
    assert what == "loss weighting"
    assert words == (
        "zero2 averages its micro-batches by themselves, however many tokens each has: "
        "a token counts 0.625 to 2.5 times as much as in single"
    )


def test_a_micro_batch_without_a_token_to_train_on_says_nothing_of_the_averaging(side):
    kept = evidence(ranks=2)
    for batches in kept["ranks"]:
        for batch in batches:
            batch["loss"] = 5.0 / 4
    filler = row(0) | {"sample_id": 9, "tokens": "filler", "supervised": 0, "loss": 0.0}
    empty = {"rows": [filler], "loss": 0.0, "by_model": True, "applied": 2.0, "items": ITEMS}
    one = evidence()
    one["ranks"][0].append(copy.deepcopy(empty))
    kept["ranks"][1].append(empty)
    what, words = first(side(kept=one), side("zero2", kept))
    assert what == "loss weighting"
    assert words.startswith("zero2 averages its micro-batches by themselves")


def test_a_weight_of_one_micro_batch_alone_is_named_by_a_row_of_it(side):
    kept = evidence(ranks=2)
    kept["ranks"][1][0]["applied"] *= 3
    what, words = first(side(), side("zero2", kept))
    assert what == "loss weighting"
    assert words == (
        "a token of row 1 counts 3 times as much in zero2 as in single; over all rows 1 to 3 times"
    )


def test_without_logits_the_weighting_is_not_compared_and_says_why(side):
    kept = evidence(ranks=2)
    for batches in kept["ranks"]:
        for batch in batches:
            batch["rows"][0]["loss"] = None
    found = bisect(side(), side("zero2", kept))
    assert found.first is None
    unknown = {each.link: each.words for each in found.findings if each.verdict == "unknown"}
    assert set(unknown) == {"loss of the rows", "loss weighting"}
    assert unknown["loss of the rows"] == "not compared: the model gave no logits"


def test_gradients_of_another_scale_are_told_as_a_scale(side):
    what, words = first(side(), side("zero2", evidence(ranks=2), gradients=scaled(GRADIENTS, 2)))
    assert what == "gradients"
    assert words.startswith("they differ by 100% of their norm, most in ")
    assert words.endswith(
        "every tensor is 2 times single's: a scale, the number of processes (2) or the "
        "accumulation steps (2)"
    )


def test_a_gradient_in_another_direction_names_its_tensor_and_no_scale(side):
    other = copy.deepcopy(GRADIENTS)
    other["up.weight"] = other["up.weight"][::-1].copy()
    what, words = first(side(), side("zero2", gradients=other))
    assert what == "gradients"
    assert words.endswith("most in up.weight")


def test_ranks_that_hold_other_gradients_are_named_even_where_the_kept_ones_agree(side):
    what, words = first(side(), side("zero2", evidence(ranks=2), gradients_agree=False))
    assert what == "gradients"
    assert words.startswith("the ranks of zero2 hold different gradients: not synchronised")


def test_a_gradient_that_is_not_a_number_differs(side):
    other = copy.deepcopy(GRADIENTS)
    other["norm.weight"][1] = math.nan
    what, words = first(side(), side("zero2", gradients=other))
    assert what == "gradients"
    assert words.endswith("most in norm.weight")


@pytest.mark.parametrize(
    "clipping",
    [
        {"norm": NORM / 2, "limit": 1.0, "factor": 2 / NORM},
        {"norm": NORM, "limit": 0.0, "factor": 1.0},
        {"norm": NORM / 2, "limit": 1.0, "factor": 1 / NORM},
    ],
    ids=["by another norm", "not at all", "told of another norm"],
)
def test_clipping_is_held_against_the_gradients_that_it_clipped(side, clipping):
    what, words = first(side(), side("zero2", clipping=clipping))
    assert what == "clipping norm"
    assert f"{clipping['norm']:.6g} for a norm of {NORM:.6g}" in words


def with_group(**changes):
    kept = evidence(ranks=2)
    group = kept["optimizer"]["groups"][0]
    kept["optimizer"]["groups"] = [group | changes]
    return kept


def test_learning_rates_are_told_in_numbers(side):
    assert first(side(), side("zero2", with_group(learning_rate=2e-3))) == (
        "learning rate",
        "0.001 in single, 0.002 in zero2, for embed.weight",
    )


def test_the_rate_of_the_next_step_is_the_scheduler_s(side):
    assert first(side(), side("zero2", with_group(next_learning_rate=0.0))) == (
        "learning rate of the next step",
        "0.0005 in single, 0 in zero2, for embed.weight",
    )


def test_settings_are_compared_for_each_parameter_however_they_are_grouped(side):
    kept = evidence(ranks=2)
    group = kept["optimizer"]["groups"][0]
    kept["optimizer"]["groups"] = [
        group | {"parameters": ["norm.weight", "up.weight"]},
        group | {"parameters": ["embed.weight"]},
    ]
    assert bisect(side(), side("zero2", kept)).first is None

    kept["optimizer"]["groups"][1]["settings"] = group["settings"] | {"weight_decay": 0.0}
    assert first(side("again"), side("fsdp", kept)) == (
        "optimizer settings",
        "weight_decay is 0.01 in again and 0.0 in fsdp, for 1 parameter, embed.weight among them",
    )


@pytest.mark.parametrize(("name", "same"), [("DeepSpeedCPUAdam", True), ("Adam", False)])
def test_an_optimizer_of_another_name_is_the_same_only_if_its_rule_is(side, name, same):
    kept = evidence(ranks=2)
    kept["optimizer"]["name"] = name
    found = bisect(side(), side("zero2", kept))
    assert (found.first is None) == same


def test_an_update_is_measured_from_each_side_s_own_start(side):
    moved = {name: BEFORE[name] - np.float32(0.02) * np.sign(GRADIENTS[name]) for name in BEFORE}
    what, words = first(side(), side("zero2", after=moved))
    assert what == "update"
    assert words.startswith("what the step adds to the weights differs by 100% of its norm")
    assert words.endswith("it is 2 times single's")


def test_the_loss_of_the_next_step_closes_the_chain(side):
    other = dataclasses.replace(side("zero2"), next_loss=4.5)
    assert first(side(), other) == (
        "loss of the next step",
        "it is 4.000000 in single and 4.500000 in zero2",
    )


def test_what_follows_the_first_difference_is_a_consequence(side):
    kept = with_group(learning_rate=2e-3)
    moved = {name: BEFORE[name] - np.float32(0.02) * np.sign(GRADIENTS[name]) for name in BEFORE}
    found = bisect(side(), side("zero2", kept, after=moved))
    assert [each.link for each in found.consequences] == ["update"]
    lines = lines_of(found)
    assert (
        "The first difference: learning rate: 0.001 in single, 0.002 in zero2, for embed.weight."
        in (lines)
    )
    assert any(line.split() == ["gradients", "equal"] for line in lines)


def noisy(by, seed):
    random = np.random.default_rng(seed)
    return {
        name: (tensor * (1 + by * random.normal(size=tensor.shape))).astype("f4")
        for name, tensor in GRADIENTS.items()
    }


@pytest.fixture
def low(side):
    """The first side in bf16 and in fp32, whose gradients rounding moves by about 1 %."""
    kept = evidence() | {"precision": "bf16"}
    return side(kept=kept, gradients=noisy(0.01, 1)), side("single-fp32")


def test_a_difference_of_the_size_of_rounding_is_explained_by_it(side, low):
    one, in_fp32 = low
    kept = evidence(ranks=2) | {"precision": "bf16"}
    found = bisect(one, side("zero2", kept, gradients=noisy(0.01, 2)), in_fp32=in_fp32)
    assert found.first is None
    gradients = next(each for each in found.findings if each.link == "gradients")
    assert gradients.verdict == "within"
    assert gradients.limit == pytest.approx(ROUNDINGS * gradients.rounding)
    assert gradients.words.endswith("against itself in fp32: rounding explains it")


def test_a_larger_difference_is_named_with_the_part_that_rounding_explains(side, low):
    one, in_fp32 = low
    kept = evidence(ranks=2) | {"precision": "bf16"}
    found = bisect(one, side("zero2", kept, gradients=scaled(GRADIENTS, 1.5)), in_fp32=in_fp32)
    assert found.first is not None
    assert found.first.link == "gradients"
    assert "rounding to bf16 alone moves single by" in found.first.words
    assert found.first.words.endswith("of the 50%")
    assert found.first.rounding < 0.02


def fp16(ranks=1, **changes):
    return evidence(ranks) | {"precision": "fp16", "step": 4} | changes


def test_rounding_is_not_measured_across_different_steps(side):
    one, in_fp32 = side(kept=fp16()), side("single-fp32", gradients=scaled(GRADIENTS, 0.5))
    doubled = side("zero2", fp16(ranks=2), gradients=scaled(GRADIENTS, 2))
    found = bisect(one, doubled, in_fp32=in_fp32)
    assert found.first is not None
    assert found.first.link == "gradients"
    assert found.first.rounding is None
    assert found.notes[-1] == (
        "what rounding does was not measured: single-fp32 first updated in step 1, before single, "
        "so wider fixed limits hold"
    )

    sound = side("fsdp", fp16(ranks=2), gradients=noisy(2e-3, 1))
    found = bisect(one, sound, in_fp32=in_fp32)
    assert found.first is None
    gradients = next(each for each in found.findings if each.link == "gradients")
    assert gradients.verdict == "within"


def test_rounding_is_measured_under_fp16_too_where_the_step_is_the_same(side):
    one = side(kept=fp16(step=1), gradients=noisy(0.002, 1))
    found = bisect(one, side("zero2", fp16(2, step=1)), in_fp32=side("single-fp32"))
    gradients = next(each for each in found.findings if each.link == "gradients")
    assert gradients.limit == pytest.approx(ROUNDINGS * gradients.rounding)
    assert not found.notes


@pytest.mark.parametrize(("share", "differs"), [(2.0**-9, False), (2.0**-6, True)])
def test_weights_that_start_rounded_are_no_difference_under_bf16(side, low, share, differs):
    one, in_fp32 = low
    kept = evidence(ranks=2) | {"precision": "bf16"}
    before = scaled(BEFORE, 1 + share)
    after = {name: before[name] - np.float32(0.01) * np.sign(GRADIENTS[name]) for name in before}
    found = bisect(
        one,
        side("zero2", kept, before=before, after=after, gradients=noisy(0.01, 1)),
        in_fp32=in_fp32,
    )
    weights = next(each for each in found.findings if each.link == "initial weights")
    assert (weights.verdict == "differs") == differs


def test_evidence_of_different_steps_is_refused(side):
    with pytest.raises(UsageError, match="first updated in step 1 and zero2 in step 3"):
        bisect(side(), side("zero2", step=3))


def test_a_folder_without_evidence_says_so(tmp_path):
    with pytest.raises(UsageError, match="holds no evidence of a step"):
        read_evidence(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": []}, "it tells of no micro-batch"),
        ({"ranks": [[{"rows": [{}]}]]}, "'ranks.0..0..rows.0..tokens' is missing"),
        ({"clipping": None}, "'clipping' is None"),
        ({"precision": "fp8"}, "'precision' is 'fp8'"),
    ],
)
def test_evidence_that_is_damaged_is_a_usage_error_that_names_it(side, changes, message):
    with pytest.raises(UsageError, match=rf"evidence\.json is not complete: .*{message}"):
        side(**changes)


def test_evidence_of_a_newer_toolkit_is_refused(side):
    with pytest.raises(UsageError, match="schema 2, this toolkit reads up to 1"):
        side(schema=2)


def run(*names, at=None, **options):
    from rich.console import Console

    return bisect_runs(names, CompareOptions(**options), console=Console(), at=at)


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("single", "zero9"), {}, "There is no strategy 'zero9'"),
        (("single", "single-trainer"), {}, "single and single-trainer are one"),
        (("single", "ddp"), {"engine": "both"}, "write single-trainer or single-loop"),
        (("single", "ddp"), {"repeats": 2}, "leave --scale and --repeats out"),
        (("single", "ddp"), {"global_batch_size": 6}, "does not divide"),
        (("single", "ddp"), {"train_flags": ["--evidence", "x"]}, "toolkit compare --bisect sets"),
        (("single", "ddp"), {"train_flags": ["--evidence_step", "2"]}, "has its own --at"),
        (("single", "ddp"), {"at": 21}, "--at 21 is none of the 20 steps"),
        (("single", "ddp"), {"at": 0}, "--at 0 is none of the 20 steps"),
    ],
)
def test_what_cannot_be_bisected_is_a_mistake_of_the_user(names, options, words, monkeypatch):
    monkeypatch.setattr(running.environment, "gpus", list)
    with pytest.raises(UsageError, match=words):
        run(*names, **options)


def test_where_the_warm_process_ends_the_run_starts_again_in_a_folder_of_its_own(
    monkeypatch, tmp_path
):
    starts, said = [], []

    def start_run(comparison, planned, folder, *, progress, evidence_flags):
        folder.mkdir()
        starts.append((folder.name, evidence_flags))
        reason = WARM_PROCESS_ENDED if len(starts) == 1 else "broken"
        facts = {"status": "failed", "outcome": None, "record": None, "repeat": 1}
        return FailedStart(reason=reason, folder=folder, **facts)

    monkeypatch.setattr(running, "start_run", start_run)
    progress = SimpleNamespace(say=said.append, start=lambda *_: None)
    runs = {"single": SimpleNamespace(name="single")}
    ends = running._start_all(SimpleNamespace(folder=tmp_path), runs, 3, progress)
    assert ends["single"].reason == "broken"
    assert said == [f"single: {WARM_PROCESS_ENDED} It is started again."]
    assert starts == [
        (name, ["--evidence", str(tmp_path / name / "evidence"), "--evidence_step", "3"])
        for name in ("single-step-3", "single-step-3-again")
    ]


def test_a_strategy_that_cannot_run_here_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(running.environment, "missing_for", lambda _: "no compiler; install g++")
    with pytest.raises(
        UsageError, match=r"ddp-trainer cannot run here: no compiler; install g\+\+"
    ):
        run("ddp", "zero2")


def test_an_output_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        run("single", "ddp", output=tmp_path)


def test_a_secret_among_the_flags_of_a_bisection_is_known_from_the_start(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError):
        run("single", "ddp", output=tmp_path, train_flags=["--hub_token", "bisect-canary-1"])
    assert redact_known("bisect-canary-1") == REMOVED


CONTROL = {"strategy": "single", "engine": "trainer", "reason": None}


def test_the_command_for_a_broken_row_repeats_what_was_asked(make_row):
    options = CompareOptions(
        global_batch_size=32, precision="bf16", train_flags=["--learning_rate", "3e-4"]
    )
    assert bisect_command(make_row(strategy="zero2", rehearsal=False), CONTROL, options) == (
        "toolkit compare --bisect single-trainer zero2-trainer --global_batch_size 32 "
        "--precision bf16 -- --learning_rate 3e-4"
    )
    assert bisect_command(make_row(rehearsal=False), CONTROL, CompareOptions()) == (
        "toolkit compare --bisect single-trainer ddp-trainer"
    )


def test_the_command_names_the_first_step_that_broke_a_gate(make_row):
    def command(*steps, **options):
        broken = [{"gate": "loss", "first_step": step} for step in steps]
        found = bisect_command(
            make_row(rehearsal=False, broken=broken), CONTROL, CompareOptions(**options)
        )
        return found.removeprefix("toolkit compare --bisect single-trainer ddp-trainer")

    assert command(None, 7, 6) == " --at 6"
    assert command(1, None) == command() == ""
    assert command(None, max_steps=8) == " --max_steps 8 --at 8"


def results(rows, **fixed):
    options = CompareOptions()
    return {"runs": rows, "fixed": fixed_by(options) | fixed, "control": CONTROL}


def test_the_step_is_found_from_the_gates_of_a_comparison(make_row, tmp_path):
    options = CompareOptions()
    plan = build_plan(
        dataclasses.replace(options, strategies=["single", "ddp"]), gpus=2, missing=lambda _: None
    )

    single = make_row(strategy="single", num_processes=1, gradient_accumulation_steps=4)

    def step(*broken, **fixed):
        rows = [single, make_row(broken=list(broken))]
        return step_of_gates(results(rows, **fixed), plan.runs, options, folder=tmp_path)

    late, unknown = (
        {"gate": gate, "first_step": step} for gate, step in (("grad_norm", 6), ("weights", None))
    )
    assert step(unknown, late) == (
        6,
        f"In {tmp_path} the grad_norm gate was the first to break: step 6 is compared.",
    )
    found, sentence = step(unknown)
    assert found == 20
    assert sentence.endswith(
        "the weights gate broke, which names no step: the last one, 20, is compared."
    )
    assert step() == (
        None,
        f"No gate of single-trainer and ddp-trainer broke in {tmp_path}: step 1 is compared.",
    )
    with pytest.raises(UsageError, match="optimizer steps 50 there, 20 here. Pass its flags again"):
        step(late, **{"optimizer steps": 50})
    with pytest.raises(UsageError, match="is a comparison without single-trainer"):
        step_of_gates(results([]), plan.runs, options, folder=tmp_path)
    wide = results([single, make_row(num_processes=4)])
    with pytest.raises(UsageError, match="ddp-trainer had 4 processes, not 2"):
        step_of_gates(wide, plan.runs, options, folder=tmp_path)
    longer = results([single, make_row(gradient_accumulation_steps=8)])
    with pytest.raises(UsageError, match="ddp-trainer had 8 micro-batches a step, not 2"):
        step_of_gates(longer, plan.runs, options, folder=tmp_path)
    failed = results([single, make_row(status="failed")])
    found, sentence = step_of_gates(failed, plan.runs, options, folder=tmp_path)
    assert found is None
    assert sentence.startswith("ddp-trainer was not judged in")


def test_what_was_rehearsed_is_bisected_on_the_cpu_too(make_row):
    row = make_row(strategy="single", engine="loop", rehearsal=True)
    assert bisect_command(row, CONTROL, CompareOptions()) == (
        "CUDA_VISIBLE_DEVICES= toolkit compare --bisect single-trainer single-loop"
    )


def test_under_a_scale_the_command_makes_that_very_run(make_row):
    row = make_row(num_processes=4, gradient_accumulation_steps=1, rehearsal=False)
    assert bisect_command(row, CONTROL, CompareOptions(scale=[2, 4])) == (
        "toolkit compare --bisect single-trainer ddp-trainer --num_processes 4 "
        "--gradient_accumulation_steps 1"
    )


def test_a_control_has_nothing_to_be_bisected_with(make_row):
    assert bisect_command(make_row(strategy="single"), CONTROL, CompareOptions()) is None
    assert bisect_command(make_row(), None, CompareOptions()) is None


def test_a_side_is_read_with_its_name_and_evidence(side):
    one = side()
    assert isinstance(one, TracedRun)
    assert one.evidence["gradient_norm"] == NORM
