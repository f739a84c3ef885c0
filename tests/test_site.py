"""The site of the docs, as far as it needs no Sphinx: generated pages, order, dead links."""

import importlib
import json
import re
from dataclasses import dataclass, fields

import pytest
from documents import PAGES
from example_record import RECORD
from places import ROOT
from test_cli import VERBS
from typer.testing import CliRunner

import toolkit
from toolkit.cli import app
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.rows import bare_row
from toolkit.jobs.options import PlanOptions, RecommendOptions
from toolkit.records.fields import fields_of
from toolkit.records.record import Record
from toolkit.records.results import Row
from toolkit.training.arguments import full_parser

OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


@pytest.fixture(scope="module")
def site():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        yield importlib.import_module("build_site")


@pytest.fixture(scope="module")
def pages(site):
    return site.reference_pages()


@pytest.fixture(scope="module")
def source(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "source"
    without = site.write_source(folder)
    assert without == [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    return folder


def options_in(page, program):
    """Return the names of the options that a page declares for a program."""
    (section,) = re.findall(
        rf"^```\{{program\}} {re.escape(program)}\n```$(.*?)(?=^```\{{program\}}|\Z)",
        page,
        re.MULTILINE | re.DOTALL,
    )
    signatures = re.findall(r"^```\{option\} (.*)$", section, re.MULTILINE)
    return {name for signature in signatures for name in OPTION.findall(signature)}


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_verb_has_the_options_of_its_help(words, pages):
    text = CliRunner().invoke(app, [*words, "--help"], prog_name="toolkit").output
    listed = text.partition("Options:\n")[2].partition("Examples:")[0].splitlines()
    lines = [line for line in listed if re.match(r"  -", line)]
    shown = {name for line in lines for name in OPTION.findall(re.split(r"  +", line.strip())[0])}
    assert "--help" in shown
    assert options_in(pages["commands"], " ".join(["toolkit", *words])) == shown


def test_every_flag_of_training_is_there_once(pages):
    named = re.findall(r"^  (-.*)$", full_parser().format_help(), re.MULTILINE)
    shown = {name for line in named for name in OPTION.findall(re.split(r"  +", line)[0])}
    assert {"--packing", "--learning_rate", "--learning-rate"} < shown
    assert options_in(pages["flags"], "toolkit.train") == shown - {"-h", "--help"}
    signatures = re.findall(r"^```\{option\} (\S+?),? ", pages["flags"], re.MULTILINE)
    assert len(signatures) == len(set(signatures))


def test_every_public_name_is_there_with_a_docstring(pages):
    for name in toolkit.__all__:
        assert re.search(
            rf"^\.\. auto\w+:: toolkit(\.\w+)*\.{name}(\(.*\))?$", pages["python"], re.MULTILINE
        )
    assert {"autoclass", "autodata", "autoexception", "autofunction"} == set(
        re.findall(r"^\.\. (\w+)::", pages["python"], re.MULTILINE)
    )


def test_every_option_of_a_function_has_a_meaning(pages):
    for kind in (CompareOptions, PlanOptions, RecommendOptions):
        section = re.split(rf"^#+ `{kind.__name__}`$", pages["python"], flags=re.MULTILINE)[1]
        rows = [
            re.split(r"(?<!\\) \| ", line[2:-2])
            for line in re.split(r"^#", section, flags=re.MULTILINE)[0].splitlines()
            if line[:3] == "| `"
        ]
        assert [row[0] for row in rows] == [f"`{field.name}`" for field in fields(kind)]
        for name, meaning, default, kind_of_value in rows:
            assert meaning.strip(), name
            assert default.strip(), name
            assert "Annotated" not in kind_of_value, name


@dataclass(frozen=True)
class Table:
    """One object of a JSON file, in its page."""

    paths: set[str]
    rows: dict[str, list[str]]


def tables_of(page):
    tables = []
    for section in page.split("\n## ")[1:]:
        places = re.search(r"^At (.*)\.$", section, re.MULTILINE)
        cells = [
            re.split(r"(?<!\\) \| ", line[2:-2])
            for line in section.splitlines()
            if line[:2] == "| "
        ]
        rows = {name.strip("`"): rest for name, *rest in cells[2:]}
        tables.append(Table(set(re.findall("`(.*?)`", places[1])) if places else {""}, rows))
    return tables


def walk(value, path=""):
    """Yield the path and the names of each object in a file."""
    if isinstance(value, dict):
        yield path, value.keys()
        for name, inner in value.items():
            yield from walk(inner, f"{path}.{name}".strip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, f"{path}[]")


OPEN = {"training", "attestation", "guards", "environment", "fixed", "not_measured"}
"""Objects with more fields than those that the toolkit reads again, or with names for fields."""


def test_every_field_of_a_record_and_of_results_is_there(pages, tmp_path):
    options = CompareOptions(strategies=("ddp",))
    plan = build_plan(options, gpus=2, missing=lambda _: None)
    rows = {run.name: bare_row(run, "failed", "no disk", rehearsal=False) for run in plan.runs}
    comparison = Comparison(folder=tmp_path, plan=plan, options=options, environment={}, rows=rows)
    for name, content in {"record": RECORD, "results": comparison.results()}.items():
        tables = tables_of(pages[name])
        seen = 0
        for path, names in walk(json.loads(json.dumps(content))):
            fields = {field for table in tables if path in table.paths for field in table.rows}
            if not any(part in OPEN for part in re.split(r"\.|\[\]", path)) and fields:
                assert names <= fields, path
                seen += 1
        assert seen > 4


def test_every_field_has_a_meaning(pages):
    for page in ("record", "results"):
        tables = tables_of(pages[page])
        assert len(tables) > 8
        for table in tables:
            for name, (meaning, *_) in table.rows.items():
                assert meaning.strip(), (page, table.paths, name)


def test_each_measured_value_has_its_unit_and_what_null_means(pages):
    for kind, page, start in ((Record, "record", ""), (Row, "results", "runs[].")):
        tables = tables_of(pages[page])
        for path, fact in fields_of(kind):
            outer, _, name = f"{start}{path}".rpartition(".")
            (row,) = (table.rows[name] for table in tables if outer in table.paths)
            _, _, unit, null = row
            assert unit == fact.unit or fact.unit in ("step seconds", "interval", "difference")
            assert (fact.null_means or fact.missing or null) == null


def test_every_page_is_in_the_list_of_the_index_once(source):
    index = (source / "index.md").read_text("utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    files = [*source.rglob("*.md"), *source.rglob("*.ipynb")]
    there = {str(path.relative_to(source).with_suffix("")) for path in files} - {"index"}
    assert sorted(listed) == sorted(there)
    assert {f"docs/{page.path.stem}" for page in PAGES} <= there


def test_a_notebook_has_the_outputs_of_its_executed_copy_or_says_that_it_has_none(
    site, source, tmp_path
):
    (name,) = (path.name for path in (ROOT / "notebooks").glob("01_*.ipynb"))
    bare = json.loads((source / "notebooks" / name).read_text("utf-8"))
    assert site.NO_OUTPUTS in bare["cells"][1]["source"]

    executed = tmp_path / "executed"
    executed.mkdir()
    copy = json.loads((ROOT / "notebooks" / name).read_text("utf-8"))
    copy["metadata"]["ran"] = "here"
    (executed / name).write_text(json.dumps(copy))
    without = site.write_source(tmp_path / "source", executed=executed)
    assert name not in without
    assert json.loads((tmp_path / "source" / "notebooks" / name).read_text("utf-8")) == copy


def test_a_dead_link_and_a_dead_anchor_are_named(site, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.html").write_text(
        '<h1 id="here"></h1><a href="#here">a</a><a href="sub/two.html#there">b</a>'
        '<a href="https://example.org/x">c</a><a href="#nowhere">d</a><img src="no.png">'
    )
    (tmp_path / "sub" / "two.html").write_text(
        '<a id="there" href="../one.html">a</a><a href="../one.html#lost">b</a><a href="..">c</a>'
    )
    assert list(site.dead_links(tmp_path)) == [
        "one.html: #nowhere",
        "one.html: no.png",
        "sub/two.html: ..",
        "sub/two.html: ../one.html#lost",
    ]
