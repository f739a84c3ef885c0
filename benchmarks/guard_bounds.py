"""How far trainings that went well stay from the guards' bounds, by the records they left.

    python benchmarks/guard_bounds.py FOLDER ...

Every record.json below the folders is read that has norms enough. Its gradient norms go through the
guards' own rule, which tells how many times the running median the one was that rose most above all
before it; and what the guards warned of is counted.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.measuring.guards import NORMS_NEEDED, Norms
from toolkit.records.json_files import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for folder in args.folders:
        for path in folder.rglob("record.json"):
            try:
                record = read_json(path)
            except UsageError:
                continue  # of a run that is being written, or of a test of such files
            norms = record.get("grad_norms") if isinstance(record, dict) else None
            if norms is not None and len(norms) > NORMS_NEEDED:
                runs[record.get("strategy", "a script's"), record.get("precision", "")] += [record]
    print("| strategy | precision | runs | steps | most above the median | guarded | warned of |")
    print("|---|---|---|---|---|---|---|")
    for (strategy, precision), records in sorted(runs.items()):
        guarded = [r["guards"] for r in records if r.get("guards", {}).get("mode", "off") != "off"]
        warned = Counter(warning["kind"] for each in guarded for warning in each["warnings"])
        cells = [
            strategy,
            precision,
            str(len(records)),
            str(sum(len(record["grad_norms"]) for record in records)),
            f"{max(map(most_above, records)):.1f}",
            str(len(guarded)),
            ", ".join(f"{kind} {count}" for kind, count in warned.items()) or "nothing",
        ]
        print("| " + " | ".join(cells) + " |")


def most_above(record: dict[str, Any]) -> float:
    norms = Norms()
    return max(norms.above(norm) for norm in record["grad_norms"] if norm is not None)


if __name__ == "__main__":
    main()
