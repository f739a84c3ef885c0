"""The speed lab: every variant tiny and on the CPU, and what it does with time and failures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import speed_lab
from kit.profiles import GROUPS, group_of, union
from kit.result import Result

LAB = ROOT / "benchmarks" / "speed_lab.py"
RESULT = ROOT / "benchmarks" / "results" / "2026-11-26-speed-lab.json"


CHOSEN = ("0.5b", "8b lora", "ragged", "packed", "loop engine", "best, cudnn")


def chosen():
    return [one for one in speed_lab.variants() if any(text in one.name for text in CHOSEN)]


@pytest.fixture(scope="session")
def lab(launch_environment):
    """Run the lab and return what it printed; it must leave with `code`."""

    def run(*arguments, code=0, **environment):
        done = subprocess.run(
            [sys.executable, str(LAB), *map(str, arguments)],
            env=launch_environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


@pytest.fixture(scope="session")
def smoke(lab, tmp_path_factory):
    """Return the result of some variants of each kind."""
    folder = tmp_path_factory.mktemp("lab")
    lab("--smoke", "--profile", "--out", folder, "--variants", *CHOSEN)
    (file,) = folder.glob("*-speed-lab-smoke.json")
    return Result.read(file)


def test_every_variant_is_measured_or_says_why_not(smoke):
    rows = {row["cell"]: row for row in smoke.rows}
    assert list(rows) == [variant.name for variant in chosen()]
    for row in smoke.rows:
        assert row["status"] in ("ok", "refused", "missing"), row
    without = {name for name, row in rows.items() if row["status"] != "ok"}
    lacking = ("FA4", "cudnn", "flex", "liger", "qlora")  # kernels, and packages that need a GPU
    assert all(any(word in name for word in lacking) for name in without), without
    assert len(without) < len(rows) / 2


def test_variants_of_the_same_rows_learn_the_same(smoke):
    rows = {row["cell"]: row for row in smoke.rows if row["status"] == "ok"}
    compared = 0
    for row in rows.values():
        base = rows.get(row["settings"]["base"], row)
        names = ("data", "tokens", "rows", "micro_batches", "method")
        if row is base or row["settings"]["kind"] == "loop":  # whose inner losses are not told
            continue
        if any(row["settings"][n] != base["settings"][n] for n in names):
            continue
        if row["settings"]["method"] == "full":  # adapters are drawn by each in its own way
            assert row["measured"]["losses"] == pytest.approx(base["measured"]["losses"], rel=2e-3)
            compared += 1
    assert compared >= 3


def test_compiled_variants_say_what_was_compiled_and_break_nowhere(smoke):
    compiled = [row for row in smoke.rows if row["settings"]["speed"].get("compile_blocks")]
    measured = [row["measured"]["compilation"] for row in compiled if row["status"] == "ok"]
    assert len(measured) >= 4
    for facts in measured:
        assert facts["graphs"] > 1
        assert facts["graph_breaks"] == 0
        assert facts["compile_seconds"] > 0
    plain = next(row for row in smoke.rows if row["cell"] == "stock, 0.5b")["measured"][
        "compilation"
    ]
    assert plain["graphs"] == 0


def test_the_page_has_a_table_for_each_base_and_the_profile(smoke):
    page = smoke.file.with_suffix(".md").read_text()
    bases = {variant.base for variant in chosen()}
    assert page.count("\n## Held against ") == len(bases)
    assert "None of its numbers says anything of a GPU" in page
    assert "\n## Where a step of `" in page


def test_it_obeys_its_budget(lab, tmp_path):
    names = ("--variants", "stock, 0.5b", "trl, 0.5b")
    printed = lab("--smoke", *names, "--out", tmp_path, "--budget", 0)
    assert len(re.findall(r"not run, -?\d s are left", printed)) == 3
    (file,) = tmp_path.glob("*.json")
    assert not Result.read(file).rows


@pytest.mark.sweep  # as the GPU kit does, with the same file of results
def test_it_goes_on_where_it_stopped(lab, tmp_path):
    stock = ("--variants", "stock, 0.5b")
    assert "stock, 0.5b: ok" in lab("--smoke", *stock, "--out", tmp_path)
    printed = lab("--smoke", *stock, "plain loop, 8b lora", "--out", tmp_path)
    assert "stock, 0.5b: ok" not in printed
    assert "plain loop, 8b lora: ok" in printed


def test_what_took_the_lab_with_it_comes_last_and_has_its_row(tmp_path, monkeypatch):
    from kit.cells import Machine

    file = tmp_path / "result.json"
    result = Result(file=file, about={})
    lab = object.__new__(speed_lab.Lab)
    lab._machine = Machine(gpus=0, smoke=True, out=tmp_path)
    lab._result, lab._ends = result, float("inf")
    seen = []

    def row_of(part, _, cell, machine):
        seen.append((cell.name, [row["cell"] for row in Result.read(file).rows]))
        if cell.name == "trl":
            raise KeyboardInterrupt
        return speed_lab.lost(part, cell, 1, "") | {"status": "refused", "reason": "none"}

    stopped, stop = [], speed_lab.faulthandler.cancel_dump_traceback_later
    monkeypatch.setattr(
        speed_lab.faulthandler,
        "cancel_dump_traceback_later",
        lambda: (stop(), stopped.append(len(seen))),
    )
    monkeypatch.setattr(speed_lab, "row_of", row_of)
    chosen = [one for one in speed_lab.variants() if one.name in ("stock", "trl", "tuned")]
    with pytest.raises(KeyboardInterrupt):
        lab.run(chosen)
    assert seen[-1] == ("trl", ["stock", "trl"])  # its row was there before it ran
    with pytest.raises(KeyboardInterrupt):
        lab.run(chosen)
    assert [name for name, _ in seen] == ["stock", "trl", "tuned", "trl"]
    assert stopped == [1, 2, 3, 4]  # or the end of a time limit would end this process later


def test_mistakes_leave_with_2_and_nothing_written(lab, tmp_path):
    out = tmp_path / "none"
    assert "no name of a variant" in lab("--variants", "fastest", "--out", out, code=2)
    assert "--smoke" in lab("--out", out, code=2, CUDA_VISIBLE_DEVICES="")
    assert "| best | stock | llama-1b |" in lab("--plan", "--out", out)
    assert not out.exists()


def test_what_others_do_comes_first_then_what_promises_the_most():
    variants = [one for one in speed_lab.variants() if one.model == "llama-1b"]
    names = [one.name for one in variants]
    assert names[0] == "stock"
    gains = [one.gain for one in variants if one.gain != 1 and one.name != one.base]
    assert gains == sorted(gains, reverse=True)
    for one in variants:
        assert names.index(one.base) <= names.index(one.name)
        if one.gain == 1:
            assert names.index(one.name) < names.index("best")


def test_kernels_are_told_apart_by_their_names():
    kernels = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
        "pytorch_flash::flash_bwd_kernel<...>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
        "triton_red_fused__to_copy_arange_clamp_eq_exp_logsumexp_ne_sub_where_0": "loss",
        "triton_poi_fused__to_copy_add_copy_copy__div_lerp_mul_sqrt_sub_0": "optimizer",
        "triton_poi_fused__unsafe_view_mul_silu_4": "element-wise, compiled",
        "Memcpy HtoD (Pinned -> Device)": "casts and copies",
        "something_else": "others",
    }
    assert {name: group_of(name) for name in kernels} == kernels
    assert set(kernels.values()) <= {*GROUPS, "others"}
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def test_a_committed_page_is_that_of_its_rows(tmp_path):
    result = Result.read(RESULT)
    page = RESULT.with_suffix(".md").read_text()
    result.file = tmp_path / RESULT.name
    speed_lab.write_page(result)
    assert result.file.with_suffix(".md").read_text() == page
    text = json.dumps(result.rows)
    assert not any(place in text for place in ("/root", "/tmp", str(Path.home())))
