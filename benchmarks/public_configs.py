"""Check the public configs of other projects, from bare clones of their repositories.

    python benchmarks/public_configs.py CLONE... --unseen CLONE... --write benchmarks/results

A clone is named `OWNER+NAME/...`, as `git clone --bare` makes it there. Each file is read by the
installed libraries as well, which raise or not; texts are not kept, only the keys that were named.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import real_parsers  # noqa: E402

from toolkit.configs.check.documents import document_of  # noqa: E402
from toolkit.configs.check.rules import findings_of  # noqa: E402
from toolkit.configs.check.setup import Setup, complete, name_json  # noqa: E402
from toolkit.errors import UsageError  # noqa: E402

UNSEEN = 15
"""Files that were not looked at while the rules were written: the first by a hash of their name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One config."""

    name: str
    link: str
    found: list[str]
    """`severity rule: line` of each finding."""

    raises: str
    """What the real libraries raise; empty where they take it."""

    @property
    def has_error(self) -> bool:
        return any(one.startswith("error") for one in self.found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clones", nargs="+", type=Path)
    parser.add_argument("--unseen", nargs="+", type=Path, default=[], help="never looked at")
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    unseen = [row for clone in arguments.unseen for row in rows_of(clone.resolve())]
    rows = [row for clone in arguments.clones for row in rows_of(clone.resolve())]
    rows.sort(key=lambda row: hashlib.sha256(row.name.encode()).hexdigest())
    parts = {"Of repositories that were never looked at": unseen} if unseen else {}
    text = page(parts | {"Unseen": rows[:UNSEEN], "The others": rows[UNSEEN:]})
    print(text)
    if arguments.write is not None:
        name = f"{time.strftime('%Y-%m-%d')}-public-configs.md"
        (arguments.write.resolve() / name).write_text(text)


def rows_of(clone: Path) -> list[Row]:
    """Return a row for each config of a clone."""
    repository = next(part for part in clone.parts if "+" in part).replace("+", "/")

    def git(*words: str) -> str:
        command = ["git", "-C", str(clone), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    commit = git("rev-parse", "HEAD").strip()
    names = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    texts: dict[str, str] = {}
    for name in names:
        if name.endswith((".yaml", ".yml", ".json")) and is_config(name):
            with contextlib.suppress(subprocess.CalledProcessError):  # too large to be there
                texts[name] = git("show", f"HEAD:{name}")
    rows: list[Row] = []
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in texts.items():  # where one names another
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, text in texts.items():
            link = f"https://github.com/{repository}/blob/{commit}/{name}"
            if (row := row_of(f"{repository} {name}", link, Path(name), text)) is not None:
                rows.append(row)
    return rows


def is_config(name: str) -> bool:
    words = ("accelerate", "deepspeed", "fsdp", "zero", "ds_", "/ds", "ddp", "multi_gpu")
    return any(word in name.lower() for word in words)


def row_of(name: str, link: str, file: Path, text: str) -> Row | None:
    """Return the row of a file; None for what is no config."""
    try:
        document = document_of(file, text)
    except (UsageError, RecursionError):
        return None
    if document.kind == "flags" or not document.content:
        return None
    setup = Setup(**{document.kind: document})
    if document.kind == "accelerate":
        name_json(setup)
    complete(setup)
    lines = text.splitlines()
    found = [
        f"{one.severity} {one.rule}: `{lines[one.line - 1].strip()[:80]}`"
        for one in findings_of(setup)
        if one.file == file and "GPUs." not in one.text
    ]
    raises = ""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            if document.kind == "deepspeed":
                real_parsers.of_json(document.content)
            else:
                named = setup.deepspeed.content or None
                real_parsers.of_yaml(document.content, Path("of_the_test.yaml"), named)
        except real_parsers.Refused as error:
            raises = str(error).partition(":")[0]
    return Row(name=name, link=link, found=found, raises=raises)


def page(parts: dict[str, Sequence[Row]]) -> str:
    """Return the result as Markdown."""
    libraries = ("accelerate", "deepspeed", "transformers")
    releases = ", ".join(f"{name} {version(name)}" for name in libraries)
    lines = [
        "# Public configs",
        "",
        f"{time.strftime('%d %B %Y')}, one CPU, {releases}:",
        "",
        "```sh",
        "python benchmarks/public_configs.py CLONE... --unseen CLONE... --write benchmarks/results",
        "```",
        "",
        "Each file was read by the installed Accelerate and DeepSpeed as well. What they raise",
        "stands in the last column. Accelerate and the Trainer refuse a JSON without",
        "zero_optimization, which DeepSpeed alone takes: that is a warning.",
        "",
    ]
    for title, rows in parts.items():
        count = Counter(line.split()[0] for row in rows for line in row.found)
        wrong = [row for row in rows if row.has_error]
        refused = sum(bool(row.raises) for row in wrong)
        missed = sum(bool(row.raises) and not row.has_error for row in rows)
        lines += [
            f"## {title}",
            "",
            f"{len(rows)} files, {len(rows) - len(wrong)} without an error; {count['error']} "
            f"errors, {count['warning']} warnings and {count['note']} notes. Of the {len(wrong)} "
            f"files with an error the libraries refuse {refused}, and of the others {missed}.",
            "",
            "| file | findings | the libraries |",
            "| --- | --- | --- |",
            *(
                f"| [{row.name}]({row.link}) | {'; '.join(row.found)} | {row.raises} |"
                for row in sorted(rows, key=lambda row: row.name)
            ),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
