"""Misspell, remove and retype each key of every bundled and shipped config, at every depth.

    python benchmarks/config_fuzz.py --write benchmarks/results

Each change is judged twice: by `toolkit check`, which reads the libraries' sources without torch,
and by the real libraries, in this process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from config_sweep import Case, sweep  # noqa: E402
from real_parsers import every_file  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="folder for the dated result")
    target = parser.parse_args().write
    warnings.simplefilter("ignore")
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for file in every_file() for case in sweep(file, Path(folder))]
    text = page(cases, seconds=time.process_time() - begin)
    print(text)
    if target is not None:
        (target / f"{time.strftime('%Y-%m-%d')}-config-fuzz.md").write_text(text)


def page(cases: list[Case], *, seconds: float) -> str:
    """Return the result as Markdown."""
    from importlib.metadata import version

    releases = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "deepspeed", "trl"))
    wrong = [case for case in cases if not case.is_right]
    rows = Counter((case.change.split()[0], case.real, case.ours) for case in cases)
    lines = [
        "# Configs with a mistake at every place",
        "",
        f"{time.strftime('%d %B %Y')}, {seconds:.0f} seconds of one CPU, {releases}:",
        "",
        "```sh",
        "python benchmarks/config_fuzz.py --write benchmarks/results",
        "```",
        "",
        f"{len(cases)} changes of {len(every_file())} files, the bundled ones and those in TRL's "
        f"wheel. Judged wrongly: {len(wrong)}.",
        "",
        "| change | the real libraries | `toolkit check` | cases |",
        "| --- | --- | --- | --- |",
        *(f"| {a} | {b} | {c} | {rows[a, b, c]} |" for a, b, c in sorted(rows)),
        "",
        "A misspelt key is always found, since nothing reads it; a removed one is an error where a",
        "library raises, or where another key then does something else than it says. A value of",
        'another type that comes to the same, such as `"8"` for a whole number, is no finding.',
        "",
        *(f"- wrong: `{case}`" for case in wrong),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
