"""Damaged files: whatever stands in a record or in results, it is used or refused in words."""

import copy
import json
import random

import pytest

from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.table_file import render_table
from toolkit.comparing.report.write import render_markdown, render_page
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import completed
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.errors import UsageError
from toolkit.records.json_files import write_json
from toolkit.records.record import read_record
from toolkit.records.results import read_results

FLIPS = 350
LOST = 100
REPORTS = 10
CHANGES = 45
PAGES = 2
"""A page takes as long as all the rest of a comparison."""

SEEDS = pytest.mark.parametrize(
    "seed", [11, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (12, 13))]
)

VALUES = [
    *(None, True, -1, 0, 1, 2**62, 10**30, 1.5, -1.0, 1e308),
    *("NaN", "Infinity", "-Infinity", "x", "", "\ud800"),
    *([], [None], [[]], {}, {"a": 1}),
]


def made_again(folder):
    """Return the results of the records in a folder, as a comparison that goes on makes them."""
    names = ("single", "ddp", "fsdp")
    options = CompareOptions(strategies=names, train_flags=("--seed", "7"), output=folder)
    plan = build_plan(options, gpus=0, missing=lambda strategy: None)
    comparison = Comparison(folder=folder, plan=plan, options=options, environment={})
    for run in plan.runs:
        if starts := completed(folder, run.name):
            comparison.finished[run.name] = starts
    comparison.make_rows()
    return comparison.results()


@pytest.fixture
def comparison(run_folders):
    write_json(run_folders / "results.json", made_again(run_folders))
    return run_folders


FILES = pytest.mark.parametrize("name", ["results.json", "ddp-trainer-1/record.json"])


def is_read(file):
    """Whether a file is read; else it is refused in words that name it."""
    read = read_results if file.name == "results.json" else read_record
    try:
        read(file.parent)
    except UsageError as error:
        if str(file) not in str(error):
            raise
        return False
    return True


def report_on(folder, name, *, page):
    """Make everything of the results, or of the records: it must not raise."""
    results = read_results(folder) if name == "results.json" else made_again(folder)
    shown = redact_results(results)
    render_markdown(shown)
    render_table(shown)
    if page:
        render_page(shown)


@FILES
@SEEDS
def test_a_flipped_bit_or_a_lost_byte_gives_results_or_a_usage_error(comparison, name, seed):
    file = comparison / name
    whole = json.dumps(json.loads(file.read_text())).encode()
    chosen = random.Random(seed)
    bits = chosen.sample(range(8 * len(whole)), FLIPS)
    damaged = [(bit // 8, whole[bit // 8] ^ (1 << bit % 8)) for bit in bits]
    lost = chosen.sample(range(len(whole)), LOST)
    damaged += [(place, byte) for place in lost for byte in (0x00, 0xFF)]

    def damage(place, byte):
        file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])

    readable = []
    for place, byte in damaged:
        damage(place, byte)
        readable += [(place, byte)] if is_read(file) else []

    assert 0 < len(readable) < len(damaged) / 2
    for number, (place, byte) in enumerate(chosen.sample(readable, REPORTS)):
        damage(place, byte)
        report_on(comparison, name, page=number < PAGES)


def places_in(value, path=()):
    """Every place of a JSON value, of a list the first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, item in items:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places_in(item, (*path, key))


def changed(content, chosen):
    """Return a copy with one field renamed, lost, or with another value."""
    content = copy.deepcopy(content)
    *above, key = chosen.choice(list(places_in(content)))
    parent = content
    for name in above:
        parent = parent[name]
    how = chosen.random()
    if how < 0.2 and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    elif how < 0.3:
        del parent[key]
    else:
        parent[key] = chosen.choice(VALUES)
    return content


@FILES
@SEEDS
def test_a_field_of_another_name_or_type_gives_results_or_a_usage_error(comparison, name, seed):
    file = comparison / name
    whole = json.loads(file.read_text())
    chosen = random.Random(seed)
    used = 0
    for _ in range(CHANGES):
        file.write_text(json.dumps(changed(whole, chosen)))
        if is_read(file):
            used += 1
            report_on(comparison, name, page=used < PAGES)
    assert 0 < used < CHANGES
