import copy
import json
import math
import re
import resource
from types import NoneType
from typing import NotRequired, get_origin, get_type_hints

import pytest
from example_record import MEMORY, RECORD, TRAINING

from toolkit.errors import UsageError
from toolkit.records.fields import Measured
from toolkit.records.json_files import NOT_RECORDED, LostError, read_json, write_json
from toolkit.records.record import Record, read_record
from toolkit.records.results import read_results
from toolkit.records.shapes import choices_of


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


def test_a_record_from_where_nvml_could_not_be_asked_is_read(tmp_path):
    unknown = {"gpus": None, "interconnect": None, "driver": "not known"}
    write_json(tmp_path / "record.json", RECORD | {"environment": unknown})
    assert read_record(tmp_path)["environment"] == unknown


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
        ('{"schema": 1, "losses": null}', "'strategy' is missing"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(tmp_path, text, message):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "is not JSON .*utf-8.*Put a whole copy there"),
        (b"[" * 100_000, "is not JSON .*recursion"),
        (b"[" * 200 + b"]" * 200, "more than 100 levels"),
        (b'{"schema": 1, "seconds": ' + b"9" * 5000 + b"}", "is not JSON .*digits"),
        (b'{"schema": 1, "seconds": NaN}', "NaN is no JSON"),
        (b'{"schema": 1, "schema": 1}', "a name stands twice"),
        (b"", "is not JSON"),
    ],
    ids=["bytes", "deep", "levels", "digits", "constant", "twice", "empty"],
)
def test_a_damaged_file_is_a_usage_error_that_names_it(tmp_path, content, message):
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(LostError, match=rf"{tmp_path}/record\.json .*{message}"):
        read_record(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named_and_is_not_ours_to_replace(tmp_path):
    (tmp_path / "record.json").mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory") as caught:
        read_record(tmp_path)
    assert not isinstance(caught.value, LostError)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("losses", [1.0, "2.0"], r"'losses\[1\]' is '2.0'"),
        ("memory", RECORD["memory"] | {"peak_bytes": -1}, "'memory.peak_bytes' is -1"),
        ("num_processes", 0, "'num_processes' is 0"),
        ("num_processes", True, "'num_processes' is True"),
        ("num_processes", 10**30, "'num_processes' is 1000"),
        ("precision", "fp8", "'precision' is 'fp8'"),
        ("training", TRAINING | {"optimizer": 3}, "'training.optimizer' is 3"),
        ("per_rank", [{"rank": 0}], r"'per_rank\[0\].device' is missing"),
    ],
)
def test_every_field_is_checked_to_its_innermost_part(tmp_path, field, value, message):
    write_json(tmp_path / "record.json", RECORD | {field: value})
    with pytest.raises(LostError, match=f"is not complete: .*{message}"):
        read_record(tmp_path)


DECLARED = {
    name: NoneType in choices_of(kind) or name == "not_measured"
    for name, kind in get_type_hints(Record, include_extras=True).items()
    if get_origin(kind) is not NotRequired  # an older record is right without these
}
"""Whether a record of another version may lack a field."""


@pytest.mark.parametrize("field", DECLARED)
def test_a_field_that_an_older_toolkit_did_not_write_is_null_with_a_reason(tmp_path, field):
    record = dict(RECORD)
    del record[field]
    write_json(tmp_path / "record.json", record)
    if not DECLARED[field]:
        said = "has no schema number" if field == "schema" else f"'{field}' is missing"
        with pytest.raises(LostError, match=said):
            read_record(tmp_path)
    elif field == "not_measured":
        assert read_record(tmp_path)[field] == {}
    else:
        read = read_record(tmp_path)
        reason = RECORD["not_measured"].get(field, NOT_RECORDED)
        assert (read[field], read["not_measured"][field]) == (None, reason)


def test_a_new_column_does_not_make_older_files_unreadable():
    """The recipe in docs/extending.md: a field of `Measured`."""
    kinds = get_type_hints(Measured, include_extras=True).items()
    assert [name for name, kind in kinds if NoneType not in choices_of(kind)] == []


def test_what_an_older_file_lacks_further_in_is_null_or_empty_and_named(tmp_path):
    record = copy.deepcopy(RECORD)
    record["per_rank"] = [{"rank": 0, "device": "cpu", "memory": dict(MEMORY)}]
    del record["memory"]["host_shared_bytes"], record["training"]["own_dropout"]
    write_json(tmp_path / "record.json", record)
    read = read_record(tmp_path)
    assert read["memory"]["host_shared_bytes"] is read["per_rank"][0]["peak"] is None
    assert read["training"]["own_dropout"] == {}
    named = {name for name, reason in read["not_measured"].items() if reason == NOT_RECORDED}
    assert named == {"memory.host_shared_bytes", "per_rank[0].peak", "training.own_dropout"}
    record["training"]["dropout"] = 0.1
    write_json(tmp_path / "record.json", record)
    with pytest.raises(LostError, match=r"is not complete: 'training.dropout' is 0\.1\."):
        read_record(tmp_path)


def test_a_write_that_finds_no_room_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"runs": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))):
            write_json(path, {"runs": "x" * 2000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_json(path) == {"runs": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_folder_without_results_says_so(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_results(tmp_path)
