"""HTML of a page: its Markdown, with what a browser needs to show its tables well.

A page is one file that opens offline, on a phone too, in light and in dark. It forbids scripts and
network access. Text of a run or a user is escaped for Markdown, and HTML in it is never markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit.tables.grid import Section, tone_of
from toolkit.tables.markdown import section_text

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from markupsafe import Markup

TEMPLATE: Final = Path(__file__).with_name("page.html.jinja")
STYLE: Final = Path(__file__).with_name("page.css")

LONG: Final = 18
"""Letters beyond which a cell may break into lines."""

WORDY: Final = 36
"""Letters beyond which it is a sentence rather than a number."""

EXPONENT: Final = re.compile(r"(\d[\d.]*e[+-]\d+)")

SYNTAX: Final = (
    *("table", "list", "fence", "heading", "backticks", "emphasis", "escape", "entity"),
)
"""The Markdown that reports are written in; no links, no images, no HTML."""


def render_page(
    title: str,
    *,
    kind: str,
    tab: str,
    head: Mapping[str, str],
    parts: Iterable[Section | Markup],
    foot: str,
) -> str:
    """Return a page as one HTML file.

    Args:
        title: Its heading.
        kind: The line above it.
        tab: Its title in the browser.
        head: Blocks of Markdown below the heading, by their anchors.
        parts: Sections, or HTML that has their place.
        foot: Markdown at the end.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        kind=kind,
        tab=tab,
        foot=markdown_html(foot),
        css=Markup(STYLE.read_text(encoding="utf-8").strip()),
        head={anchor: markdown_html(text) for anchor, text in head.items() if text},
        parts=[part if isinstance(part, Markup) else section_html(part) for part in parts],
    )
    return page + "\n"


def section_html(section: Section) -> Markup:
    """Return a section with its heading, under its anchor."""
    from markupsafe import Markup

    heading = Markup("<h2>{}</h2>\n").format(section.title) if section.title else ""
    body = markdown_html(section_text(section), section)
    return Markup('<section id="{}">\n{}{}</section>').format(section.id, heading, body)


def markdown_html(text: str, section: Section | None = None) -> Markup:
    """Return Markdown as HTML.

    Args:
        text: Markdown that the toolkit wrote.
        section: The section whose table is in it.
    """
    from markupsafe import Markup

    parser = _parser()
    environment: dict[str, Any] = {}
    tokens = parser.parse(text, environment)
    shown = list(_with_frames(tokens, section or Section()))
    return Markup(parser.renderer.render(shown, parser.options, environment))


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero").enable(list(SYNTAX))
    parser.add_render_rule("text", _whole_numbers)
    return parser


def _whole_numbers(_: object, tokens: Sequence[Token], at: int, *others: object) -> str:
    """Return text escaped, in which no number breaks at its exponent's sign."""
    from markupsafe import escape

    return EXPONENT.sub(r'<span class="whole">\1</span>', str(escape(tokens[at].content)))


def _with_frames(tokens: Sequence[Token], section: Section) -> Iterator[Token]:
    """Yield the tokens, with a frame around each table in which it scrolls."""
    header: list[str] = []
    line = column = 0
    for at, token in enumerate(tokens):
        match token.type:
            case "table_open":
                header, line = [], -1
                if section.folded:
                    yield _html(f"<details><summary>All {len(section.rows)} lines</summary>\n")
                yield _frame(section.title)
            case "tr_open":
                line, column = line + 1, 0
            case "th_open":
                header.append(_text_of(tokens[at + 1]))
                token.attrSet("scope", "col")
                if column < section.names or header[-1] in section.words:
                    token.attrSet("class", "left")
                column += 1
            case "td_open" if column < section.names:
                _name(tokens[at : at + 3], section.roles[line - 1] if section.roles else ())
                column += 1
            case "td_open":
                heading = header[column]
                _value(tokens[at : at + 2], heading, is_words=heading in section.words)
                column += 1
            case "bullet_list_open":
                token.attrSet("class", "notes")
            case _:
                pass
        yield token
        if token.type == "table_close":
            yield _html("</div>\n" + "</details>\n" * section.folded)


def _name(cell: Sequence[Token], roles: Sequence[str]) -> None:
    """Make a cell the header of its line."""
    opening, inline, closing = cell
    opening.tag = closing.tag = "th"
    opening.attrSet("scope", "row")
    beside = [_html(f' <span class="role">{role}</span>') for role in roles]
    inline.children = [*(inline.children or []), *beside]


def _value(cell: Sequence[Token], heading: str, *, is_words: bool) -> None:
    """Give a cell the classes that its text needs."""
    opening, inline = cell
    text = _text_of(inline)
    width = "long wordy" if len(text) > WORDY else "long" if len(text) > LONG else ""
    tone = "bad" if text == "broken" else tone_of(heading, text) or ""
    if classes := " ".join(filter(None, (width, tone, "left" if is_words else ""))):
        opening.attrSet("class", classes)


def _text_of(inline: Token) -> str:
    return "".join(child.content for child in inline.children or [])


def _frame(title: str) -> Token:
    from markupsafe import Markup

    opening = '<div class="scroll" tabindex="0" role="region" aria-label="{}">\n'
    return _html(Markup(opening).format(title or "Table"))


def _html(text: str) -> Token:
    from markdown_it.token import Token

    return Token("html_inline", "", 0, content=text)
