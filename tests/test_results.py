import json
import math

import pytest

from toolkit.errors import UsageError
from toolkit.results import read_json, read_record, read_results, write_json

MEMORY = [
    f"{name}_bytes"
    for name in ("peak", "parameters", "master", "gradients", "optimizer", "host_peak")
]
RECORD = {
    "schema": 1,
    "strategy": "ddp",
    "engine": "loop",
    "precision": "no",
    "status": "ok",
    "reason": None,
    "num_processes": 2,
    "rehearsal": True,
    "model": {"name": "tiny", "path": None, "parameters": 6},
    "data": {"name": "rows", "hash": None, "rows": 8},
    "training": {},
    "losses": [1.0],
    "grad_norms": None,
    "sample_ids": None,
    "skipped_steps": [],
    "final_loss": 1.0,
    "tokens_per_second": None,
    "step_seconds": None,
    "first_step_seconds": None,
    "memory": dict.fromkeys(MEMORY),
    "per_rank": [],
    "attestation": {},
    "final": None,
    "seconds": 1.0,
    "environment": {},
    "not_measured": {},
}


def refuse_constant(name):
    raise AssertionError(f"{name} is not strict JSON")


def test_non_finite_losses_survive_strict_json(tmp_path):
    path = tmp_path / "record.json"
    losses = [1.5, math.nan, math.inf, -math.inf]

    write_json(path, {"losses": losses, "nested": ({"loss": math.nan},)})

    strict = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert strict["losses"] == [1.5, "NaN", "Infinity", "-Infinity"]
    back = read_json(path)
    assert back["losses"][0] == 1.5
    assert math.isnan(back["losses"][1])
    assert back["losses"][2:] == [math.inf, -math.inf]
    assert math.isnan(back["nested"][0]["loss"])


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"runs": 1})

    with pytest.raises(TypeError):
        write_json(path, {"runs": object()})

    assert read_json(path) == {"runs": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_fields_of_a_later_version_are_kept(tmp_path):
    write_json(tmp_path / "record.json", RECORD | {"carbon": {"grams": 7}})
    assert read_record(tmp_path)["carbon"] == {"grams": 7}


def test_a_newer_schema_is_refused_and_named(tmp_path):
    write_json(tmp_path / "record.json", RECORD | {"schema": 2})
    with pytest.raises(UsageError, match="schema 2.*reads up to 1.*update"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "losses": [1', "not JSON"),
        ("[]", "no schema number"),
        ('{"schema": "one"}', "schema number 'one'"),
        ('{"schema": 1, "losses": null}', "'strategy' is missing.*'losses' is None"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(tmp_path, text, message):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_record(tmp_path)


def test_a_folder_without_results_says_so(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_results(tmp_path)
