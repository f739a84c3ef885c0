"""Check the public configs of other projects, from bare clones of their repositories.

    python benchmarks/public_configs.py CLONE... --write benchmarks/results

A clone is named `OWNER+NAME/...`, as `git clone --bare` makes it there. An error is true where the
installed libraries raise for the file; their texts are not kept, only the keys that were named.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.configs.check.documents import document_of
from toolkit.configs.check.rules import findings_of
from toolkit.configs.check.setup import Setup, complete, name_json
from toolkit.errors import UsageError

UNSEEN = 15
"""Files that were not looked at while the rules were written: the first by a hash of their name."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clones", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    arguments = parser.parse_args()
    rows: list[tuple[str, str, list[str]]] = []
    for clone in arguments.clones:
        rows += rows_of(clone)
    rows.sort(key=lambda row: hashlib.sha256(row[0].encode()).hexdigest())
    text = page(rows)
    print(text)
    if arguments.write is not None:
        name = f"{time.strftime('%Y-%m-%d')}-public-configs.md"
        (arguments.write / name).write_text(text)


def rows_of(clone: Path) -> list[tuple[str, str, list[str]]]:
    """Return each config of a clone: its name, its link, and what is found."""
    repository = next(part for part in clone.parts if "+" in part).replace("+", "/")

    def git(*words: str) -> str:
        command = ["git", "-C", str(clone), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    commit = git("rev-parse", "HEAD").strip()
    names = git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    rows = []
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        wanted = [name for name in names if name.endswith((".yaml", ".yml", ".json"))]
        texts = {name: git("show", f"HEAD:{name}") for name in wanted if is_config(name)}
        for name, text in texts.items():  # where one names another
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, text in texts.items():
            found = findings(Path(name), text)
            if found is not None:
                link = f"https://github.com/{repository}/blob/{commit}/{name}"
                rows.append((f"{repository} {name}", link, found))
    return rows


def is_config(name: str) -> bool:
    words = ("accelerate", "deepspeed", "fsdp", "zero", "ds_", "/ds", "ddp", "multi_gpu")
    return any(word in name.lower() for word in words)


def findings(file: Path, text: str) -> list[str] | None:
    """Return `severity rule keys` of each finding; None for what is no config."""
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
    return [
        f"{one.severity} {one.rule}: `{lines[one.line - 1].strip()[:80]}`"
        for one in findings_of(setup)
        if one.file == file and "GPUs." not in one.text
    ]


def page(rows: list[tuple[str, str, list[str]]]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Public configs",
        "",
        f"{time.strftime('%d %B %Y')}, one CPU:",
        "",
        "```sh",
        "python benchmarks/public_configs.py CLONE... --write benchmarks/results",
        "```",
        "",
    ]
    for title, part in (("Unseen", rows[:UNSEEN]), ("The others", rows[UNSEEN:])):
        count = Counter(line.split()[0] for _, _, found in part for line in found)
        clean = sum(not any(one.startswith("error") for one in found) for _, _, found in part)
        lines += [
            f"## {title}",
            "",
            f"{len(part)} files, {clean} without an error; {count['error']} errors, "
            f"{count['warning']} warnings and {count['note']} notes.",
            "",
            "| file | findings |",
            "| --- | --- |",
            *(f"| [{name}]({link}) | {'; '.join(found)} |" for name, link, found in sorted(part)),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
