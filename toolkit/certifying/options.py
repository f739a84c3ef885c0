"""Options of `toolkit certify`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from toolkit.configs import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyOptions:
    """What a certificate can be asked."""

    strategy: Annotated[str | None, Flag("Its name, for the bundled config file.")] = None
    config: Annotated[Path | None, Flag("An Accelerate YAML of your own, in its place.")] = None
    num_processes: Annotated[int | None, Flag("Ranks; those of the config if left out.")] = None
    steps: Annotated[int, Flag("Optimizer steps.")] = 3
    shrink: Annotated[bool, Flag("Make a large model small: same architecture, few layers.")] = (
        False
    )
    hide_rows: Annotated[bool, Flag("Keep texts of the rows out of the page.", ("--no-rows",))] = (
        False
    )
    output: Annotated[Path | None, Flag("Folder of the certificate, new or empty.")] = None
    timeout: Annotated[float, Flag("Seconds for each of the two runs.")] = 600.0
