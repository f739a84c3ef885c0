"""`report.html`: what is in it, in which order, and what can never get into it."""

import functools
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from places import ROOT

from toolkit.comparing.predicted import no_prediction
from toolkit.comparing.report import figures, write
from toolkit.comparing.report.figures import draw_all, draw_one
from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.sections import GLOSSARY
from toolkit.comparing.report.verdict import REHEARSAL
from toolkit.comparing.report.write import render_markdown, render_page

page_of = functools.partial(render_page, show_speed=True)

FIGURES = ["speed", "memory", "peak", "traffic", "losses", "phases", "scaling"]
VOID = {"meta", "link", "br", "hr", "img", "input"}
OUTSIDE = re.compile(r"(?:https?:)?//|@import|javascript:", re.IGNORECASE)

EVIL = "<script>alert(1)</script>\"'&{{7*7}}$x_{$ \x1b[31mred\x1b]0;t\x07 \ud800 \u202e 日本 _=1+1"


class Page(HTMLParser):
    """The page as a browser reads it: tags with attributes, ids in order, text, cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.cells, self.figures = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "figure":
            self.figures[dict(attrs)["id"].removeprefix("figure-")] = []
        if self.figures:
            self.figures[list(self.figures)[-1]].append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th", "span", "a") and self.cells:
            self.cells[-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


parsed = functools.cache(Page)
"""Reads a page once, for several tests."""


@pytest.fixture(params=[True, False], ids=["rehearsal", "gpus"])
def rehearsal(request):
    return request.param


@pytest.fixture
def results(rehearsal, full_results):
    return full_results(rehearsal=rehearsal)


@pytest.fixture(scope="module")
def rendered(full_results):
    """Return the report of these results, unchanged, and the figures on it: made once."""

    @functools.cache
    def made(rehearsal, *, render=render_page, show_speed=True):
        drawn = []

        def noted(results, **asked):
            drawn.extend(draw_all(results, **asked))
            return drawn

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(write, "draw_all", noted)
            return render(full_results(rehearsal=rehearsal), show_speed=show_speed), drawn

    return made


@pytest.fixture(scope="module")
def text_of(rendered):
    return lambda rehearsal, **asked: rendered(rehearsal, **asked)[0]


@pytest.fixture(scope="module")
def drawn_of(rendered):
    return lambda rehearsal: rendered(rehearsal)[1]


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr(figures, "is_installed", lambda module: module != "matplotlib")


@pytest.fixture
def text(rehearsal, text_of):
    return text_of(rehearsal)


@pytest.fixture
def drawn(rehearsal, drawn_of):
    return drawn_of(rehearsal)


def test_the_page_reads_in_order(text_of):
    page = parsed(text_of(True))
    wanted = ["rehearsal", "verdict", "table", "figures", *(f"figure-{each}" for each in FIGURES)]
    wanted += ["speed", "memory", "peak", "ranks", "traffic", "collectives", "other-collectives"]
    wanted += ["agreement", "time", "warm-up", "scaling"]
    wanted += ["fixed", "environment", "commands", "failures", "limits"]
    assert [each for each in page.ids if each in wanted] == wanted
    assert page.text.index(REHEARSAL) < page.text.index("runs trained the same model")


def test_on_gpus_nothing_is_said_of_a_rehearsal(text_of):
    page = parsed(text_of(False))
    assert "rehearsal" not in page.ids
    assert REHEARSAL not in page.text


SPEED_WORDS = re.compile(r"(?i)tokens/s|tokens a second|step time|seconds a step|speed-up")


@pytest.mark.parametrize("render", [render_page, render_markdown])
def test_a_rehearsal_shows_no_speed_anywhere_unless_asked(render, text_of):
    assert not SPEED_WORDS.search(text_of(True, render=render, show_speed=False))
    assert SPEED_WORDS.search(text_of(True, render=render))
    assert SPEED_WORDS.search(text_of(False, render=render, show_speed=False))
    page = parsed(text_of(True, show_speed=False))
    assert list(page.figures) == ["memory", "peak", "traffic", "losses"]
    assert {"speed", "time", "warm-up", "scaling"}.isdisjoint(page.ids)


def test_control_and_baseline_are_named(text_of, rehearsal):
    assert "ddp-trainer baseline" in parsed(text_of(rehearsal)).text
    words = parsed(text_of(rehearsal, show_speed=False)).text
    assert "single-trainer control" in words
    assert ("ddp-trainer baseline" in words) is not rehearsal
    assert "Control: single-trainer; gaps are measured from it." in words
    assert ("Baseline of speed: ddp-trainer" in words) is not rehearsal


def test_every_figure_is_there_with_a_name_a_caption_and_a_size(text, drawn):
    page = parsed(text)
    assert list(page.figures) == FIGURES
    for name, tags in page.figures.items():
        (svg,) = [attrs for tag, attrs in tags if tag == "svg"]
        assert svg["role"] == "img", name
        assert svg["aria-label"]
        assert min(float(svg["width"]), float(svg["height"])) > 100
        assert {"title", "figcaption", "h3"} <= {tag for tag, _ in tags}
    for figure in drawn:
        assert re.search(r"[Bb]ytes|[Ss]econd|nats", figure.caption), figure.name


SHOWN = {
    "speed": "Tokens a second are least in single-trainer (500) and most in fsdp-trainer-x4 "
    "(1,200, 2.4 times as much).",
    "memory": "The states take least in fsdp-trainer-x4 (0.25 GiB) and most in single-trainer, "
    "ddp-trainer and ddp-loop (1.00 GiB, 4.0 times as much).",
    "peak": "The tensors of the fullest moment take least in fsdp-trainer-x4 (0.30 GiB) and most "
    "in single-trainer, ddp-trainer and ddp-loop (1.19 GiB, 4.0 times as much).",
    "traffic": "Collectives carry least in ddp-trainer and ddp-loop (0.25 GiB) and most in "
    "fsdp-trainer-x2 and fsdp-trainer-x4 (0.50 GiB, 2.0 times as much).",
    "losses": "The losses go from 5.0000 to 4.0000; the largest gap to single-trainer is 1.0e-05, "
    "in ddp-trainer at step 4.",
    "phases": "The longest phase is backward in single-trainer, ddp-trainer, fsdp-trainer-x2, "
    "ddp-loop and fsdp-trainer-x4.",
    "scaling": "The speed-up is least in fsdp-trainer-x2 (1.40x) and most in fsdp-trainer-x4 "
    "(2.40x, 1.7 times as much).",
}


def test_every_figure_says_in_a_sentence_what_it_shows_in_these_runs(full_results, drawn, text):
    if drawn[0].results["runs"][0]["memory"]["peak_bytes"] is None:
        assert {figure.name: figure.shows for figure in drawn} == SHOWN
    for figure in drawn:
        assert re.fullmatch(r"[A-Z].*[^.]\.", figure.shows), figure.name
        assert f'<p class="shows">{figure.shows}</p>' in text


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_page_is_made_and_says_how_to_get_the_figures(results):
    page = page_of(results)
    assert "<svg" not in page
    assert "matplotlib is not installed." in page
    assert "Run pip install matplotlib" in page
    assert "Nothing to draw" not in page


def named(name, drawn):
    (found,) = [figure for figure in drawn if figure.name == name]
    return found


def figure_of(results, name):
    return named(name, [draw_one(results, name)])


def keys_of(figure):
    return [key.text for key in figure.keys]


def test_predictions_stand_as_ticks_beside_what_was_counted(drawn, rehearsal):
    for name in ("memory", "traffic"):
        figure = named(name, drawn)
        assert "predicted by the planner" in keys_of(figure)
        assert not any("No tick" in note for note in figure.notes)
    peak = named("peak", drawn)
    assert "predicted by the planner" in keys_of(peak)
    assert ("peak on the device" in keys_of(peak)) != rehearsal
    assert {"activations", "other"} <= set(keys_of(peak))


def test_the_phases_are_those_of_a_step(drawn):
    assert keys_of(named("phases", drawn)) == [
        "data",
        "forward",
        "backward",
        "optimizer",
        "other",
    ]
    assert named("phases", drawn).svg.count("0.500 s") == 5


def test_a_speed_up_has_its_ideal_and_its_base(drawn, rehearsal):
    scaling = named("scaling", drawn)
    assert keys_of(scaling) == ["fsdp-trainer", "ideal"]
    assert "base's (single-trainer)" in scaling.caption
    assert ("says nothing about GPUs" in scaling.caption) == rehearsal


def test_a_rehearsal_sets_speed_against_what_carries_over(drawn_of, bare_results):
    assert named("speed", drawn_of(True)).title == "Tokens/s against counted peak"
    assert figure_of(bare_results(), "speed").title == "Tokens/s against states"
    assert named("speed", drawn_of(False)).title == "Tokens/s against peak memory"


@pytest.mark.parametrize("rehearsal", [True, False])
def test_results_in_which_little_was_counted_make_a_page(bare_results, rehearsal):
    page = Page(page_of(bare_results(rehearsal=rehearsal)))
    assert all(cell.strip() for cell in page.cells)
    assert not {"speed", "scaling"} & set(page.ids)


def test_traffic_names_every_purpose_even_of_one_process(full_results):
    results = full_results()
    results["runs"] = [row for row in results["runs"] if row["num_processes"] == 1]
    purposes = ["parameters", "gradients", "activations", "all other"]
    assert keys_of(figure_of(results, "traffic"))[:4] == purposes


def test_scaled_runs_without_a_speed_are_all_that_the_figure_of_scaling_is_about(full_results):
    results = full_results(rehearsal=False)
    for row in results["runs"]:
        row["tokens_per_second"] = None
        row["not_measured"]["tokens_per_second"] = "no packed rows were asked for"
    assert figure_of(results, "scaling").notes == [
        "Not drawn for any run: no packed rows were asked for"
    ]


def test_without_a_prediction_it_is_said_why(full_results):
    results = full_results()
    for row in results["runs"]:
        row["predicted"] = no_prediction("no run has told what model it is")
    results["runs"][1]["predicted"] = no_prediction("not predicted: the optimizer is lion")
    notes = figure_of(results, "memory").notes
    assert "No tick for ddp-trainer: not predicted: the optimizer is lion" in notes
    assert any("no run has told what model" in note for note in notes)


def test_a_run_that_is_not_drawn_has_its_reason(drawn):
    for figure in drawn:
        if figure.name == "scaling":
            assert figure.notes == []  # the run that failed is no part of it
            continue
        assert figure.notes == [
            "Not drawn for zero3-trainer: oom: rank 1 failed at step 2: OutOfMemoryError"
        ]


def test_with_nothing_to_draw_every_figure_says_so(make_results, make_row):
    failed = {"status": "failed", "reason": "no disk", "memory": None, "losses": None}
    failed |= {"tokens_per_second": None, "step_seconds": None, "final_loss": None}
    failed |= {"loss_gap": None, "not_measured": {}}
    failed |= {"phases": None, "peak": None}
    results = make_results(control=None)
    results["runs"] = [make_row(**failed)]
    page = Page(page_of(results))
    assert list(page.figures) == FIGURES[:-1]
    assert page.text.count("Nothing to draw.") == len(FIGURES) - 1
    assert page.text.count("Not drawn for any run: failed: no disk") == len(FIGURES) - 1


def test_a_comparison_without_a_run_still_makes_a_page(make_results):
    results = make_results(runs=[], control=None, complete=False)
    assert "No run has ended yet." in Page(page_of(results)).text


def test_no_cell_is_empty(text):
    page = parsed(text)
    assert len(page.cells) > 60
    assert all(cell.strip() for cell in page.cells)


def test_the_page_needs_no_network_and_allows_no_script_but_its_own(text):
    page = parsed(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"iframe", "object", "img", "form"} & {*tags}
    assert tags.count("script") == 1
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in text
    assert text.count("script-src") == 1
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href"):
            assert re.match(r"#|data:,$", attributes.get(name, "#")), (tag, attributes)
    assert not OUTSIDE.search(text)
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_contents_list_every_section(text):
    (nav,) = re.findall(r'<nav id="contents".*?</nav>', text, re.DOTALL)
    listed = re.findall(r'<a href="#(.+?)">(.+?)</a>', nav)
    assert listed == re.findall(r'<section id="(.+?)".*?>\s*<h2>(.+?)</h2>', text)
    assert {"table", "figures", "agreement", "words"} < {anchor for anchor, _ in listed}


def test_the_first_use_of_a_word_in_a_section_leads_to_its_meaning(text):
    page = parsed(text)
    links = [attrs["href"][1:] for _, attrs in page.tags if attrs.get("class") == "word"]
    assert {*links} <= {*page.ids}
    assert {"words-gap", "words-control", "words-states", "words-rank"} < {*links}
    for section in re.findall(r"<section.*?</section>", text, re.DOTALL):
        within = re.findall(r'class="word" href="(.+?)"', section)
        assert len(within) == len({*within})
        assert not within or 'id="words"' not in section


def test_the_words_are_those_of_the_glossary():
    docs = (ROOT / "docs" / "glossary.md").read_text()
    wanted = docs[docs.index("## ") :].replace("## ", "### ")
    assert GLOSSARY.read_text() == re.sub(r"\s*\(\[.*?\]\(.*?\)\)", "", wanted, flags=re.DOTALL)


@pytest.mark.usefixtures("without_matplotlib")
def test_paths_of_a_command_are_relative_to_the_report(results):
    command = "accelerate launch --config_file=/a/b/ddp-trainer-1/x.yaml -m toolkit.train /a/ddp-1"
    results["runs"][1] |= {"command": command, "folder": "ddp-trainer-1"}
    for text in (render_page(results), render_markdown(results)):
        assert "--config_file=ddp-trainer-1/x.yaml -m toolkit.train /a/ddp-1" in text
        assert "relative to the folder of this report" in text


def test_each_shape_knows_its_run_and_its_value(drawn, text, rehearsal):
    shapes = [
        (attrs["data-run"], attrs.get("data-tip", ""))
        for _, attrs in parsed(text).tags
        if "data-run" in attrs
    ]
    names = [row["name"] for row in drawn[0].results["runs"]]
    assert {run for run, _ in shapes} == {str(number) for number in range(5)}
    for run, tip in shapes:
        assert not tip or tip.startswith(f"{names[int(run)]}: "), tip
    tips = {tip for _, tip in shapes}
    assert "fsdp-trainer-x4: optimizer states 0.12 GiB" in tips
    assert "ddp-trainer: backward 0.250 s" in tips
    held = "0.30 GiB" if rehearsal else "0.31 GiB"
    assert f"fsdp-trainer-x4: 1,200 tokens/s, {held}" in tips
    tags = [attrs for _, attrs in parsed(text).tags]
    (runs,) = [json.loads(attrs["data-runs"]) for attrs in tags if "data-runs" in attrs]
    assert [name for name, _ in runs] == names


def test_each_step_has_the_losses_of_all_runs_under_the_pointer(drawn):
    losses = named("losses", drawn)
    tips = re.findall(r'data-tip="(step .*?)"', losses.svg)
    assert len(tips) == 2 * 4  # of losses, and of gaps
    lines = tips[3].split("&#10;")
    assert lines[0] == "step 4"
    assert "ddp-trainer: 4.0000, gap 1.0e-05" in lines
    assert "single-trainer: 4.0000" in lines


def test_a_long_course_has_no_step_under_the_pointer(results):
    for row in results["runs"]:
        row["losses"] = row["losses"] and [4.0] * 201
    assert "data-tip" not in figure_of(results, "losses").svg


def test_figures_take_their_colours_from_the_page(drawn):
    for figure in drawn:
        assert "var(--ink)" in figure.svg
        assert not re.search(r"#[0-9a-f]{6}", figure.svg), figure.name


def test_no_id_stands_twice(text):
    page = parsed(text)
    assert len(set(page.ids)) == len(page.ids)
    refer = [attrs["href"] for tag, attrs in page.tags if tag == "use"]
    assert refer
    assert {each.removeprefix("#") for each in refer} <= set(page.ids)


def test_the_same_data_give_the_same_bytes(results, text):
    assert page_of(results) == text


def test_what_a_run_says_cannot_become_part_of_the_page(results, text, poisoned):
    evil = poisoned(results, EVIL)
    for name in ("fixed", "environment"):
        evil[name][EVIL] = {EVIL: [EVIL]}
    evil["runs"][-1]["tail"] += ["</pre></main><style>*{display:none}</style>", "<!--", "]]>"]
    plain, page = parsed(text), Page(page_of(redact_results(evil)))
    # Words, and not one tag that isn't the page's own.
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert list(page.figures) == FIGURES
    assert "<script>alert(1)</script>" in page.text
    assert "{{7*7}}" in page.text
    assert "\x1b" not in page.text
    assert page.ids.count("limits") == 1


def test_names_alone_that_are_hostile_do_not_break_a_figure(results):
    for number, row in enumerate(results["runs"]):
        row["strategy"] = ("_hidden", "$\\frac{$", "<b>&amp;" * 40, "日本", "<b>&amp;" * 40, "\n")[
            number
        ]
        row["name"] = row["strategy"]
    results["control"] |= {name: results["runs"][0][name] for name in ("strategy", "name")}
    page = Page(page_of(redact_results(results)))
    assert list(page.figures) == FIGURES


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0, -1.0])
def test_numbers_that_are_odd_are_drawn_or_left_out(results, odd):
    row = results["runs"][1]
    row |= {"losses": [odd] * 4, "final_loss": odd, "tokens_per_second": odd}
    row["step_seconds"] = {"median": odd, "p90": None}
    page = Page(page_of(results))
    assert list(page.figures) == FIGURES


def test_runs_of_different_lengths_are_compared_as_far_as_both_go(results):
    results["runs"][1]["losses"] = [5.0]
    assert "<svg" in figure_of(results, "losses").svg


@pytest.mark.usefixtures("without_matplotlib")
def test_a_broken_gate_stands_under_the_verdict_with_what_helps(results):
    broken = {
        **{"strategy": "ddp", "engine": "trainer", "gate": "loss", "first_step": 3},
        "name": "ddp-trainer",
        **{"value": 1.0, "limit": 1e-5, "reason": "loss apart from the control's"},
    }
    results["runs"][1] |= {"gates": {"loss": False}, "broken": [broken], "fix": "--bisect it"}
    page = Page(page_of(results))
    assert "broken" in page.ids
    assert "What helps: --bisect it" in page.text


def test_every_collective_can_be_unfolded(text):
    page = parsed(text)
    assert [tag for tag, _ in page.tags].count("details") == 2
    assert "All 4 lines" in page.text
