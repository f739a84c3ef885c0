"""SVG: turn a matplotlib figure into a part of a page, in the page's colours.

matplotlib has no themes, so figures are drawn in placeholder colours. Each is replaced by the CSS
variable that the page sets for light and for dark.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

INK: Final = "#010203"
FAINT: Final = "#010204"
PAPER: Final = "#010205"

SERIES: Final = tuple(f"#0102{number:02x}" for number in range(0x10, 0x18))
"""Colours of runs, distinguished by hue."""

PARTS: Final = tuple(f"#0102{number:02x}" for number in range(0x20, 0x26))
"""Colours of the parts of a bar."""

VARIABLES: Final = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
    **{colour: f"var(--part-{number})" for number, colour in enumerate(PARTS)},
}

SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "svg.id": None,
    "text.parse_math": False,
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": FAINT,
    "axes.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}


@contextmanager
def drawing(name: str) -> Generator[None]:
    """Set up matplotlib to draw for the page, so that the same data give the same bytes."""
    import matplotlib as untyped

    settings = SETTINGS | {"svg.hashsalt": name}
    with cast("Any", untyped).rc_context(settings), warnings.catch_warnings():
        # The page is shown in the reader's fonts; those here only measure and may lack letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


class Hint(NamedTuple):
    """What a page knows of one shape of a figure."""

    run: int | None
    """Number of its run, with which it is switched off; None for a shape of all runs."""

    text: str = ""
    """Words under the pointer; empty for none."""


def inline(
    figure: Any, *, name: str, title: str, hints: Mapping[str, Sequence[Hint]] | None = None
) -> str:
    """Return the figure as an `<svg>` for a page, with a title for screen readers.

    Args:
        figure: The matplotlib figure.
        name: Put before every id, since all figures of a page share one namespace of ids.
        title: What it is a figure of.
        hints: The hints on an artist's shapes in their order, or one on the whole artist, by its
            gid.
    """
    from matplotlib.backends import backend_svg as untyped

    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # `savefig` would draw everything twice: once for the layout alone (matplotlib 3.11).
    cast("Any", untyped).FigureCanvasSVG(figure).print_svg(stream, metadata=nothing)
    root = ElementTree.fromstring(stream.getvalue())
    for element in root.iter():
        element.tag = element.tag.partition("}")[2] or element.tag
    for element in root.iter("g"):
        _annotate(element, (hints or {}).get(element.get("id", ""), ()))
    for element in root.iter():
        attributes = {key.partition("}")[2] or key: text for key, text in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({key: _attribute(key, attributes[key], name) for key in attributes})
    for defs in root.findall("defs"):
        for style in defs.findall("style"):  # it would apply to the whole page
            defs.remove(style)
    width, height = (float(text) for text in root.attrib["viewBox"].split()[2:])
    root.attrib.update({"role": "img", "aria-label": title, "width": f"{width:g}"})
    root.attrib["height"] = f"{height:g}"
    label = ElementTree.Element("title")
    label.text = title
    root.insert(0, label)
    return ElementTree.tostring(root, encoding="unicode")


def _annotate(element: ElementTree.Element, hints: Sequence[Hint]) -> None:
    """Tell the shapes of an artist whose they are, and what to show under the pointer."""
    shapes = [element]
    if len(hints) != 1:
        defined = [path for defs in element.iter("defs") for path in defs.iter("path")]
        drawn = [*element.iter("path"), *element.iter("use")]
        shapes = [shape for shape in drawn if shape not in defined]
    if len(shapes) != len(hints):  # hidden ones, or an artist without hints
        return
    for shape, hint in zip(shapes, hints, strict=True):
        if hint.run is not None:
            shape.set("data-run", str(hint.run))
        if hint.text:
            shape.set("data-tip", hint.text)


def _attribute(key: str, text: str, name: str) -> str:
    if key == "id":
        return f"{name}-{text}"
    if key == "href":
        return text.replace("#", f"#{name}-", 1)
    if key == "style":
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, variable)
        # The page chooses the font.
        return re.sub(r"font: (?:\w+ )?([\d.]+px)[^;]*", r"font-size: \1", text)
    return re.sub(r"url\(#", f"url(#{name}-", text)
