"""Fine-tune a causal LM under the backend that `accelerate launch` was told to use.

    accelerate launch --config_file accelerate_configs/zero2.yaml -m toolkit.train --max_steps 20

Runs in every rank: flags -> request -> trainer or loop -> record. Without enough GPUs it rehearses.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.errors import GuardError, MachineLostError, UsageError
from toolkit.launching.python import check_package_folder
from toolkit.launching.ranks import leave, quiet, rank
from toolkit.launching.ranks import machines as number_of_machines
from toolkit.launching.status import STATUS_DIR, StatusFile, guard, status_folder
from toolkit.launching.watchdog import Watchdog
from toolkit.redaction import redact, redact_output, redacted_words
from toolkit.rehearse import (
    die_with_launcher,
    folder_of_launch,
    print_cause,
    print_full_disk,
    print_reason,
)
from toolkit.training.flags import checked_flags

if TYPE_CHECKING:
    from toolkit.training.arguments import OwnArguments
    from toolkit.training.job import Job

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_REFUSED: Final = 3


def main() -> None:
    """Train in this rank; leave with 0, 1 (failed), 2 (usage), 3 (refused) or 143 (preempted)."""
    die_with_launcher()
    gc.disable()  # until all is imported: imported objects stay, and checking them takes a fifth
    redact_output()
    quiet()
    os.environ["PYTHONSAFEPATH"] = "1"  # workers that are spawned start as this rank did
    argv = sys.argv[1:]
    sys.argv[1:] = redacted_words(argv)  # trackers keep the command line of a run
    own = _checked_flags(argv)
    # torch is imported only now: its warnings pass the filters set up above, and a launcher
    # that ends meanwhile takes this rank with it.
    from toolkit.checkpoints.preemption import EXIT_PREEMPTED, Preempted
    from toolkit.measuring.attestation import Refused

    code = 0
    try:
        _train(own, refused_by=Refused)
    except UsageError as error:
        code = print_reason(EXIT_USAGE, str(error))
    except Refused as error:
        code = print_reason(EXIT_REFUSED, f"refused: {error}")
    except Preempted as error:
        code = print_reason(EXIT_PREEMPTED, str(error))
    except GuardError as error:
        code = print_reason(EXIT_FAILED, f"stopped by a guard: {error}")
    except MachineLostError as error:
        code = print_reason(EXIT_FAILED, str(error))
    except Exception as error:
        if not print_full_disk(error):
            sys.stderr.write(redact(traceback.format_exc()))
            print_cause(error)
        code = EXIT_FAILED
    if code == 0:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank that failed would wait in its exit handlers for its neighbours


def _checked_flags(argv: list[str]) -> OwnArguments:
    """Return the flags, or leave with a sentence about them, before torch is imported."""
    try:
        return checked_flags(argv)
    except UsageError as error:
        if (
            number_of_machines() > 1
        ):  # the others wait for this one, and have to hear that it leaves
            from toolkit.measuring.machines import watched

            with contextlib.suppress(UsageError), watched(meeting=True):
                raise
        if STATUS_DIR in os.environ:
            StatusFile(Path(os.environ[STATUS_DIR]), rank()).failed(error, "usage")
        print_reason(EXIT_USAGE, str(error))
        os._exit(EXIT_USAGE)


def _train(own: OwnArguments, *, refused_by: type[BaseException]) -> None:
    from toolkit.measuring import machines

    if STATUS_DIR in os.environ:  # a launcher that listens hears of mistakes too
        status = StatusFile(Path(os.environ[STATUS_DIR]), rank())
        with guard(status, refused_by=(refused_by,)):
            check_package_folder()
            with machines.watched(meeting=True):
                job = _checked(own, status)
            with machines.watched():
                _run(job, status)
        return
    with machines.watched(meeting=True):
        job = _checked(own)  # without a launcher, a mistake leaves no files behind
    status = StatusFile(status_folder(job.output_dir), rank())
    with guard(status, refused_by=(refused_by,)), machines.watched():
        _run(job, status)


# Each module is imported when it is used: flags and mistakes need no Trainer. The engines' imports
# must come after a rehearsal has hidden the GPUs, which happens in the check of the job.


def _checked(own: OwnArguments, status: StatusFile | None = None) -> Job:
    """Return the training that the flags ask for; its preparation of data is watched, too."""
    from toolkit.measuring import machines
    from toolkit.training.job import checked_job

    if not (seconds := own.run.hang_timeout):
        return checked_job(own)
    watchdog = Watchdog(
        folder=folder_of_launch() if status is None else status.path.parent,
        seconds=seconds,
        texts=machines.meeting(),
        ending=(lambda error: None) if status is None else status.failed,
    )
    with watchdog:
        return checked_job(own)


def _run(job: Job, status: StatusFile) -> None:
    from toolkit.engines import flight_recorder
    from toolkit.measuring import machines
    from toolkit.training.run import train

    watchdog = Watchdog(
        folder=status.path.parent,
        seconds=job.own.run.hang_timeout,
        texts=machines.meeting(),
        collectives=flight_recorder.COLLECTIVES,
        step=lambda: status.step,
        ending=status.failed,
    )
    with watchdog:
        train(job, status)


if __name__ == "__main__":
    main()
