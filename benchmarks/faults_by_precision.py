"""Which gate catches which fault, in fp32 and in bf16: the faults of the test suite, twice.

    python benchmarks/faults_by_precision.py

The suite holds the fp32 gates to every fault. In bf16 rounding alone moves a sound run further
than the small faults do, so those can't be seen there: this prints which, beside the distances.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from toolkit import environment
from toolkit.comparing.parity.gates import judge, limit_of
from toolkit.comparing.parity.judgement import Case, Judgement
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "faults" / "train_with_faults.py"
sys.path.insert(0, str(SCRIPT.parent))
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parents[1] / "helpers")]

PRECISIONS = ("no", "bf16")
CONTROL = "control"


def main() -> None:
    from test_parity_faults import FAULTS, write_model

    started = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_model(folder / "model")
        judged = {
            precision: run(folder, model, precision, list(FAULTS)) for precision in PRECISIONS
        }
    versions = environment.snapshot()["versions"]
    print(f"{os.cpu_count()} CPU cores, 2 ranks (gloo), ddp, loop; ", end="")
    print(", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate")))
    print(f"{time.time() - started:.0f} s; ", end="")
    print("`loss / norm, and that of one parameter / weights`, the broken ones in bold\n")
    print("| fault | " + " | ".join(f"{named(p)}: gates {limits(p)}" for p in PRECISIONS) + " |")
    print("|---|" + "---|" * len(PRECISIONS))
    for name in ("clean", *FAULTS):
        cells = (cell(judged[precision][name]) for precision in PRECISIONS)
        print(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")


def run(folder: Path, model: Path, precision: str, faults: list[str]) -> dict[str, Judgement]:
    """Train the control, the clean run and every fault, and judge each against the control."""
    kind = "" if precision == "no" else f"{precision}/"
    launched = folder / f"launched-{precision}"
    start("single", launched, [model, folder / CONTROL, f"{kind}clean"])
    start("ddp", launched, [model, folder, *(f"{kind}{name}" for name in ("clean", *faults))])
    output, control = folder / kind, folder / CONTROL / kind / "clean"
    return {
        name: judge(
            Case(
                record=read_record(output / name),
                control=read_record(control),
                folder=output / name,
                control_folder=control,
            )
        )
        for name in ("clean", *faults)
    }


def start(strategy: str, folder: Path, arguments: list[object]) -> None:
    files = write_configs(
        get_strategy(strategy),
        folder / f"{strategy}-config",
        options=ConfigOptions(num_processes=1 if strategy == "single" else 2),
    )
    subprocess.run(
        launch_command(files.accelerate, [str(SCRIPT), *map(str, arguments)]),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def cell(judgement: Judgement) -> str:
    gap = judgement.gaps["loss_gap"]
    found = {
        "loss": None if gap is None else gap["max"],
        "grad_norm": judgement.gaps["grad_norm_gap"],
        "weights": judgement.gaps["weight_gap"],
    }
    shown = []
    of_one = judgement.gaps["gradient_difference"]
    for gate, value in found.items():
        text = "?" if value is None else f"{value:.1e}"
        if gate == "grad_norm" and of_one is not None:
            text += f", {of_one['value']:.1e}"
        shown.append(text if judgement.gates.get(gate) else f"**{text}**")
    data = "" if judgement.gates.get("data") else ", **data**"
    caught = "" if all(judgement.gates.values()) else "caught: "
    return caught + " / ".join(shown) + data


def limits(precision: str) -> str:
    loss, norm, of_parameter, weights = (
        f"{limit_of(gate, precision):g}" for gate in ("loss", "grad_norm", "gradients", "weights")
    )
    return f"{loss} / {norm}, {of_parameter} / {weights}"


def named(precision: str) -> str:
    return "fp32" if precision == "no" else precision


if __name__ == "__main__":
    main()
