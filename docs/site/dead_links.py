"""Links of a built site that lead nowhere: no such file in it, or no such anchor in the file."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """The anchors of a page, and the addresses that it names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.addresses: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from a tag."""
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.addresses.add(value)


def dead_links(folder: Path) -> Iterator[str]:
    """Yield the page and the address of each dead link; other sites are not opened."""
    folder = folder.resolve()
    pages = {path: Links(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for address in sorted(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            is_dead = not target.is_file() or not target.is_relative_to(folder)
            if is_dead or (target in pages and anchor not in pages[target].anchors):
                yield f"{path.relative_to(folder)}: {address}"
