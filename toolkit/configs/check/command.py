"""`toolkit check`: every finding on files, flags and a script at once, and the repairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.configs.check.documents import NOTHING
from toolkit.configs.check.finding import Edit, Finding
from toolkit.configs.check.flags import flags_document
from toolkit.configs.check.rules import findings_of
from toolkit.configs.check.scripts import check_script
from toolkit.configs.check.setup import Setup, read_setups
from toolkit.errors import UsageError
from toolkit.escaping import one_line
from toolkit.files import write_bytes

SCHEMA: Final = 1
BACKUP: Final = ".before-fix"
UNKNOWN: Final = "unknown-key"
REFUSED: Final = ("old-fsdp",)
"""Rules whose findings end a launch of the toolkit's whatever their severity."""

ROUNDS: Final = 5
"""How often repairs are made: one may show another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a check found."""

    findings: Sequence[Finding]
    not_judged: Sequence[str]
    fixed: Sequence[Path] = ()
    """Files that were repaired; each was kept beside itself, with `BACKUP` behind its name."""

    @property
    def has_error(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON of schema 1."""
        findings = [asdict(one) | {"file": str(one.file)} for one in self.findings]
        fixed = [str(file) for file in self.fixed]
        not_judged = list(self.not_judged)
        return {"schema": SCHEMA, "findings": findings, "not_judged": not_judged, "fixed": fixed}

    def lines(self) -> Iterator[str]:
        """Return a line for each finding and one for its fix, then their number."""
        for one in self.findings:
            where = f"{one.file}:{one.line}:{one.column}"
            yield one_line(f"{one.severity:<7}  {where}  {one.rule}: {one.text}")
            yield one_line(f"         {one.fix}{'  (--fix does it)' if one.edits else ''}")
        for file in self.fixed:
            yield f"fixed    {file}  (before: {file}{BACKUP})"
        yield from (f"not judged: {what}" for what in self.not_judged)
        count = Counter(finding.severity for finding in self.findings)
        parts = [
            f"{count[kind]} {kind}{'s' * (count[kind] != 1)}"
            for kind in ("error", "warning", "note")
        ]
        yield ", ".join(parts)


def check(
    files: Sequence[Path],
    flags: Sequence[str] = (),
    *,
    script: Path | None = None,
    environ: Mapping[str, str],
    num_processes: int | None = None,
    fix: bool = False,
) -> Report:
    """Check config files, flags of a training and its script together.

    Args:
        files: Accelerate YAML, DeepSpeed JSON, or a file of `TrainingArguments`.
        flags: Words of the command behind the script's name.
        script: It is read, and not run.
        environ: Variables of the shell that would launch.
        num_processes: The launcher's flag, which counts before a YAML.
        fix: Make the repairs that are certain, and check again.

    Raises:
        UsageError: a file is not there, or none of the kinds; or a backup stands in the way.
    """
    if not files and not flags and script is None:
        raise UsageError("Name a file, or flags behind --.")
    of_flags = flags_document(flags) if flags else NOTHING

    def judge() -> tuple[list[Finding], list[str]]:
        setups: list[Setup] = []
        if files or flags:
            setups = read_setups(files, of_flags, environ, num_processes=num_processes)
        findings = [finding for setup in setups for finding in findings_of(setup)]
        if script is not None:
            # Which flags there are is known of a script that makes its parser of known classes.
            findings = [one for one in findings if one.file != of_flags.file or one.rule != UNKNOWN]
            findings += check_script(script, flags=flags)
        not_judged = [what for setup in setups for what in setup.not_judged]
        return list(dict.fromkeys(findings)), list(dict.fromkeys(not_judged))

    findings, not_judged = judge()
    fixed: dict[Path, None] = {}
    for _ in range(ROUNDS if fix else 0):
        fixed |= dict.fromkeys(_mend(findings, keep=[*fixed]))
        findings, not_judged = judge()
    return Report(findings=findings, not_judged=not_judged, fixed=list(fixed))


def refuse_errors(
    files: Sequence[Path], environ: Mapping[str, str], *, num_processes: int | None = None
) -> None:
    """Raise UsageError that names every error in the config files of a launch, or FSDP1."""
    found = check(files, environ=environ, num_processes=num_processes).findings
    errors = [one for one in found if one.severity == "error" or one.rule in REFUSED]
    if errors:
        said = " ".join(f"{one.file}:{one.line}: {one.text} {one.fix}" for one in errors)
        raise UsageError(f"{said} (toolkit check says more.)")


def _mend(findings: Sequence[Finding], *, keep: Sequence[Path]) -> list[Path]:
    """Make the repairs in each file that has some; return the files that are changed.

    Those of `keep` were changed before: what they were like stands beside them.
    """
    edits: dict[Path, list[Edit]] = defaultdict(list)
    for finding in findings:
        edits[finding.file] += finding.edits
    changed = [file for file in edits if edits[file]]
    for file in changed:
        before = file.read_bytes()
        text = before.decode("utf-8-sig")
        backup = file.with_name(f"{file.name}{BACKUP}")
        if file not in keep:
            if backup.exists():
                raise UsageError(f"{backup} is there already. Move it, then fix again.")
            write_bytes(backup, before)
        write_bytes(file, apply(text, edits[file]).encode())
    return changed


def apply(text: str, edits: Sequence[Edit]) -> str:
    """Return a text after edits; of two that touch each other, the first is made."""
    end = -1
    kept: list[Edit] = []
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start >= end:
            kept.append(edit)
            end = edit.end
    for edit in reversed(kept):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text
