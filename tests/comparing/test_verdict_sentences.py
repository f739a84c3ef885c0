"""The verdict says what the data say, and no more than the noise allows."""

import pytest

from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.sections.agreement import limits
from toolkit.comparing.report.verdict import broken_lines, verdict

REPEATED = {"share": 0.03, "basis": "repeats", "repeats": 3}


@pytest.fixture
def on_gpus(make_results, make_row):
    """A control, and runs of these speeds beside it."""

    def make(*speeds, noise=REPEATED, **changes):
        names = ("ddp", "fsdp", "zero2", "zero3")
        rows = [
            make_row(
                strategy=name,
                tokens_per_second=speed,
                rehearsal=False,
                memory=make_row()["memory"] | {"peak_bytes": number * 2**30},
            )
            for number, (name, speed) in enumerate(zip(names, speeds, strict=False), start=1)
        ]
        results = make_results(*rows, rehearsal=False, noise=noise, **changes)
        results["runs"][0] |= {"tokens_per_second": 400.0, "rehearsal": False}
        return results

    return make


@pytest.mark.parametrize(("share", "said"), [(0.0199, "was the fastest"), (0.0201, "too near")])
def test_the_noise_is_a_share_of_the_slower(on_gpus, share, said):
    noise = REPEATED | {"share": share}
    assert said in verdict(on_gpus(1020.0, 1000.0, noise=noise))


def test_a_rehearsal_speaks_of_counted_tensors_and_of_no_speed(full_results):
    text = verdict(full_results())
    assert "fsdp-trainer-x4 needed the least memory: 0.30 GiB a process at its peak" in text
    assert "fastest" not in text


def test_offloaded_states_on_a_cpu_make_nobody_the_largest(full_results):
    results = full_results()
    results["runs"][1] |= {"strategy": "zero2_offload"}
    results["runs"][1]["peak"] |= {"total_bytes": 2**34}
    for row in results["runs"]:  # else all are compared with DDP
        row["strategy"] = row["strategy"].replace("ddp", "zero1")
    assert "75% less than single-trainer." in verdict(results)
    for row in results["runs"]:
        row["strategy"] = "fsdp_offload"
    assert "the least memory" not in verdict(results)


def test_without_a_control_it_says_that_nothing_was_judged(make_results, make_row):
    text = verdict(make_results(make_row(), control=None))
    assert "no run could be judged, there is no control" in text.lower()


def test_what_looks_the_same_is_not_called_least_and_most(on_gpus):
    results = on_gpus(1000.0, 2000.0)
    for row in results["runs"]:
        row["memory"] = row["memory"] | {"peak_bytes": 2**33 + row["num_processes"]}
    assert "needed the least" not in verdict(results)


def test_who_ran_out_of_memory_is_not_just_said_to_have_failed(full_results):
    text = verdict(full_results())
    assert "zero3-trainer ran out of memory" in text
    assert "zero3-trainer failed" not in text


def test_what_helps_stands_beside_the_gate_that_broke(make_results, make_row):
    broken = {
        **{"strategy": "ddp", "engine": "trainer", "gate": "loss", "first_step": 3},
        "name": "ddp-trainer",
        **{"value": 1.0, "limit": 1e-5, "reason": "loss apart from the control's"},
    }
    fix = "toolkit compare --bisect ddp"
    row = make_row(gates={"loss": False}, broken=[broken], fix=fix)
    (line,) = broken_lines(make_results(row))
    assert "the loss gate broke at step 3" in line
    assert line.endswith(f"What helps: {fix}")


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (REPEATED, "under 3.0% mean nothing (95% confidence): measured from 3 starts of each run"),
        ({"share": 0.12, "basis": "steps", "repeats": 1}, "under 12% mean nothing"),
        ({"share": 0.12, "basis": "steps", "repeats": 1}, "--repeats 3 measures that"),
        (None, "was not measured: no run was started twice"),
    ],
)
def test_the_limit_of_speed_is_what_was_measured(on_gpus, noise, said):
    why = {} if noise else {"not_measured": {"noise": "no run was started twice"}}
    assert said in " ".join(limits(on_gpus(1000.0, noise=noise, **why)))


def test_runs_of_unlike_numbers_of_starts_are_not_said_to_have_the_same(on_gpus, make_row):
    results = on_gpus(1000.0, 2000.0, noise=REPEATED | {"repeats": 1})
    start = {"tokens_per_second": 1000.0}
    for row, count in zip(results["runs"], (2, 1, 0), strict=True):
        row["repeats"] = [start] * count
    assert "measured from runs started 1 to 2 times." in limits(results)[0]
    results["runs"][1]["repeats"] = [start] * 2
    assert "measured from 2 starts of each run." in limits(results)[0]


def one_sentence(text):
    return text.endswith(".") and ". " not in text


def test_the_verdict_of_a_rehearsal_is_one_sentence_without_speed(make_results, make_row):
    peaks = {"ddp": 200, "fsdp": 100}
    rows = [
        make_row(strategy=name, peak={"total_bytes": size * 2**20, "categories": {}})
        for name, size in peaks.items()
    ]
    text = verdict(for_readers(make_results(*rows)))
    assert text == (
        "All 3 runs trained the same model, and fsdp needed the least memory: 100.0 MiB a process "
        "at its peak, 50% less than ddp."
    )


def test_smallest_states_and_lowest_peak_are_both_named_where_they_differ(make_results, make_row):
    sizes = {"ddp": (20, 200), "zero3": (8, 100), "fsdp": (4, 110)}
    rows = [
        make_row(
            strategy=name,
            peak={"total_bytes": peak * 2**20, "categories": {}},
            memory=make_row()["memory"] | {"optimizer_bytes": states * 2**20},
        )
        for name, (states, peak) in sizes.items()
    ]
    results = for_readers(make_results(*rows))
    assert verdict(results) == (
        "All 4 runs trained the same model, and fsdp held the smallest states (11.6 MiB a "
        "process), while zero3 had the lowest peak (100.0 MiB, 50% less than ddp)."
    )


@pytest.mark.parametrize(
    ("speeds", "noise", "said"),
    [
        ((1000.0, 2000.0), REPEATED, "fsdp was the fastest"),
        ((1000.0, 1001.0), REPEATED, "fsdp and ddp were the fastest, too near to tell apart"),
        ((1000.0, 2000.0), None, "fsdp had the most tokens a second, which may be chance"),
    ],
)
def test_on_gpus_the_verdict_names_the_fastest_as_far_as_the_noise_lets_it(
    on_gpus, speeds, noise, said
):
    assert verdict(for_readers(on_gpus(*speeds, noise=noise))) == (
        f"All 3 runs trained the same model; {said}, and ddp needed the least memory: 1.00 GiB a "
        "GPU at its peak, 50% less than fsdp."
    )


@pytest.mark.parametrize("rehearsal", [True, False])
def test_the_verdict_is_one_sentence_whatever_happened(full_results, rehearsal):
    results = full_results(rehearsal=rehearsal)
    for change in ({}, {"complete": False}, {"control": None}):
        text = verdict(results | change)
        assert one_sentence(text.replace("1.19 GiB", "").replace("0.30 GiB", "")), text
        assert "zero3-trainer ran out of memory" in text


def test_runs_that_did_not_train_the_same_are_not_compared_by_memory(make_results, make_row):
    gate = {"strategy": "ddp", "engine": "trainer", "gate": "loss", "reason": "apart"}
    gate |= {"name": "ddp-trainer"}
    broken = gate | dict.fromkeys(("first_step", "value", "limit"))
    text = verdict(for_readers(make_results(make_row(gates={"loss": False}, broken=[broken]))))
    assert text == (
        "ddp did not train the model that single trained, so their numbers must not be compared."
    )


def test_the_verdict_says_which_gates_were_not_judged(make_results, make_row):
    text = verdict(make_results(make_row(gates={"loss": True, "data": True})))
    assert "Both runs trained the same model (not judged everywhere: grad_norm, weights)" in text
