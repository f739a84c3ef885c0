"""Options of `toolkit certify`; the command line declares them again, where they are read first."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyOptions:
    """What a certificate can be asked."""

    strategy: str | None = None
    """Its name, for the bundled config file."""

    config: Path | None = None
    """An Accelerate YAML in its place."""

    num_processes: int | None = None
    """Ranks; those of the config if left out."""

    steps: int = 3
    only: tuple[str, ...] = ()
    """Names of groups of checks; all if left out."""

    resume_flag: str | None = None
    """The script's own flag that takes a checkpoint, for a loop."""

    shrink: bool | None = None
    """Whether a large model is made small; None: where it would not fit."""

    hide_rows: bool = False
    output: Path | None = None
    timeout: float = 600.0
    """Seconds for each run."""
