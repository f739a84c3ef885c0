"""Sections and grids, and the forms in which they are shown: text, Markdown, HTML, CSV."""

import io
import re

import pytest
from rich.console import Console

from toolkit.tables.grid import Column, Missing, Section, grid
from toolkit.tables.markdown import document, escaped, section_text
from toolkit.tables.page import markdown_html, render_page, section_html
from toolkit.tables.sheet import render_sheet
from toolkit.tables.terminal import print_tables

MARKUP = (
    *("_em_", "__strong__", "*em*", "`code`", "[a](http://b)", "![a](b)", "<http://a.b>"),
    *("- item", "+ item", "1. item", "12) item", "# heading", "=", "---", "~~gone~~", "a | b"),
    *("<b>bold</b>", "&lt;", "&#60;", "\\*", "a\n# b", "    code", "> quote"),
)


def rendered(html):
    """Return the tags and the text of HTML."""
    text = re.sub(r"<[^>]*>", "", html).replace("&lt;", "<").replace("&gt;", ">")
    text = text.replace("&#39;", "'").replace("&quot;", '"').replace("&#34;", '"')
    return re.findall(r"<(\w+)", html), text.replace("&amp;", "&").strip()


@pytest.mark.parametrize("text", MARKUP)
def test_text_of_a_user_is_never_markup(text):
    words = " ".join(text.split())
    assert rendered(markdown_html(escaped(text))) == (["p"], words)
    assert rendered(markdown_html(f"- {escaped(text)}")) == (["ul", "li"], words)
    section = Section(header=("a", "b"), rows=[(text, text)], notes=[text])
    tags, shown = rendered(markdown_html(section_text(section), section))
    assert tags == [
        *("div", "table", "thead", "tr", "th", "th", "tbody", "tr", "th", "td"),
        "ul",
        "li",
    ]
    assert shown.split() == ["a", "b", *(words.split() * 3)]


@pytest.mark.parametrize(
    "text", ["zero2_offload", "-0.12 GiB", "+0.50 GiB (+100.0%)", "1.5 s", "a-b"]
)
def test_usual_words_and_numbers_are_not_escaped(text):
    assert escaped(text) == text


def cell(name):
    return lambda item: Missing("nobody looked") if item[name] is None else str(item[name])


ITEMS = [{"name": "a", "x": 1, "y": None}, {"name": "b", "x": None, "y": None}]
COLUMNS = [Column("x", cell("x")), Column("y", cell("y"))]
NAMING = [Column("run", lambda item: item["name"])]


def shown_grid(**options):
    return grid(ITEMS, COLUMNS, label=lambda item: item["name"], naming=NAMING, **options)


def test_a_missing_cell_has_its_reason_once_below():
    section = shown_grid()
    assert section.header == ["run", "x", "y"]
    assert section.rows == [["a", "1", "n/a"], ["b", "n/a", "n/a"]]
    assert section.notes == ["n/a: a (y); b (all): nobody looked"]
    assert shown_grid(says_all=False).notes == ["n/a: a (y); b (x, y): nobody looked"]


def test_an_empty_column_is_left_out_with_its_reason_kept():
    section = shown_grid(drop_empty=True)
    assert section.header == ["run", "x"]
    assert section.notes == ["n/a: b (x): nobody looked", "left out: every run (y): nobody looked"]


def test_a_page_names_columns_and_lines_and_marks_what_is_bad():
    section = Section(
        "A `text`.",
        ["run", "status", "loss"],
        [["ddp", "ok", "1.2e-06"], ["fsdp", "oom", "n/a"]],
        title="The runs",
        id="table",
        words=["status"],
        roles=[["control"], []],
    )
    html = section_html(section)
    assert '<section id="table">\n<h2>The runs</h2>\n<p>A <code>text</code>.</p>' in html
    assert 'role="region" aria-label="The runs"' in html
    assert html.count('<th scope="col"') == 3
    assert '<th scope="row">ddp <span class="role">control</span></th>' in html
    assert '<td class="good left">ok</td>' in html
    assert '<td class="bad left">oom</td>' in html
    assert '<td><span class="whole">1.2e-06</span></td>' in html
    folded = section_html(section._replace(folded=True))
    assert "<details><summary>All 2 lines</summary>" in folded


def test_a_page_has_its_head_its_parts_and_its_foot_in_order():
    page = render_page(
        "<i>",
        kind="A page",
        tab="tab",
        head={"verdict": "All is **well**.", "broken": ""},
        parts=[Section("One.", id="one"), Section("Two.", id="two")],
        foot="`again`",
    )
    wanted = ["&lt;i&gt;", 'id="verdict"', "<strong>well", 'id="one"', 'id="two"', "<code>again"]
    places = [page.index(each) for each in wanted]
    assert places == sorted(places)
    assert 'id="broken"' not in page
    assert "default-src 'none'" in page


def test_a_document_has_a_title_only_where_a_section_has_one():
    sections = [Section("One."), Section("Two.", title="More", notes=["a note"])]
    assert document(["# Page"], sections) == "# Page\n\nOne.\n\n## More\n\nTwo.\n\n- a note\n"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_word_breaks_in_a_terminal_and_the_name_of_a_line_is_repeated(width):
    header = ["run", *(f"quantity {letter}" for letter in "ABCDE")]
    rows = [["fsdp-trainer-x2", *["0.50 GiB"] * 5], ["parameter_server", *["n/a"] * 5]]
    stream = io.StringIO()
    print_tables(Section("", header, rows), console=Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    named = [line for line in lines if line.startswith("parameter_server")]
    assert len(named) == {40: 3, 80: 1, 200: 1}[width]
    assert sum(line.count("0.50 GiB") for line in lines) == 5


def test_a_sheet_has_a_header_without_a_line_and_no_formula():
    assert render_sheet([], empty=["run"]) == "run\n"
    lines = [{"run": "=a()", "held": True, "loss": None, "text": "a\nb"}]
    assert render_sheet(lines, empty=[]) == "run,held,loss,text\n'=a(),true,,a b\n"
