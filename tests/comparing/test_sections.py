"""The parts of a report, each from results that have everything in them."""

import pytest

from toolkit.comparing.report.diff.files import memory as memory_of_two
from toolkit.comparing.report.diff.match import match
from toolkit.comparing.report.figures.memory import fullest_moment
from toolkit.comparing.report.figures.speed import speed_and_memory
from toolkit.comparing.report.row_facts import planner_word
from toolkit.comparing.report.runs_table import runs_table, speed_and_cost
from toolkit.comparing.report.sections import parts, report_sections
from toolkit.comparing.report.sections.agreement import agreement
from toolkit.comparing.report.sections.failures import failures, ranks
from toolkit.comparing.report.sections.memory import fullest, held, over_ranks
from toolkit.comparing.report.sections.scaling import scaled_runs, scaling, step_time, warm_up
from toolkit.comparing.report.sections.traffic import collectives, sent
from toolkit.records.json_files import write_json

GIB = 2**30


def line(section, run):
    """The cells of a run by column."""
    (found,) = [row for row in section.rows if row[0] == run]
    return dict(zip(section.header, found, strict=True))


@pytest.mark.parametrize("rehearsal", [True, False])
def test_every_line_is_as_wide_as_its_header(full_results, rehearsal):
    for part in parts(full_results(rehearsal=rehearsal), show_speed=True):
        for row in part.rows:
            assert len(row) == len(part.header), part.title
            assert all(row), part.title


def test_the_table_names_control_baseline_and_what_ran_out(full_results):
    table = runs_table(full_results(rehearsal=False))
    ddp = dict(zip(table.header, table.rows[1], strict=True))
    assert (ddp["vs ddp-trainer"], ddp["processes"]) == ("1.00x", "2")
    assert dict(zip(table.header, table.rows[2], strict=True))["vs ddp-trainer"] == "0.70x"
    spent = dict(zip(table.header, table.rows[-1], strict=True))
    assert (spent["status"], spent["peak memory"]) == ("oom", "predicted 31.0 to 38.0 GiB")
    assert table.notes[0] == "Control: single-trainer; gaps are measured from it."
    assert "from 1e-05 on, the run is not the same training." in table.notes[1]
    assert table.notes[2].startswith("Baseline of speed: ddp-trainer on 2 processes")
    assert any("9.0 to 17.0 GiB more than the 24.0 GiB" in note for note in table.notes)


def test_without_ddp_the_control_is_the_baseline(make_results, make_row):
    table = runs_table(
        make_results(make_row(strategy="fsdp", tokens_per_second=500.0)), show_speed=True
    )
    assert "vs single-trainer" in table.header
    assert [row[3] for row in table.rows] == ["1.00x", "0.50x"]


def test_processes_are_a_column_only_where_they_differ(make_results, make_row):
    assert "processes" not in runs_table(make_results(make_row())).header


def test_what_was_fitted_to_a_run_is_listed_once_for_all_that_have_it(full_results):
    results = full_results()
    notes = ["reduce_bucket_size: 50000000 -> 162924, by the model's size", "x: auto -> 1.0"]
    results["runs"][1]["attestation"] = {"notes": notes}
    results["runs"][2]["attestation"] = {"notes": notes[:1]}
    found = {section.id: section for section in report_sections(results)}
    assert found["settings"].notes == [
        f"ddp-trainer, fsdp-trainer-x2: {notes[0]}",
        "ddp-trainer: x: auto -> 1.0",
    ]
    assert "settings" not in {section.id for section in report_sections(full_results())}


def test_a_rehearsal_shows_the_peak_that_carries_over(full_results, bare_results):
    assert "peak, counted" in runs_table(full_results()).header
    assert "peak host memory" in runs_table(bare_results()).header


def test_speed_and_cost_stand_apart_with_convention_and_price(full_results):
    section = speed_and_cost(full_results(rehearsal=False))
    assert line(section, "ddp-trainer") == {
        "run": "ddp-trainer",
        "tokens/s": "1,000",
        "vs ddp-trainer": "1.00x",
        "supervised tokens/s": "800",
        "TFLOP/s a GPU": "123",
        "MFU": "40%",
        "GPU-hours": "0.0067",
        "cost": "$0.02",
        "a million tokens": "$1.23",
    }
    notes = " ".join(section.notes)
    assert notes.count("6 N a token") == 1
    assert "The price of a GPU is $3 an hour." in notes


def test_what_no_run_has_is_no_column_but_has_its_reason(full_results):
    section = speed_and_cost(full_results())
    assert list(section.header) == ["run", "tokens/s", "vs ddp-trainer", "supervised tokens/s"]
    assert any("a CPU has no rated peak" in note for note in section.notes)


def test_a_missing_price_says_so(full_results):
    results = full_results(rehearsal=False)
    results["dollars_per_hour"] = None
    for row in results["runs"]:
        if row["cost"]:
            row["cost"] |= {"dollars": None, "dollars_per_million_tokens": None}
    section = speed_and_cost(results)
    assert "cost" not in section.header
    assert "No price of a GPU was given." in " ".join(section.notes)


def test_memory_stands_beside_the_planner_s_with_reserved_and_nvme(full_results):
    section = held(full_results(rehearsal=False))
    ddp = line(section, "ddp-trainer")
    assert (ddp["peak"], ddp["peak reserved"], ddp["nvme"]) == ("1.25 GiB", "1.50 GiB", "0.0 MiB")
    assert line(section, "ddp-trainer, predicted")["peak"] == "1.00 to 1.50 GiB"
    assert any("planner has no figure" in note for note in section.notes)


def test_memory_says_how_much_of_the_host_s_is_shared_between_forked_ranks(full_results):
    results = full_results()
    assert not any("it shares" in note for note in held(results).notes)
    measured = next(row for row in results["runs"] if row["memory"])
    measured["memory"]["host_shared_bytes"] = 3 * 2**28
    assert any(note.startswith("Up to 0.75 GiB of a rank's") for note in held(results).notes)


def test_the_fullest_moment_adds_up(full_results):
    section = fullest(full_results())
    assert line(section, "ddp-trainer")["phase"] == "backward"
    ddp = line(section, "ddp-trainer")
    names = ("parameters", "master", "gradients", "optimizer", "activations", "other")
    shown = {name: ddp[name] for name in names}
    assert shown["activations"] == "0.12 GiB"
    assert (shown["other"], ddp["together"]) == ("64.0 MiB", "1.19 GiB")
    assert "Offloaded states lie in the host's memory there; the other tensors" in section.text


def test_the_planner_s_peak_of_that_step_stands_beside_the_counted_one(full_results):
    results = full_results()
    ddp = results["runs"][1]
    assert line(fullest(results), "ddp-trainer")["predicted"] == "1.00 to 1.25 GiB"
    ddp["predicted"]["errors"]["counted_bytes"] = 0.042
    assert line(fullest(results), "ddp-trainer")["predicted"] == "1.00 to 1.25 GiB (+4.20%)"
    ddp["predicted"] |= {"counted_bytes": None, "reason": "not predicted: it is odd"}
    section = fullest(results)
    assert line(section, "ddp-trainer")["predicted"] == "not predicted"
    assert "n/a, predicted, ddp-trainer: not predicted: it is odd" in section.notes
    for row in results["runs"]:
        if row["predicted"]:
            row["predicted"]["counted_bytes"] = None
    assert "predicted" not in fullest(results).header


OFFLOADED = "Offloaded states are in the counted peak of zero2_offload-trainer"


@pytest.mark.parametrize("rehearsal", [True, False])
def test_every_counted_peak_says_where_offloaded_states_are_in_it(
    full_results, rehearsal, tmp_path
):
    results = full_results(rehearsal=rehearsal)
    plain = " ".join(note for part in parts(results) for note in part.notes)
    assert "Offloaded" not in plain
    results["runs"][1] |= {"strategy": "zero2_offload", "name": "zero2_offload-trainer"}
    sides = (tmp_path / "a", tmp_path / "b")
    for side in sides:
        side.mkdir()
        write_json(side / "results.json", results)
    found = [
        *(" ".join(each.notes) for each in (runs_table(results), fullest(results))),
        " ".join(over_ranks(results).notes),
        " ".join(memory_of_two(match(*sides)).notes),
        fullest_moment(results).caption,
        speed_and_memory(results).caption,
    ]
    assert [text.count(OFFLOADED) for text in found] == [int(rehearsal)] * len(found)


def test_on_gpus_the_counted_peak_is_not_said_to_be_the_device_s_but_for_the_allocator(
    full_results,
):
    text = fullest(full_results(rehearsal=False)).text
    assert "The device's peak above is over all steps, packed rows included" in text
    assert "difference" not in text
    assert "over all steps" in fullest_moment(full_results(rehearsal=False)).caption


def test_the_planner_s_peak_takes_the_place_of_none_that_was_measured(full_results):
    def peaks(rehearsal, **changes):
        results = full_results(rehearsal=rehearsal)
        results["runs"][-1] |= changes
        table = runs_table(results)
        column = 2 + next(n for n, name in enumerate(table.header[2:]) if name.startswith("peak"))
        return table.rows[-1][column], " ".join(table.notes)

    done = full_results(rehearsal=False)["runs"][1]
    assert peaks(False)[0] == "predicted 31.0 to 38.0 GiB"
    assert peaks(False, memory=done["memory"])[0] == "1.25 GiB"
    assert peaks(True, peak=done["peak"])[0] == "1.19 GiB"
    cell, notes = peaks(True)
    assert cell == "n/a"
    assert "n/a: zero3-trainer (all): oom: rank 1 failed" in notes
    assert "predicted peak on a GPU 31.0 to 38.0 GiB" in notes


def test_only_what_has_a_cost_is_called_cost(full_results):
    titles = [
        parts(full_results(rehearsal=each), show_speed=True)[0].title for each in (True, False)
    ]
    assert titles == ["Speed", "Speed and cost"]


def test_a_category_that_is_none_of_ours_counts_as_other(full_results):
    results = full_results()
    categories = results["runs"][1]["peak"]["categories"]
    categories["caches"] = categories.pop("other")
    assert line(fullest(results), "ddp-trainer")["other"] == "64.0 MiB"


def test_memory_over_the_ranks_has_least_and_most(full_results):
    section = over_ranks(full_results())
    ddp = line(section, "ddp-trainer")
    assert (ddp["least counted peak"], ddp["most counted peak"]) == ("1.04 GiB", "1.19 GiB")
    assert "least device peak" not in section.header
    assert any("least device peak, most device peak" in note for note in section.notes)


def test_traffic_names_wire_bytes_and_the_difference_to_the_papers(full_results):
    results = full_results()
    results["runs"][1]["traffic"]["sent_elements"] *= 2
    section = sent(results)
    assert line(section, "fsdp-trainer-x2")["beside the papers' volume"] == "equal"
    assert line(section, "ddp-trainer")["beside the papers' volume"].startswith("2.00 times: ")
    assert line(section, "ddp-trainer")["on the wire"] == "0.25 GiB"
    assert line(section, "ddp-trainer")["other"] == "24 B"


def test_what_ranks_counted_differently_is_said(full_results):
    results = full_results()
    results["runs"][1]["traffic"]["disagreements"] = ["rank 1: 3 calls"]
    said = "ddp-trainer, counted differently by ranks: rank 1: 3 calls"
    assert said in sent(results).notes


def test_gradients_and_all_the_rest_are_listed_apart(full_results):
    results = full_results()
    states = collectives(results, of_states=True)
    others = collectives(results, of_states=False)
    assert {row[2] for row in states.rows} == {"gradients"}
    assert {row[2] for row in others.rows} == {"metrics", "norm"}
    counted = sum(len(row["traffic"]["collectives"]) for row in results["runs"] if row["traffic"])
    assert len(states.rows) + len(others.rows) == counted


def test_the_largest_difference_of_a_weight_names_its_tensor(full_results):
    section = agreement(full_results())
    shown = line(section, "ddp-trainer")["largest weight difference"]
    assert shown == "2.0e-06 (model.layers.0.mlp.weight)"
    assert line(section, "single-trainer")["largest weight difference"] == "control"


def test_what_a_guard_warned_of_stands_below_the_agreement(make_results, make_row):
    warned = make_row(guard_warnings=["Rank 1 fell behind by step 9."])
    notes = agreement(make_results(warned, make_row(strategy="fsdp"))).notes
    assert [note for note in notes if "guard" in note] == [
        "ddp-trainer, a guard warned: Rank 1 fell behind by step 9."
    ]


def test_time_has_its_spread_over_starts_and_its_phases(full_results):
    ddp = line(step_time(full_results()), "ddp-trainer")
    assert (ddp["starts"], ddp["spread of the starts"]) == ("3", "3.0% (990 to 1,020)")
    assert (ddp["forward"], ddp["backward"]) == ("0.140 s", "0.250 s")


def test_of_one_start_there_is_no_spread_and_it_is_said(full_results):
    results = full_results()
    for row in results["runs"]:
        row |= {"spread": None, "repeats": row["repeats"][:1]}
        row["not_measured"]["spread"] = "it was started once"
    section = step_time(results)
    assert line(section, "ddp-trainer")["spread of the starts"] == "n/a"
    assert "n/a: every run (spread of the starts): it was started once" in section.notes


def test_what_comes_before_the_clock_stands_apart(full_results):
    section = warm_up(full_results())
    ddp = line(section, "ddp-trainer")
    assert (ddp["start"], ddp["steps left out"], ddp["saving"]) == ("75 s", "3", "1.500 s")
    assert ddp["of that checking the cache"] == "0.250 s"
    assert any("it runs without torch.compile" in note for note in section.notes)


def test_runs_that_read_no_cache_have_no_column_for_it(full_results):
    results = full_results()
    for row in results["runs"]:
        if row["warm_up"]:
            row["warm_up"]["cache_seconds"] = None
    assert "of that checking the cache" not in warm_up(results).header


def test_scaling_is_measured_from_the_single_run(full_results):
    two, four = scaled_runs(full_results())
    assert (two.speed_up, two.efficiency) == (1.4, 0.7)
    assert (four.speed_up, four.efficiency) == (2.4, 0.6)
    section = scaling(full_results())
    assert section.rows[1][2:] == ["4", "1,200", "2.40x", "4x", "60%", "single-trainer"]
    assert "share the cores" in section.text


def test_without_a_single_run_the_fewest_processes_are_the_base(full_results):
    results = full_results(rehearsal=False)
    results["runs"][0] |= {"status": "oom", "tokens_per_second": None}
    section = scaling(results)
    assert section.rows[0][4:] == ["1.00x", "1x", "100%", "fsdp-trainer-x2"]
    assert section.rows[1][4:6] == ["1.71x", "2x"]
    assert "share the cores" not in section.text


def test_one_number_of_processes_is_no_scaling(make_results, make_row):
    assert scaling(make_results(make_row())) is None


def test_a_run_that_ran_out_says_which_ranks_and_how_unevenly(full_results):
    results = full_results(rehearsal=False)
    section = ranks(results["runs"][-1])
    assert [row[1] for row in section.rows] == ["failed", "out of memory", "running"]
    notes = " ".join(section.notes)
    assert "Out of memory: rank 1; 1 of 3 that left word." in notes
    assert "least 16.00 GiB (rank 1), most 23.00 GiB (rank 0)" in notes
    assert "rank 2 did not tell its peak" in notes
    assert failures(results).count("### ") == 1
    assert "The planner: predicted peak 31.0 to 38.0 GiB" in failures(results)
    assert "device peak" in section.header
    assert "host peak" in ranks(full_results()["runs"][-1]).header


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ((9, 17), "9.0 to 17.0 GiB more than the 24.0 GiB of its smallest GPU"),
        ((-2, 17), "up to 17.0 GiB more than the 24.0 GiB"),
        (
            (-12, -2),
            "2.0 to 12.0 GiB to spare of the 24.0 GiB of its smallest GPU",
        ),
        (None, "no GPU's memory to hold it against"),
    ],
)
def test_the_planner_says_by_how_much(full_results, over, said):
    row = full_results(rehearsal=False)["runs"][-1]
    low, high = over or (0, 0)
    bounds = {"low": low * GIB, "high": high * GIB}
    row["predicted"]["over_bytes"] = bounds if over else None
    assert said in planner_word(row)


def test_without_a_prediction_the_planner_says_why(full_results):
    row = full_results()["runs"][-1]
    row["predicted"] |= {"peak_bytes": None, "reason": "not predicted: the optimizer is lion"}
    assert planner_word(row) == "not predicted: the optimizer is lion"
