"""The README and the pages under `docs/`, taken apart for the tests that hold them to the code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from places import ROOT

FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The path, relative to the repository."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each fenced block, in order."""
        return FENCED.findall(self.text)

    @cached_property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return FENCED.sub("", self.text)

    @property
    def running_text(self) -> str:
        """The prose without front matter, headings, tables, code and links to other pages."""
        text = re.sub(r"\A---\n.*?\n---\n", "", self.prose, flags=re.DOTALL)
        text = re.sub(r"^(?:#|\|).*$", "", text, flags=re.MULTILINE)
        return re.sub(r"`[^`\n]+`|\[[^\]]*\]\((?!glossary\.md#)[^)]*\)", "", text)

    @property
    def words(self) -> int:
        """Count the words outside of blocks and tables."""
        return len(re.sub(r"^\|.*$", "", self.prose, flags=re.MULTILINE).split())

    @cached_property
    def spans(self) -> list[str]:
        """What stands between single backquotes, in the prose and in tables."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    def in_language(self, language: str) -> list[str]:
        return [text for found, text in self.blocks if found == language]

    @property
    def commands(self) -> list[str]:
        """Every command: a line of a shell block, or of a notebook's cell behind an `!`."""
        shell = "".join(self.in_language("sh")).replace("\\\n", "")
        lines = shell.splitlines()
        cells = [line for block in self.in_language("ipython") for line in block.splitlines()]
        lines += [line[1:] for line in cells if line.startswith("!")]
        parts = (part for line in lines for part in line.partition(" #")[0].split(" && "))
        return [part.strip() for part in parts if part.strip()]

    @property
    def python(self) -> list[str]:
        """Every block of Python; of a notebook's cell, what is no command."""
        cells = (
            re.sub(r"^!.*\n", "", text, flags=re.MULTILINE) for text in self.in_language("ipython")
        )
        return [*self.in_language("python"), *cells]

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name behind `#`: the headings, as a code host writes them."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}

    def outputs_of(self, command: str) -> list[str]:
        """Return the lines that the page shows below a command."""
        for (language, text), (following, output) in zip(
            self.blocks, self.blocks[1:], strict=False
        ):
            if language == "sh" and following == "text" and text.strip() == command:
                return output.splitlines()
        raise LookupError(f"{self.name} shows no output of {command}")


def words_of(command: str) -> list[str]:
    """Return the words of a command, without the variables set in front of it."""
    words = shlex.split(command)
    while words and ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    return words


README = Page(ROOT / "README.md")
PAGES = [Page(path) for path in sorted((ROOT / "docs").rglob("*.md"))]
INDEX = Page(ROOT / "docs" / "llms.txt")
EXAMPLES = Page(ROOT / "examples" / "README.md")
ALL = [README, *PAGES, INDEX, EXAMPLES]
