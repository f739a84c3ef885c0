"""`toolkit doctor` on the folder of a comparison: the cause of each failed row, and slow rows."""

import pytest

from toolkit.doctor.after import examine_run
from toolkit.launching.status import StatusFile
from toolkit.records.json_files import write_json

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB"
STATES = {"parameters_bytes": 2**33, "master_bytes": 0, "gradients_bytes": 2**33}


@pytest.fixture
def comparison(tmp_path, full_results):
    """Write a comparison in which zero3 ran out of memory on the second rank."""

    def write(*, rehearsal=False, states=None):
        results = full_results(rehearsal=rehearsal)
        row = results["runs"][-1]
        row["folder"] = "zero3-trainer-1"
        row["predicted"]["memory"] = states
        (tmp_path / "zero3-trainer-1").mkdir()
        for rank, error in enumerate([RuntimeError("Connection closed by peer"), None]):
            status = StatusFile(tmp_path / "zero3-trainer-1" / "status", rank)
            status.running(3)
            status.failed(error or RuntimeError(OUT))
        write_json(tmp_path / "results.json", results)
        return examine_run(tmp_path)

    return write


def test_a_row_out_of_memory_has_its_rank_and_the_planners_figures(comparison):
    failed, *_ = comparison()
    assert (failed.level, failed.name) == ("fail", "zero3-trainer: cuda-out-of-memory")
    assert failed.text.startswith("On rank 1 alone: The GPU ran out of memory.")
    assert failed.text.endswith("The planner expects 31.0 to 38.0 GiB on a device.")
    assert failed.evidence == (f"rank 1: RuntimeError: {OUT}",)


def test_the_largest_part_of_the_memory_stands_first(comparison):
    failed, *_ = comparison(states=STATES | {"optimizer_bytes": 2**34})
    assert failed.text.endswith(
        "31.0 to 38.0 GiB on a device: optimizer 16.00 GiB, parameters 8.00 GiB, gradients "
        "8.00 GiB, activations and buffers 2.50 GiB."
    )


def test_a_row_much_slower_than_ddp_is_a_warning_on_gpus_alone(comparison):
    """The control is slow as well, but has no links to wait for."""
    _, slow = comparison()
    assert (slow.level, slow.name) == ("warn", "fsdp-trainer-x2: slow-communication")
    assert "30% of its step go beyond DDP's" in slow.text


def test_a_rehearsal_says_nothing_about_speed(comparison):
    assert len(comparison(rehearsal=True)) == 1


def test_a_comparison_whose_runs_ended_well_says_so(tmp_path, make_results):
    write_json(tmp_path / "results.json", make_results())
    (finding,) = examine_run(tmp_path)
    assert (finding.level, finding.text) == ("ok", "Every run ended well (1 in all).")
