"""Options of `toolkit certify`, for the command line and for Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from toolkit.configs import Flag
from toolkit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyOptions:
    """What a certificate can be asked."""

    strategy: str | None = None
    """Its name, for the bundled config file."""

    config: Annotated[
        Path | None, Flag("An Accelerate YAML of your own, in place of a strategy.")
    ] = None
    num_processes: Annotated[int | None, Flag("Ranks; those of the config if left out.")] = None
    steps: Annotated[int, Flag("Optimizer steps.")] = 3
    only: tuple[str, ...] = ()
    """Names of groups of checks; all if left out."""

    resume_flag: Annotated[
        str | None, Flag("The script's own flag that takes a checkpoint, where it has a loop.")
    ] = None
    shrink: Annotated[
        bool | None,
        Flag(
            "Make a large model small; left out: where it would not fit.", ("--shrink/--no-shrink",)
        ),
    ] = None
    hide_rows: Annotated[bool, Flag("Keep texts of the rows out of the page.", ("--no-rows",))] = (
        False
    )
    output: Annotated[Path | None, Flag("Folder of the certificate, new or empty.")] = None
    timeout: Annotated[float, Flag("Seconds for each run.")] = 600.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: use 1 or more.")
