"""What was read from a file is what its type declares, or the part that is not is named."""

import math
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from toolkit.records.shapes import MOST_WHOLE, Least, mismatches


class Size(TypedDict):
    rows: Annotated[int, Least(1)]
    name: NotRequired[str]


class Loose(TypedDict, total=False):
    name: str


HELD = [
    (None, Size | None),
    ({"rows": 1, "more": [object]}, Size),
    ({"rows": 2, "name": "a"}, Size | None),
    ({}, Loose),
    ([1.5, 2, math.inf, math.nan], list[float]),
    ({"a": [1, 2]}, dict[str, list[int]]),
    ({"a": {"rows": 1}}, dict[str, Size]),
    ("ok", Literal["ok", "failed"]),
    (True, bool | str),
    (MOST_WHOLE - 1, int),
    (object, Any),
    ({"rows": 3}, Annotated[dict[str, Any], Size]),
]


@pytest.mark.parametrize(("value", "kind"), HELD, ids=repr)
def test_a_value_of_its_type_has_no_mismatch(value, kind):
    assert list(mismatches(value, kind, "it")) == []


BROKEN = [
    (3, Size | None, "'it' is 3"),
    ({"rows": 0}, Size, "'it.rows' is 0"),
    ({"rows": math.inf}, dict[str, Annotated[float, Least(1)]], "'it.rows' is inf"),
    ({"name": "a"}, Size, "'it.rows' is missing"),
    # Of the types of a union, the one that the value is nearest to says what is wrong with it.
    ({"rows": "x"}, Size | None, "'it.rows' is 'x'"),
    ({"rows": "x"}, None | Size, "'it.rows' is 'x'"),
    ({"rows": 1, "name": 4}, Size | str, "'it.name' is 4"),
    ({"name": 4}, Loose, "'it.name' is 4"),
    ([1, "2"], list[int] | None, "'it[1]' is '2'"),
    ([1, True], list[int], "'it[1]' is True"),
    ([1.5], list[int], "'it[0]' is 1.5"),
    ({"a": {"rows": None}}, dict[str, Size], "'it.a.rows' is None"),
    ("lost", Literal["ok", "failed"], "'it' is 'lost'"),
    (1, bool, "'it' is 1"),
    (True, int, "'it' is True"),
    (MOST_WHOLE, int, f"'it' is {MOST_WHOLE}"),
    ([], dict[str, int], "'it' is []"),
    ({"rows": "x"}, Annotated[dict[str, Any], Size], "'it.rows' is 'x'"),
    ("x" * 70, int, f"'it' is '{'x' * 49}..."),
]


@pytest.mark.parametrize(("value", "kind", "phrase"), BROKEN, ids=repr)
def test_the_part_that_is_not_of_its_type_is_named(value, kind, phrase):
    assert list(mismatches(value, kind, "it")) == [phrase]
