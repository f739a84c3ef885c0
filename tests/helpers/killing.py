"""Trainings that are killed, stopped and resumed, for the tests and the benchmark of both."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launches
import psutil

from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.forking import Fork
from toolkit.launching.launch import launch_command
from toolkit.launching.status import RankStatus, read_statuses
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

Launcher = subprocess.Popen[bytes] | Fork

BY_STEP = ("losses", "grad_norms", "learning_rates", "sample_ids")


class Run:
    """One training under one strategy, however often it is started."""

    def __init__(
        self,
        strategy: str,
        engine: str,
        folder: Path,
        environment: dict[str, str],
        flags: tuple[Any, ...] = (),
        precision: str | None = None,
        ranks: int | None = None,
        tensor_size: int | None = None,
    ) -> None:
        folder.mkdir()
        (folder / "swap").mkdir()
        self.output = folder / "run"
        others = {"single": 1, "fsdp_hybrid": 4, "tensor_ddp": 4, "three_d": 8}
        self.ranks = others.get(strategy, 2) if ranks is None else ranks
        self._folder = folder
        self._environment = environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._starts = 0
        self._drafts_before: set[Path] = set()
        options = {"nvme_path": folder / "swap"} if strategy == "zero3_nvme" else {}
        config = write_configs(
            get_strategy(strategy).with_tensor_groups(tensor_size),
            folder / "config",
            options=ConfigOptions(num_processes=self.ranks, precision=precision, **options),
        )
        script = ["-m", "toolkit.train", "--engine", engine, "--output_dir", str(self.output)]
        self._command = launch_command(config.accelerate, [*script, *map(str, flags)])

    def start(self, *flags: Any) -> Launcher:
        """Start it, and return its launcher."""
        self._starts += 1
        self._drafts_before = self._drafts()
        for said in (self.output / "status").glob("rank-*.json"):
            said.unlink()  # by an earlier start
        with self._log().open("wb") as log:
            return launches.start(
                [*self._command, *map(str, flags)], environment=self._environment, log=log
            )

    def end(self, launcher: Launcher, seconds: float = 1200) -> tuple[int, str]:
        """Wait for a launcher's end, and return its status and all that was said.

        DeepSpeed compiles for minutes, once.
        """
        try:
            code = launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all(launcher)
            raise
        return code, self._log().read_text()

    def go(self, *flags: Any) -> str:
        """Run it to its end, which must be good, and return all that was said."""
        code, said = self.end(self.start(*flags))
        assert code == 0, said
        return said

    def await_step(self, step: int, launcher: Launcher) -> None:
        """Return once every rank says that it has done so many steps."""
        self._await(launcher, lambda: self._least_step() >= step)

    def await_draft(self, launcher: Launcher) -> None:
        """Return as soon as a save of this start has begun."""
        self._await(launcher, lambda: bool(self.drafts()))

    def drafts(self) -> set[Path]:
        """Return what this start has begun to save and not ended."""
        return self._drafts() - self._drafts_before

    def statuses(self) -> list[RankStatus]:
        return read_statuses(self.output / "status")

    def kill_all(self, launcher: Launcher) -> None:
        """End every process of it at once, as when a machine goes away."""
        below = psutil.Process(launcher.pid).children(recursive=True)
        for process in [psutil.Process(launcher.pid), *below]:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(below, timeout=20)
        launcher.wait(20)

    def tail(self, step: int) -> dict[str, Any]:
        """Return what the steps after `step` did."""
        record = read_record(self.output)
        before = step + 1 - record["first_step"]
        assert before >= 0, "the record begins later"
        return {name: record[name][before:] for name in BY_STEP}

    def first_step(self) -> int:
        """Return the first step of the start that came to its end."""
        return read_record(self.output)["first_step"]

    def weights(self) -> dict[str, bytes]:
        """Return every weight of the final model."""
        from safetensors.torch import load_file

        (file,) = (self.output / "final").glob("*.safetensors")
        return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}

    def lines(self) -> list[dict[str, Any]]:
        text = (self.output / "steps.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def _drafts(self) -> set[Path]:
        return set(self.output.glob(".checkpoint-*.draft-*"))

    def _least_step(self) -> int:
        said = self.statuses()
        return min((each.step for each in said), default=-1) if len(said) == self.ranks else -1

    def _await(self, launcher: Launcher, seen: Callable[[], bool]) -> None:
        end = time.monotonic() + 240
        while not seen():
            assert launcher.poll() is None, self.end(launcher)[1]
            assert time.monotonic() < end, "it never came so far"
            time.sleep(0.002)

    def _log(self) -> Path:
        return self._folder / f"log-{self._starts}"
