"""Each figure draws every run that has its numbers, at the place of these numbers."""

from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from toolkit.comparing.report.figures import draw_all, draw_one, frame
from toolkit.comparing.report.figures.memory import bytes_by_purpose
from toolkit.comparing.report.figures.pipelines import bubbles
from toolkit.comparing.report.figures.speed import _spread
from toolkit.comparing.report.runs_table import runs_table
from toolkit.errors import UsageError
from toolkit.notebook import Compared

GIB = 2**30


def matplotlib_figures(draw, results):
    """Draw, and return the matplotlib figure of each name."""
    figures = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            frame, "inline", lambda figure, *, name, title, hints: figures.update({name: figure})
        )
        draw(results)
    return figures


@pytest.fixture(scope="module")
def drawn(full_results):
    """The results, the runs that ended well, and the matplotlib figure of each name."""
    results = full_results(rehearsal=False)
    figures = matplotlib_figures(draw_all, results)
    return results, [row for row in results["runs"] if row["status"] == "ok"], figures


def lines(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def bars(axes, row):
    """Return the widths of the bars on one line of a figure, which lie end to end."""
    parts = [part for part in axes.collections if isinstance(part, PolyCollection)]
    boxes = [path.get_extents() for part in parts for path in part.get_paths()]
    of_row = [box for box in boxes if round((box.y0 + box.y1) / 2) == row]
    widths = [box.width for box in of_row]
    begins = [sum(widths[:place]) for place in range(len(widths))]
    assert [box.x0 for box in of_row] == pytest.approx(begins)
    return widths


def dots(axes):
    return [dot for x, y in lines(axes) for dot in zip(x, y, strict=True)]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_speed_stands_over_the_peak_with_the_name_beside_it(drawn):
    _, rows, figures = drawn
    (axes,) = figures["speed"].axes
    assert lines(axes) == [
        ([row["memory"]["peak_bytes"] / GIB], [row["tokens_per_second"]]) for row in rows
    ]
    assert [line.get_marker() for line in axes.lines] == [
        "s" if row["engine"] == "loop" else "o" for row in rows
    ]
    assert [text.get_text() for text in axes.texts] == [row["name"] for row in rows]
    assert [text.xy for text in axes.texts] == [(x[0], y[0]) for x, y in lines(axes)]
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    assert all(x[0] < right and y[0] < top for x, y in lines(axes))


def test_names_keep_their_order_and_distance_within_the_figure():
    places = _spread([0.5, 0.5, 0.98, 0.1, 0.99], apart=0.1)
    assert places == pytest.approx([0.5, 0.6, 0.9, 0.1, 1.0])
    assert _spread([0.0, 0.02], apart=0.1) == pytest.approx([0.0, 0.1])
    assert _spread([0.2, 0.9], apart=0.1) == [0.2, 0.9]


@pytest.mark.parametrize(
    ("figure", "parts"),
    [
        ("memory", ["parameters", "master", "gradients", "optimizer"]),
        ("peak", ["parameters", "master", "gradients", "optimizer", "activations", "other"]),
    ],
)
def test_bytes_are_bars_end_to_end_with_their_sum_beside_them(drawn, figure, parts):
    _, rows, figures = drawn
    (axes,) = figures[figure].axes
    assert names(axes) == [row["name"] for row in rows]
    for number, row in enumerate(rows):
        if figure == "memory":
            sizes = [row["memory"][f"{part}_bytes"] / GIB for part in parts]
        else:
            sizes = [row["peak"]["categories"][part] / GIB for part in parts]
        assert bars(axes, number) == pytest.approx(sizes)
        assert axes.texts[number].get_text() == f"{sum(sizes):.2f} GiB"
    if figure == "peak":
        given_out = [row["memory"]["peak_bytes"] / GIB for row in rows]
        assert dots(axes) == [(x, number) for number, x in enumerate(given_out)]


def test_traffic_is_bars_by_purpose(drawn):
    _, rows, figures = drawn
    (axes,) = figures["traffic"].axes
    for number, row in enumerate(rows):
        calls = row["traffic"]["collectives"]
        sent = [
            sum(call["payload_bytes"] for call in calls if call["purpose"] == purpose)
            for purpose in ("parameters", "gradients", "activations")
        ]
        sent.append(sum(call["payload_bytes"] for call in calls) - sum(sent))
        assert [width * GIB for width in bars(axes, number)] == pytest.approx(sent)


def test_a_bar_without_bytes_says_whether_one_process_is_why(full_results):
    results = full_results(rehearsal=False)
    rows = [row for row in results["runs"] if row["traffic"]]
    for row in rows:
        row["traffic"]["collectives"] = []
    figures = matplotlib_figures(bytes_by_purpose, results)
    texts = [text.get_text() for text in figures["traffic"].axes[0].texts]
    assert texts == ["none: one process" if row["num_processes"] == 1 else "none" for row in rows]
    assert len(set(texts)) == 2


def test_losses_are_drawn_from_step_1_and_gaps_below_them(drawn):
    _, rows, figures = drawn
    losses, gaps = figures["losses"].axes
    steps = [1, 2, 3, 4]
    assert lines(losses) == [(steps, row["losses"]) for row in rows]
    control, *others = rows
    least = gaps.get_ylim()[0]
    for (x, y), row in zip(lines(gaps), others, strict=True):
        assert x == steps
        differences = [abs(a - b) for a, b in zip(row["losses"], control["losses"], strict=True)]
        assert all(
            gap == pytest.approx(value) if value else gap == min(y)
            for gap, value in zip(y, differences, strict=True)
        )
        assert least <= min(y)


def test_other_seeds_are_a_band_from_the_lowest_to_the_highest_loss(full_results):
    results = full_results(rehearsal=False)
    row = next(row for row in results["runs"] if row["name"] == results["control"]["name"])
    above, below = ([loss + by for loss in row["losses"]] for by in (0.5, -0.25))
    results["other_seeds"] = [{"seed": 43, "losses": above}, {"seed": 44, "losses": below}]
    figures = matplotlib_figures(draw_all, results)
    band = figures["losses"].axes[0].collections[0].get_paths()[0]
    corners = {tuple(corner) for corner in band.vertices}
    for step, losses in enumerate(zip(above, below, strict=True), start=1):
        assert {(step, loss) for loss in losses} <= corners
    figure = draw_one(results, "losses")
    said = "Under 3 seeds, losses of a step lie up to 0.75 apart."
    assert figure.shows.endswith(said)
    assert said in runs_table(results).notes
    assert figure.caption.endswith(f"The grey band is {row['name']} under all seeds.")


def test_the_caption_of_losses_names_the_control(full_results):
    results = full_results(rehearsal=False)
    figure = draw_one(results, "losses")
    assert f"how far each is from {results['control']['name']} at that step" in figure.caption


def test_phases_are_bars_end_to_end(drawn):
    _, rows, figures = drawn
    (axes,) = figures["phases"].axes
    for number, row in enumerate(rows):
        medians = [row["phases"][name]["median"] for name in row["phases"]]
        assert bars(axes, number) == pytest.approx(medians)
        assert axes.texts[number].get_text() == f"{sum(medians):.3f} s"


def test_speed_up_is_drawn_over_the_number_of_processes(drawn):
    _, rows, figures = drawn
    (axes,) = figures["scaling"].axes
    control, *others = rows
    speeds = {
        row["name"]: row["tokens_per_second"] / control["tokens_per_second"] for row in others
    }
    ideal, fsdp = ([1, 4], [1, 4]), [1, speeds["fsdp-trainer-x2"], speeds["fsdp-trainer-x4"]]
    assert lines(axes) == [ideal, ([1, 2, 4], pytest.approx(fsdp))]


ORDER = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
"""1F1B of two micro-batches in two stages."""


@pytest.fixture
def piped(full_results):
    """Results of which one run was a pipeline, and that run."""
    results = full_results()
    row = next(row for row in results["runs"] if row["status"] == "ok")
    row["pipeline"] = {
        "schedule": "1f1b",
        "layers": [[0, 1], [2, 3]],
        "ranks": [0, 1],
        "micro_batches": 2,
        "idle_slots": 6,
        "slots": 18,
        "bubble": 1 / 3,
        "expected_bubble": 1 / 3,
        "order": ORDER,
    }
    return results, row


def test_a_pipelines_work_lies_in_its_slots_and_the_bubble_is_empty(piped, monkeypatch):
    drawn = []
    monkeypatch.setattr(frame, "inline", lambda figure, **_: drawn.append(figure))
    results, row = piped
    figure = bubbles(results)
    assert figure is not None
    assert [key.text for key in figure.keys] == ["forward", "backward"]
    (axes,) = drawn[0].axes
    boxes = {
        (round(box.get_y() + box.get_height() / 2), box.get_x()): box.get_width()
        for box in axes.patches
    }
    first = {(0, 0): 1, (0, 1): 1, (0, 4): 2, (0, 7): 2}
    second = {(1, 1): 1, (1, 2): 2, (1, 4): 1, (1, 5): 2}
    assert boxes == first | second
    length = axes.get_xlim()[1]
    assert 1 - sum(boxes.values()) / (2 * length) == pytest.approx(row["pipeline"]["bubble"])
    assert [text.get_text() for text in axes.texts] == list("01010011")


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (None, "no order of the work"),
        ([["0F0"], ["nothing"]], "damaged: 'nothing' is no work"),
        ([["0F0"], ["1B0"]], "damaged: Work whose input no rank recorded"),
        ([[f"0F{number}" for number in range(201)], []], "201 slots, too many"),
    ],
)
def test_a_pipeline_that_cannot_be_drawn_says_why(piped, order, reason):
    results, row = piped
    row["pipeline"].pop("order")
    if order is not None:
        row["pipeline"]["order"] = order
    figure = bubbles(results)
    assert figure is not None
    assert figure.svg is None
    assert reason in figure.notes[0]


def test_a_figure_of_a_cell_is_a_drawing_with_its_legend_in_fixed_colours(piped):
    results, _ = piped
    compared = Compared(folder=Path(), results=results)
    figure = compared.figure("bubble")
    html = figure._repr_html_()
    assert "<svg" in html
    assert "var(--" not in html
    assert "■</span> forward" in html
    assert str(figure).splitlines()[0] == "The bubble of a pipeline"
    assert str(figure).splitlines()[1] in html
    with pytest.raises(UsageError, match=r"no figure 'bubbles'\. It has .*losses, bubble"):
        compared.figure("bubbles")
