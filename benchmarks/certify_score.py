"""Certify scripts with faults that others found, and programs that are sound: what is named?

    python benchmarks/certify_score.py
    python benchmarks/certify_score.py --cases raw_model,packed_leak --keep runs/score

The cases are in `benchmarks/score_scripts/cases.toml`: where each was found, its fault, and the
checks that ought to name it, written down before any was run. Each has a small script of the same
name beside it. `--first` keeps the verdicts as those of the first run, in `first_run.json`, where
none is written twice. Official examples are run from the folder `--official` (`sound` in the file
says which commit of which repository belongs there); without it they are left out.

Ends with 1 where a sound program has a broken check.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from certify_sound import made_when, prepared
from rich.console import Console

from toolkit.certifying.certify import certify
from toolkit.certifying.checks import CHECKS
from toolkit.certifying.options import CertifyOptions

SCRIPTS = Path(__file__).with_name("score_scripts")
FIRST = SCRIPTS / "first_run.json"
SOURCES = {
    "TrainCheck": "Silent issues of TrainCheck (OSDI 2025)",
    "kept": "The fourteen that the project keeps",
    "2026": "Public reports of 2026",
}
NAMED, NOTED, UNJUDGED, MISSED = "named", "noted", "not judged", "missed"
OTHERWISE = "broken by another check"
FOLDERS = r"(/[\w.-]+)+/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script, with a fault or sound."""

    name: str
    address: str = ""
    source: str = "sound"
    fault: str = ""
    checks: tuple[str, ...] = ()
    words: str = ""
    data: str = "prompts"
    strategy: str = "ddp"
    config: str = ""
    resume_flag: str = ""
    steps: int = 3
    needs: str = ""
    """A version of a library that has the fault, as pip writes it."""

    command: tuple[str, ...] = ()
    """Of an official example, behind the folder of examples."""

    @property
    def can_run(self) -> bool:
        name, _, wanted = self.needs.partition("==")
        return not name or version(name) == wanted

    def words_of(self, folder: Path, output: Path, official: Path | None) -> list[str]:
        made = folder / "made"
        places = {"MADE": made, "OUTPUT": output, "DATA": made / "examples"}
        if self.command:
            assert official is not None
            script, *flags = self.command
            for place, path in places.items():
                flags = [flag.replace(place, str(path)) for flag in flags]
            return [str(official / script), *flags]
        rows = ["--model", str(made / "model"), "--data", str(made / f"{self.data}.jsonl")]
        return [str(SCRIPTS / f"{self.name}.py"), *rows, "--output_dir", str(output)]


@dataclass(frozen=True, slots=True)
class Result:
    """One certificate, judged by what is known of its script."""

    case: Case
    checks: list[dict[str, Any]]
    """Empty where the script could not be run to its end."""

    said: str

    def of(self, answer: str) -> list[dict[str, Any]]:
        return [check for check in self.checks if check["answer"] == answer]

    def is_wanted(self, check: dict[str, Any]) -> bool:
        return check["check"] in self.case.checks

    @property
    def verdict(self) -> tuple[str, str]:
        """Whether the fault is named, and by what."""
        if not self.checks:
            cause = self.case.words and re.search(self.case.words, self.said)
            line = next((one for one in self.said.splitlines() if "could not be" in one), self.said)
            return (NAMED if cause else "could not be judged"), line.strip()
        for answer, verdict in (("broken", NAMED), ("note", NOTED)):
            wanted = [check for check in self.of(answer) if self.is_wanted(check)]
            if wanted:
                return verdict, "; ".join(f"{one['check']}: {one['words']}" for one in wanted)
        if others := self.of("broken"):
            return OTHERWISE, "; ".join(f"{one['check']}: {one['words']}" for one in others)
        wanted = [check for check in self.checks if self.is_wanted(check)]
        if wanted and all(check["answer"] == "not judged" for check in wanted):
            return UNJUDGED, "; ".join(f"{one['check']}: {one['words']}" for one in wanted)
        return MISSED, ""

    @property
    def others(self) -> list[str]:
        """Broken checks that were not expected."""
        return [check["check"] for check in self.of("broken") if not self.is_wanted(check)]


def main() -> int:
    """Certify all, print what is found as it comes, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", help="Only these, with commas between.")
    parser.add_argument("--official", type=Path, help="Folder of official examples.")
    parser.add_argument("--output", type=Path, help="Also write the result, dated, to this file.")
    parser.add_argument("--keep", type=Path, help="Keep the certificates here, and go on there.")
    parser.add_argument("--first", action="store_true", help="Keep the verdicts as the first ones.")
    arguments = parser.parse_args()
    told = tomllib.loads((SCRIPTS / "cases.toml").read_text("utf-8"))
    cases = [Case(**as_tuples(one)) for one in told["case"] + told["sound"]]
    if arguments.cases:
        cases = [case for case in cases if case.name in arguments.cases.split(",")]
    if arguments.official is None:
        cases = [case for case in cases if not case.command]
    results: list[Result] = []
    started = time.monotonic()
    with prepared(arguments.keep) as folder:
        if arguments.official is not None:
            make_examples(folder / "made")
        for case in cases:
            result = result_of(case, folder, arguments.official)
            if result is not None:
                results.append(result)
                verdict, by = result.verdict
                print(f"{case.name} ({case.strategy}): {verdict}: {by}", flush=True)
                if result.others:
                    print(f"  also broken: {', '.join(result.others)}", flush=True)
    if arguments.first:
        keep_first(results)
    first = json.loads(FIRST.read_text("utf-8")) if FIRST.is_file() else {}
    lines = report(results, told["outside"], first, minutes=(time.monotonic() - started) / 60)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 1 if any(one.case.source == "sound" and one.of("broken") for one in results) else 0


def make_examples(made: Path) -> None:
    """Write the rows as folders that `load_dataset` takes, with a train and a test part."""
    for source, name in (
        *((one, one) for one in ("text", "chat", "preferences", "labelled")),
        ("prompts", "alpaca"),
    ):
        lines = (made / f"{source}.jsonl").read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        if name == "alpaca":
            rows = [{"instruction": row["prompt"], "output": row["completion"]} for row in rows]
        folder = made / "examples" / name
        folder.mkdir(parents=True, exist_ok=True)
        for part, some in (("train", rows[8:]), ("test", rows[:8])):
            text = "".join(f"{json.dumps(row)}\n" for row in some)
            (folder / f"{part}.json").write_text(text, "utf-8")


def as_tuples(told: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in told.items()}


def result_of(case: Case, folder: Path, official: Path | None) -> Result | None:
    """Return the certificate of a case, made anew or from an earlier call."""
    output = folder / f"{case.name}-{case.strategy}"
    page, log = output / "certificate.json", folder / f"{case.name}-{case.strategy}.txt"
    if not log.is_file():
        if not case.can_run:
            return None
        config = None
        if case.config:
            config = folder / case.config
            text = (SCRIPTS / case.config).read_text("utf-8")
            config.write_text(text.replace("FOLDER", str(SCRIPTS)), encoding="utf-8")
        said = io.StringIO()
        options = CertifyOptions(
            strategy=None if config else case.strategy,
            config=config,
            resume_flag=case.resume_flag or None,
            steps=case.steps,
            hide_rows=True,
            output=output,
            timeout=900,
        )
        try:
            command = case.words_of(folder, folder / "saved" / output.name, official)
            certify(command, options, console=Console(file=said, width=200))
        except Exception as error:
            said.write(f"\n{type(error).__name__}: {error}")
        log.write_text(said.getvalue(), encoding="utf-8")
    checks = json.loads(page.read_text("utf-8"))["checks"] if page.is_file() else []
    return Result(case, checks, log.read_text("utf-8"))


def keep_first(results: Sequence[Result]) -> None:
    """Keep the verdicts of cases that were never run before."""
    first = json.loads(FIRST.read_text("utf-8")) if FIRST.is_file() else {}
    for one in results:
        verdict, by = one.verdict
        found = {"verdict": verdict, "by": re.sub(FOLDERS, "", by), "also broken": one.others}
        first.setdefault(one.case.name, found)
    FIRST.write_text(json.dumps(first, indent=1) + "\n", encoding="utf-8")


def report(
    results: Sequence[Result],
    outside: Sequence[dict[str, str]],
    first: dict[str, dict[str, Any]],
    *,
    minutes: float,
) -> list[str]:
    """Return the result as Markdown."""
    faulty = [one for one in results if one.case.source in SOURCES]
    sound = [one for one in results if one.case.source == "sound"]
    lines = [
        "# Faults that others found, certified",
        "",
        made_when("certify_score.py", minutes) + f". {len(CHECKS)} checks.",
        "",
        "| cases | in scope | named at first | noted | named now | noted now |",
        "|---|---|---|---|---|---|",
    ]
    for source, title in {**SOURCES, "": "all"}.items():
        of = [one for one in faulty if source in ("", one.case.source)]
        then = Counter(first.get(one.case.name, {}).get("verdict", MISSED) for one in of)
        now = Counter(one.verdict[0] for one in of)
        lines.append(
            f"| {title} | {len(of)} | {then[NAMED]} | {then[NOTED]} | {now[NAMED]} | {now[NOTED]} |"
        )
    alarms = sum(bool(one.of("broken")) for one in sound)
    lines += ["", f"Sound programs of others: {len(sound)}, with a false alarm: {alarms}."]
    for source, title in SOURCES.items():
        lines += ["", f"## {title}", "", "| case | fault | under | first run | now |"]
        lines.append("|---|---|---|---|---|")
        lines += [row_of(one, first) for one in faulty if one.case.source == source]
    lines += ["", "## Of TrainCheck, out of scope", "", "| issue | reason |", "|---|---|"]
    lines += [f"| [{one['name']}]({one['address']}) | {one['reason']} |" for one in outside]
    lines += ["", "## Sound programs", ""]
    lines += ["| program | under | broken at first | now | notes now | not judged now |"]
    lines.append("|---|---|---|---|---|---|")
    for one in sound:
        broken = "could not be judged" if not one.checks else names(one.of("broken")) or "none"
        then = first.get(one.case.name, {}).get("also broken", ["not run"])
        lines.append(
            f"| {one.case.name}: {one.case.address} | {one.case.strategy} | "
            f"{', '.join(then) or 'none'} | {broken} | {names(one.of('note'))} | "
            f"{len(one.of('not judged'))} |"
        )
    return lines


def row_of(one: Result, first: dict[str, dict[str, Any]]) -> str:
    case = one.case
    then = first.get(case.name, {"verdict": "not run", "by": ""})
    title = f"[{case.name}]({case.address})" if case.address else case.name
    verdict, by = one.verdict
    under = case.config or case.strategy
    cells = [shown(then["verdict"], then["by"]), shown(verdict, by)]
    cells[1] = "as at first" if cells[0][:60] == cells[1][:60] else cells[1]
    return f"| {title} | {case.fault} | {under} | {cells[0]} | {cells[1]} |"


def shown(verdict: str, by: str) -> str:
    """Return a verdict and what was said for it, without folders, and shortened."""
    said = re.sub(FOLDERS, "", by).replace("|", "/").replace("\n", " ")
    said = re.sub(r"rank \d refused the run: Refused: |The script could not be judged: ", "", said)
    return f"{verdict}: {said[:150].rstrip(' ,;')}" if said else verdict


def names(checks: Sequence[dict[str, Any]]) -> str:
    return ", ".join(check["check"] for check in checks)


if __name__ == "__main__":
    sys.exit(main())
