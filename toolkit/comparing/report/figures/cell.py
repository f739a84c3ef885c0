"""One figure of a report by itself, for the cell of a notebook.

It is in the page's light colours on a card of its own, so that it can be read in a dark theme too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from toolkit.comparing.report.figures import draw_all, draw_one
from toolkit.comparing.report.figures.frame import Mark, ReportFigure
from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.picture import page_colours
from toolkit.errors import UsageError
from toolkit.records.results import Results

MARKS: Final[dict[Mark, str]] = {
    "area": "■",
    "line": "━",
    "dashed": "╍",
    "tick": "|",
    "dot": "●",
    "square": "■",
    "diamond": "◆",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CellFigure:
    """A figure of a comparison; it shows itself in a notebook."""

    title: str
    caption: str
    notes: tuple[str, ...]
    """Runs that are not drawn, and why."""

    html: str

    def __repr__(self) -> str:
        return "\n".join([self.title, self.caption, *self.notes])

    def _repr_html_(self) -> str:
        return self.html


def cell_figure(results: Results, name: str) -> CellFigure:
    """Return a figure of the report; the caller should pass redacted results.

    Raises:
        UsageError: the report has no such figure.
    """
    shown = for_readers(results)
    figure = draw_one(shown, name)
    if figure is None:
        names = ", ".join(each.name for each in draw_all(shown))
        raise UsageError(f"The report has no figure {name!r}. It has {names}.")
    return CellFigure(
        title=figure.title,
        caption=figure.caption,
        notes=tuple(figure.notes),
        html=_html(figure, page_colours()),
    )


def _html(figure: ReportFigure, colours: dict[str, str]) -> str:
    from markupsafe import Markup, escape

    keys = Markup(" &ensp; ").join(
        Markup('<span style="color: {}">{}</span> {}').format(key.colour, MARKS[key.kind], key.text)
        for key in figure.keys
    )
    drawing = escape(figure.instead)
    if figure.svg is not None:
        drawing = Markup(figure.svg.replace("<svg ", '<svg style="width: 100%; height: auto" ', 1))
    small = Markup('<div style="font-size: 0.85em; color: var(--muted)">{}</div>')
    lines = [small.format(line) for line in (keys, figure.caption, *figure.notes) if line]
    text = Markup(
        '<div style="background: var(--paper); color: var(--ink); padding: 0.8em; '
        'max-width: 46em; font-family: sans-serif">'
        "<div><b>{}</b></div>{}{}</div>"
    ).format(figure.title, drawing, Markup("").join(lines))
    for variable, colour in colours.items():
        text = text.replace(f"var(--{variable})", colour)
    return str(text)
