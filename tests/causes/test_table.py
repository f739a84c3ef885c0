"""The table of causes: each entry can be used, and what it cites stands in the installed source."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from toolkit.causes.table import OF_LINES, cause_named, causes, line_counts, literal_of, phases

ON_THE_WEB = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/"
    r"(?:issues/\d+|blob/(?:[0-9a-f]{40}|slurm(?:-\d+){4})/\S+\.\w+#L\d+)"
)
"""A thread, or a line at a commit or a tag: it stays what was read."""

SOURCES = [cause for cause in causes() if cause.source is not None]
CITED = [cause for cause in SOURCES if not cause.source.startswith("https://")]
READ_IN = {"accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.24.0"}
READ_IN |= {"torch": "2.13.0", "trl": "1.16.0"}
"""Releases whose lines are cited."""


def source_of(cause):
    file, _, line = cause.source.rpartition(":")
    package = file.partition("/")[0]
    found = find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    return package, Path(found.origin).parent.parent / file, int(line)


def test_names_are_there_once():
    names = [cause.name for cause in causes()]
    assert len(set(names)) == len(names) > 60


def test_a_cause_cites_a_line_and_its_words_or_none():
    assert all((cause.source is None) == (cause.quote is None) for cause in causes())


@pytest.mark.parametrize("cause", CITED, ids=lambda cause: cause.name)
def test_the_cited_source_still_has_the_message(cause):
    package, file, number = source_of(cause)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert any(cause.quote in line for line in lines)
    try:
        installed = version(package).partition("+")[0]
    except PackageNotFoundError:
        installed = None
    if installed == READ_IN[package]:
        assert cause.quote in lines[number - 1]


def test_an_address_on_the_web_names_a_line_or_a_thread_and_its_words_are_known_by_the_cause():
    others = [cause for cause in SOURCES if cause not in CITED]
    assert len(others) > 5
    for cause in others:
        assert ON_THE_WEB.fullmatch(cause.source), cause.name


def test_texts_use_only_groups_of_a_pattern_and_fixes_are_one_line():
    for cause in causes():
        groups = {name for pattern in cause.patterns for name in pattern.groupindex} | {"who"}
        assert set(re.findall(r"\{(\w+)\}", cause.text)) <= groups, cause.name
        assert "\n" not in cause.text + cause.fix
        assert cause.text.endswith(".")
        assert cause.fix


def test_patterns_match_no_empty_line():
    assert not line_counts("")
    assert not any(cause.match("") for cause in causes())


def test_a_name_finds_its_cause_and_phases_are_there():
    assert cause_named("killed").name == "killed"
    assert len(phases()) == 7


def test_a_literal_is_in_every_match_of_its_pattern():
    patterns = {
        r"^(?:\S+: line \d+: +)?Killed(?: +\S.*)?$": "Killed",
        r"Ranks? [\d, ]+ failed in \d+ ms": " failed in ",
        r"one|other": "",
        r"ab?c{2,3}def": "def",
        r"\(a\) [^]x]+\[b\]": "(a) ",
        r"\d+ x": " x",
    }
    assert {pattern: literal_of(pattern) for pattern in patterns} == patterns


def test_every_pattern_of_a_line_has_a_word_to_look_for_first():
    for cause in causes():
        if cause.kind in OF_LINES:
            assert all(len(literal_of(item.pattern)) > 3 for item in cause.patterns), cause.name


@pytest.mark.parametrize(
    ("name", "error", "now"),
    [
        (
            "other-release",
            "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'use_liger'",
            "`use_liger` is gone by 0.18.2, now: use_liger_kernel. ",
        ),
        (
            "moved-name",
            "ImportError: cannot import name 'ORPOTrainer' from 'trl' (/v/trl/__init__.py)",
            "`ORPOTrainer` is gone by 0.29.1, now: trl.experimental.orpo.ORPOTrainer. ",
        ),
        (
            "other-release",
            "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'made_up'",
            "Current names: ",
        ),
    ],
)
def test_what_took_the_place_of_a_name_comes_from_the_table_of_renames(name, error, now):
    cause = cause_named(name)
    assert cause.remedy(cause.match(error)).startswith(now)
