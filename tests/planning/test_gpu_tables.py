"""What the parts `memory` and `offload` of the GPU kit make of a GPU's numbers."""

import pytest
from benchmark_rows import rows
from kit import memory, offload
from kit.offload_rank import copied

from toolkit.planning.memory.estimate import estimate_memory

LIKELY = {
    "ratios": {"default": (1.25, 1.25), "expandable": (1.05, 1.05)},
    "workspaces": (40e6, 40e6),
    "context": (6 * 2**28, 6 * 2**28),
}


def line(name, lines):
    """The cells of the rows of tables that begin with a name."""
    found = [each for each in lines if each.startswith(f"| {name} |")]
    return [[cell.strip() for cell in each.strip("|").split("|")][1:] for each in found]


def test_both_allocators_stand_side_by_side_with_the_error_of_each():
    made = rows(**LIKELY, jobs=2)
    first = made[0]["measured"]["whole"]
    low, _ = made[0]["measured"]["predicted"]["allocated_bytes"]
    first["allocated_bytes"] = low // 2
    first["reserved_bytes"] = low
    allocated, reserved, rest = line("llama-1b 1x512", memory.tables(made))
    assert allocated[1] == f"{low / 2 / 2**30:.2f}"
    assert allocated[3] == "+100.0%"
    assert allocated[6] == "0"
    assert reserved[2] == "2.00"
    assert reserved[5] == "1.02"
    assert rest[3] == rest[7] == "1.50"


def test_a_job_that_one_allocator_alone_could_hold_has_a_row():
    made = [row for row in rows(**LIKELY, jobs=2) if row["settings"]["allocator"] == "default"]
    made.append(made[1] | {"status": "out of memory", "measured": {}})
    for cells in line("llama-1b 4x2048", memory.tables(made)):
        assert "-" in cells
        assert cells[1] != "-"


def test_every_job_of_the_kit_is_another_and_the_planner_knows_it():
    jobs = [memory.PLAIN | {"allocator": "default"} | changes for changes in memory.JOBS]
    assert len({memory.described(job) for job in jobs}) == len(jobs) == 24
    for job in jobs:
        assert estimate_memory(memory.job_of(job)).allocated.low > 0


def event(name, size, *, kind="gpu_memcpy"):
    return {"name": name, "cat": kind, "dur": 1000.0, "args": {"bytes": size}}


def test_copies_in_a_trace_are_summed_by_way_and_by_kind_of_memory():
    found = copied(
        [
            event("Memcpy HtoD (Pinned -> Device)", 100),
            event("Memcpy HtoD (Pageable -> Device)", 30),
            event("Memcpy DtoH (Device -> Pinned)", 7),
            event("Memcpy DtoD (Device -> Device)", 1000),
            event("cudaMemcpyAsync", 1000, kind="cuda_runtime"),
            {"name": "process_name", "ph": "M"},
        ]
    )
    assert found["to_device"] == {
        "bytes": 130,
        "pinned_bytes": 100,
        "seconds": pytest.approx(0.002),
        "copies": 2,
    }
    assert found["to_host"]["bytes"] == found["to_host"]["pinned_bytes"] == 7


def test_what_a_launch_moved_stands_beside_what_is_predicted():
    settings = {"strategy": "zero2_offload", "model": "qwen-0.5b", "batch": 4, "sequence": 1024}
    settings |= {"kind": "launch", "pinned": True, "optimizer": "deepspeed"}
    way = {"bytes": 2**30, "pinned_bytes": 2**29, "seconds": 0.1, "copies": 3}
    none = {"bytes": 0, "pinned_bytes": 0, "seconds": 0.0, "copies": 0}
    row = {
        "cell": "zero2_offload",
        "status": "ok",
        "settings": settings,
        "measured": {
            "predicted": offload.prediction(offload.job_of(settings)),
            "copied": {"to_device": way, "to_host": none},
            "pinned_bytes": 2**31,
            "step_seconds": 0.5,
            "phases_seconds": {"optimizer": 0.25},
            "optimizer": "DeepSpeedCPUAdam",
            "memory": {"peak_bytes": 2**32, "host_peak_bytes": 2**33},
        },
    }
    taken, moved = line("zero2_offload", offload.tables([row]))
    assert taken[:4] == ["DeepSpeedCPUAdam", "0.500", "0.250", "4"]
    assert taken[5:7] == ["2", "8"]
    # bf16 weights of 494 M parameters come back; fp32 gradients and bf16 ones go.
    assert moved[0] == "0.92"
    assert moved[1:4] == ["1", "50%", "10.7"]
    assert moved[5:] == ["0", "-", "-"]
