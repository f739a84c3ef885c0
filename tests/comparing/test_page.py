"""`report.html`: what is in it, in which order, and what can never get into it."""

import functools
import re
from html.parser import HTMLParser

import pytest

from toolkit.comparing.predicted import no_prediction
from toolkit.comparing.report import figures
from toolkit.comparing.report.figures import draw_all, draw_one
from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.verdict import REHEARSAL
from toolkit.comparing.report.write import render_page

FIGURES = ["speed", "memory", "peak", "traffic", "losses", "steps", "phases", "scaling"]
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
        if self.open and self.open[-1] in ("td", "th", "span") and self.cells:
            self.cells[-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(params=[True, False], ids=["rehearsal", "gpus"])
def rehearsal(request):
    return request.param


@pytest.fixture
def results(rehearsal, full_results):
    return full_results(rehearsal=rehearsal)


@pytest.fixture(scope="module")
def text_of(full_results):
    """Return the text of the page of these results, unchanged: made once."""
    return functools.cache(lambda rehearsal: render_page(full_results(rehearsal=rehearsal)))


@pytest.fixture(scope="module")
def drawn_of(full_results):
    """Return the figures of these results, unchanged: drawn once."""
    return functools.cache(lambda rehearsal: draw_all(full_results(rehearsal=rehearsal)))


@pytest.fixture
def text(rehearsal, text_of):
    return text_of(rehearsal)


@pytest.fixture
def drawn(rehearsal, drawn_of):
    return drawn_of(rehearsal)


def test_the_page_reads_in_order(text_of):
    page = Page(text_of(True))
    wanted = ["rehearsal", "verdict", "table", "figures", *(f"figure-{each}" for each in FIGURES)]
    wanted += ["speed", "memory", "peak", "ranks", "traffic", "collectives", "other-collectives"]
    wanted += ["agreement", "time", "warm-up", "scaling"]
    wanted += ["fixed", "environment", "commands", "failures", "limits"]
    assert [each for each in page.ids if each in wanted] == wanted
    assert page.text.index(REHEARSAL) < page.text.index("trained as single-trainer did")


def test_on_gpus_nothing_is_said_of_a_rehearsal(text_of):
    page = Page(text_of(False))
    assert "rehearsal" not in page.ids
    assert REHEARSAL not in page.text


def test_control_and_baseline_are_named(text, rehearsal):
    words = Page(text).text
    assert "single-trainer control" in words
    assert ("ddp-trainer baseline" in words) is not rehearsal
    assert "Control: single-trainer; gaps are measured from it." in words
    assert ("Baseline of speed: ddp-trainer" in words) is not rehearsal


def test_every_figure_is_there_with_a_name_a_caption_and_a_size(text, drawn):
    page = Page(text)
    assert list(page.figures) == FIGURES
    for name, tags in page.figures.items():
        (svg,) = [attrs for tag, attrs in tags if tag == "svg"]
        assert svg["role"] == "img", name
        assert svg["aria-label"]
        assert min(float(svg["width"]), float(svg["height"])) > 100
        assert {"title", "figcaption", "h3"} <= {tag for tag, _ in tags}
    for figure in drawn:
        assert re.search(r"[Bb]ytes|[Ss]econd|nats", figure.caption), figure.name


def test_without_matplotlib_the_page_is_made_and_says_how_to_get_the_figures(results, monkeypatch):
    monkeypatch.setattr(figures, "is_installed", lambda module: module != "matplotlib")
    page = render_page(results)
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


def test_single_starts_are_dots_only_where_there_are_several(results, drawn):
    assert "one start" in keys_of(named("steps", drawn))
    for row in results["runs"]:
        row["repeats"] = (row["repeats"] or [])[:1]
    assert "one start" not in keys_of(figure_of(results, "steps"))


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
    page = Page(render_page(bare_results(rehearsal=rehearsal)))
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
    page = Page(render_page(results))
    assert list(page.figures) == FIGURES[:-1]
    assert page.text.count("Nothing to draw.") == len(FIGURES) - 1
    assert page.text.count("Not drawn for any run: failed: no disk") == len(FIGURES) - 1


def test_a_comparison_without_a_run_still_makes_a_page(make_results):
    results = make_results(runs=[], control=None, complete=False)
    assert "No run has ended yet." in Page(render_page(results)).text


def test_no_cell_is_empty(text):
    page = Page(text)
    assert len(page.cells) > 60
    assert all(cell.strip() for cell in page.cells)


def test_the_page_needs_no_network_and_no_script(text):
    page = Page(text)
    assert not {"script", "iframe", "object", "img", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href"):
            assert re.match(r"#|data:,$", attributes.get(name, "#")), (tag, attributes)
    assert not OUTSIDE.search(text)
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_figures_take_their_colours_from_the_page(drawn):
    for figure in drawn:
        assert "var(--ink)" in figure.svg
        assert not re.search(r"#[0-9a-f]{6}", figure.svg), figure.name


def test_no_id_stands_twice(text):
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    refer = [attrs["href"] for tag, attrs in page.tags if tag == "use"]
    assert refer
    assert {each.removeprefix("#") for each in refer} <= set(page.ids)


def test_the_same_data_give_the_same_bytes(results, text):
    assert render_page(results) == text


def test_what_a_run_says_cannot_become_part_of_the_page(results, text, poisoned):
    evil = poisoned(results, EVIL)
    for name in ("fixed", "environment"):
        evil[name][EVIL] = {EVIL: [EVIL]}
    evil["runs"][-1]["tail"] += ["</pre></main><style>*{display:none}</style>", "<!--", "]]>"]
    plain, page = Page(text), Page(render_page(redact_results(evil)))
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
    page = Page(render_page(redact_results(results)))
    assert list(page.figures) == FIGURES


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0, -1.0])
def test_numbers_that_are_odd_are_drawn_or_left_out(results, odd):
    row = results["runs"][1]
    row |= {"losses": [odd] * 4, "final_loss": odd, "tokens_per_second": odd}
    row["step_seconds"] = {"median": odd, "p90": None}
    page = Page(render_page(results))
    assert list(page.figures) == FIGURES


def test_runs_of_different_lengths_are_compared_as_far_as_both_go(results):
    results["runs"][1]["losses"] = [5.0]
    assert "<svg" in figure_of(results, "losses").svg


def test_a_broken_gate_stands_under_the_verdict_with_what_helps(results):
    broken = {
        **{"strategy": "ddp", "engine": "trainer", "gate": "loss", "first_step": 3},
        "name": "ddp-trainer",
        **{"value": 1.0, "limit": 1e-5, "reason": "loss apart from the control's"},
    }
    results["runs"][1] |= {"gates": {"loss": False}, "broken": [broken], "fix": "--bisect it"}
    page = Page(render_page(results))
    assert "broken" in page.ids
    assert "What helps: --bisect it" in page.text


def test_every_collective_can_be_unfolded(text):
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("details") == 2
    assert "All 4 lines" in page.text
