"""Run the sweeps of the tests, which are in neither tier, and print what became of each case.

    python benchmarks/sweeps.py
    python benchmarks/sweeps.py tests/certifying -k saved

A sweep repeats a test of the suite with further scripts, faults or strategies: all of one kind
break, hold or train by the same code, of which the suite keeps a case. Ends as pytest does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from toolkit import environment

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "sweep", f"--junitxml={results}"]
        code = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, check=False).returncode
        cases = [*ElementTree.parse(results).iter("testcase")]
    versions = environment.snapshot()["versions"]
    print(f"\n{len(cases)} cases in {time.time() - started:.0f} s on {os.cpu_count()} CPU cores;")
    print(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    print("\n| test | passed | skipped | failed |\n|---|---|---|---|")
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        name, _, _ = case.attrib["name"].partition("[")
        kinds = {part.tag for part in case} & {"skipped", "failure", "error"}
        end = "skipped" if "skipped" in kinds else "failed" if kinds else "passed"
        ends[f"{case.attrib['classname'].replace('.', '/')}.py::{name}"][end] += 1
    for name, counts in sorted(ends.items()):
        print(f"| {name} | {counts['passed']} | {counts['skipped']} | {counts['failed']} |")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
