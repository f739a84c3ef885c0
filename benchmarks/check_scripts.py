"""What `toolkit check` says of training scripts that people run, by rule.

    python benchmarks/check_scripts.py FOLDER > benchmarks/results/DATE-check-scripts.md

FOLDER has two folders, `seen` and `unseen`: scripts that were looked at while the rules were
written, and scripts that were not. In each a script lies under OWNER+REPOSITORY/COMMIT/, as in its
repository. What `notes.md` in FOLDER says stands before the tables. Only names, numbers and links
are written, none of the scripts' text.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from toolkit.configs.check.finding import Finding
from toolkit.configs.check.scripts import check_script
from toolkit.configs.check.signatures import LIBRARIES
from toolkit.configs.check.sources import version_of

KINDS = ("seen", "unseen")


def main(folder: Path) -> None:
    scripts = {kind: sorted(folder.joinpath(kind).rglob("*.py")) for kind in KINDS}
    if not all(scripts.values()):
        raise SystemExit(f"{folder} has no scripts in folders named {' and '.join(KINDS)}.")
    found: dict[Path, list[Finding]] = {}
    seconds: list[float] = []
    for path in [*scripts["seen"], *scripts["unseen"]]:
        start = time.process_time()
        found[path] = check_script(path)
        seconds.append(time.process_time() - start)
    print("# What check says of public training scripts\n")
    releases = ", ".join(f"{library} {version_of(library)}" for library in LIBRARIES)
    counts = " and ".join(f"{len(scripts[kind])} {kind}" for kind in KINDS)
    print(f"{counts} while the rules were written, held against {releases}.")
    print(f"Longest {max(seconds):.2f} CPU s a script, all {sum(seconds):.1f}, in one process.\n")
    if folder.joinpath("notes.md").is_file():
        print(folder.joinpath("notes.md").read_text("utf-8"))
    print("| rule | severity | seen: findings, scripts | unseen: findings, scripts |")
    print("|---|---|---|---|")
    kinds = sorted({(one.rule, one.severity) for each in found.values() for one in each})
    for rule, severity in kinds:
        cells = [counted(rule, severity, [found[path] for path in scripts[kind]]) for kind in KINDS]
        print(f"| {rule} | {severity} | {' | '.join(cells)} |")
    print("\n## Scripts with findings\n")
    print("| script | | lines |")
    print("|---|---|---|")
    for kind in KINDS:
        for path in scripts[kind]:
            if found[path]:
                lines = "; ".join(
                    f"{one.line} {one.severity} {one.rule}{argument_of(one)}" for one in found[path]
                )
                print(f"| {link(path, folder / kind)} | {kind} | {lines} |")
    print("\n## Scripts without\n")
    for kind in KINDS:
        clean = [link(path, folder / kind) for path in scripts[kind] if not found[path]]
        print(f"{kind} ({len(clean)}): {', '.join(clean)}.\n")


def counted(rule: str, severity: str, each: list[list[Finding]]) -> str:
    """Return how many findings a rule has, and in how many scripts."""
    numbers = Counter(
        at
        for at, findings in enumerate(each)
        for one in findings
        if (one.rule, one.severity) == (rule, severity)
    )
    return f"{numbers.total()}, {len(numbers)}"


def argument_of(finding: Finding) -> str:
    """Return the name that a finding on an interface is about."""
    named = finding.rule in ("unknown-argument", "missing-name")
    return f" `{finding.text.split('`')[1]}`" if named and "`" in finding.text else ""


def link(path: Path, folder: Path) -> str:
    repository, commit, *rest = path.relative_to(folder).parts
    owner = repository.replace("+", "/")
    return f"[{owner}: {'/'.join(rest)}](https://github.com/{owner}/blob/{commit}/{'/'.join(rest)})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
