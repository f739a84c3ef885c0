"""HTML of a page: its Markdown, with what a browser needs to show its tables well.

A page is one file that opens offline, on a phone too, in light and in dark. It forbids network
access, and every script but its own. Text of a run or a user is escaped for Markdown, and HTML in
it is never markup.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import takewhile
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
SCRIPT: Final = Path(__file__).with_name("page.js")

LONG: Final = 18
"""Letters beyond which a cell may break into lines."""

WIDE: Final = 3
"""Columns beyond which a table is too wide for a phone."""

WIDE_WITH_ROLES: Final = 7
"""The same for the table whose names have roles, which has short numbers."""

WORDY: Final = 36
"""Letters beyond which it is a sentence rather than a number."""

EXPONENT: Final = re.compile(r"(\d[\d.]*e[+-]\d+)")

TITLED: Final = re.compile(r'<section id="([^"]+)"[^>]*>\s*<h2>(.*?)</h2>')

WORDS: Final = "words"
"""Anchor of the section that defines words, one under each of its headings."""

DEFINED: Final = re.compile(
    r"(?i)(?<![\w-])(?:(attest|collective|control|gap|gate|gather|ledger|micro-batch|parity|rank"
    r"|rehearsal|shard)(?:s|es|ed)?|(states))(?![\w-])"
)
"""The words that it defines. The first use of each in a section is a link."""

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
    script: str = "",
) -> str:
    """Return a page as one HTML file.

    Args:
        title: Its heading.
        kind: The line above it.
        tab: Its title in the browser.
        head: Blocks of Markdown below the heading, by their anchors.
        parts: Sections, or HTML that has their place.
        foot: Markdown at the end.
        script: The one script that the page allows.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    parts = [*parts]
    links = any(isinstance(part, Section) and part.id == WORDS for part in parts)
    shown = [
        section_html(part, links=links) if isinstance(part, Section) else part for part in parts
    ]
    page = template.render(
        title=title,
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        contents=[found for part in shown for found in TITLED.findall(part)],
        kind=kind,
        tab=tab,
        foot=markdown_html(foot),
        css=Markup(STYLE.read_text(encoding="utf-8").strip()),
        head={anchor: markdown_html(text, links=links) for anchor, text in head.items() if text},
        parts=shown,
    )
    return page + "\n"


def section_html(section: Section, *, links: bool = False) -> Markup:
    """Return a section with its heading, under its anchor; `links` is that of `markdown_html`."""
    from markupsafe import Markup

    heading = Markup("<h2>{}</h2>\n").format(section.title) if section.title else ""
    body = markdown_html(section_text(section), section, links=links and section.id != WORDS)
    return Markup('<section id="{}">\n{}{}</section>').format(section.id, heading, body)


def markdown_html(text: str, section: Section | None = None, *, links: bool = False) -> Markup:
    """Return Markdown as HTML.

    Args:
        text: Markdown that the toolkit wrote.
        section: The section whose table is in it.
        links: Link the first use of each word that the page defines.
    """
    from markupsafe import Markup

    parser = _parser()
    environment: dict[str, Any] = {"linked": set[str]() if links else None}
    tokens = parser.parse(text, environment)
    shown = list(_with_frames(tokens, section or Section()))
    return Markup(parser.renderer.render(shown, parser.options, environment))


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero").enable(list(SYNTAX))
    parser.add_render_rule("text", _text)
    return parser


def _text(
    _: object, tokens: Sequence[Token], at: int, __: object, environment: dict[str, Any]
) -> str:
    """Return text escaped, in which words are linked and no number breaks at its exponent."""
    from markupsafe import escape

    text = EXPONENT.sub(r'<span class="whole">\1</span>', str(escape(tokens[at].content)))
    linked: set[str] | None = environment["linked"]

    def link(match: re.Match[str]) -> str:
        word = (match[1] or match[2]).lower()
        if linked is None or word in linked:
            return match[0]
        linked.add(word)
        return f'<a class="word" href="#{WORDS}-{word}">{match[0]}</a>'

    return DEFINED.sub(link, text)


def _with_frames(tokens: Sequence[Token], section: Section) -> Iterator[Token]:
    """Yield the tokens, with a frame around each table in which it scrolls."""
    header: list[str] = []
    line = column = 0
    widest, is_wide = WIDE_WITH_ROLES if section.roles else WIDE, False
    for at, token in enumerate(tokens):
        match token.type:
            case "table_open":
                header, line = [], -1
                is_wide = _columns(tokens, at) > widest
                if section.folded:
                    yield _html(f"<details><summary>All {len(section.rows)} lines</summary>\n")
                yield _frame(section.title, is_wide=is_wide)
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
                if is_wide:  # the name stands beside the value there
                    token.attrSet("data-label", heading)
                column += 1
            case "heading_open" if section.id == WORDS:
                token.attrSet("id", f"{WORDS}-{_text_of(tokens[at + 1]).lower()}")
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


def _columns(tokens: Sequence[Token], at: int) -> int:
    """Return the number of columns of the table that begins at a token."""
    header = takewhile(lambda token: token.type != "tr_close", tokens[at:])
    return sum(token.type == "th_open" for token in header)


def _frame(title: str, *, is_wide: bool) -> Token:
    """Return the start of a frame; of a wide table on a phone each line becomes a card."""
    from markupsafe import Markup

    kind = "scroll wide" if is_wide else "scroll"
    opening = '<div class="{}" tabindex="0" role="region" aria-label="{}">\n'
    return _html(Markup(opening).format(kind, title or "Table"))


def _html(text: str) -> Token:
    from markdown_it.token import Token

    return Token("html_inline", "", 0, content=text)
