"""A process of the kit: runs the cells it is given one after the other and writes each row.

python benchmarks/kit/worker.py RESULT.json PART GPUS smoke|full CELL...
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.cells import Cell, Machine, Part, Refused, Row, Status, missing, part
from kit.result import Result
from toolkit.rehearse import rehearse_if_needed

PATIENCE = 5
LEAST_SECONDS = 120.0


def main() -> None:
    file, name, gpus, size, *wanted = sys.argv[1:]
    result = Result.read(Path(file))
    machine = Machine(gpus=int(gpus), smoke=size == "smoke", out=result.file.parent)
    chosen = part(name)
    cells = {cell.name: cell for cell in chosen.cells(machine)}
    rehearse_if_needed()  # on a CPU, accelerate would train in fp32 whatever is asked
    without_cudnn_attention()
    for place, cell in enumerate(cells[wanted_name] for wanted_name in wanted):
        # A cell that hangs shows where every thread stands, and ends this process.
        faulthandler.dump_traceback_later(max(LEAST_SECONDS, PATIENCE * cell.seconds), exit=True)
        result.add(row_of(name, chosen, cell, machine))
        faulthandler.cancel_dump_traceback_later()
        if place == 0:
            gc.freeze()  # no collection goes through the libraries' objects again


def row_of(name: str, chosen: Part, cell: Cell, machine: Machine) -> Row:
    """Run one cell, and return its row whatever happens."""
    begun = time.perf_counter()
    measured: dict[str, Any] = {}
    status: Status = "ok"
    reason = missing(cell)
    if reason is not None:
        status = "missing"
    else:
        try:
            measured = chosen.measure(cell.settings, machine)
            reason = measured.pop("problem", None)
            status = "ok" if reason is None else "failed"
        except Refused as error:
            status, reason = "refused", str(error)
        except ModuleNotFoundError as error:
            status, reason = "missing", str(error)
        except Exception as error:
            measured = {"traceback": traceback.format_exc()[-6000:]}
            status = "out of memory" if is_out_of_memory(error) else "failed"
            reason = f"{type(error).__name__}: {error}"[:1000]
        finally:
            forget()
    return Row(
        part=name,
        cell=cell.name,
        status=status,
        reason=reason,
        seconds=round(time.perf_counter() - begun, 2),
        settings=cell.settings,
        measured=measured,
    )


def without_cudnn_attention() -> None:
    """Leave torch the attention kernels that `toolkit.train` leaves it."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def forget() -> None:
    """Let the next cell begin with an empty device."""
    import torch

    # An error holds the frames it passed through, and they hold tensors.
    sys.last_value = sys.last_traceback = None
    from kit.device import clear

    torch._dynamo.reset()
    clear()


if __name__ == "__main__":
    main()
