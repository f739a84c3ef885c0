"""The steps of `gpu_acceptance.py`, each of which runs in a process of its own.

python benchmarks/kit/acceptance.py STEP FOLDER smoke|full
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.cells import Machine, Refused
from kit.result import both_ends
from toolkit.escaping import one_line
from toolkit.launching.forking import SOCKET, start, warm_process
from toolkit.launching.launch import launch_command, launch_environment
from toolkit.launching.python import python_environment
from toolkit.launching.status import read_statuses
from toolkit.launching.supervised import supervised
from toolkit.records.json_files import write_json
from toolkit.records.record import read_record

ROOT: Final = Path(__file__).resolve().parents[2]
END_SECONDS: Final = 20.0
"""How long the processes of a step may take to be killed."""

EVIDENCE: Final = "evidence.json"
KEPT_CHARACTERS: Final = 4000
ALONE: Final = ("zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")
"""Strategies that run on one process; DDP would only replicate to nowhere, and is refused."""

OFFLOADS: Final = ("fsdp_offload", "zero2_offload", "zero3_offload")
PAGEABLE: Final = [
    {"strategy": strategy, "pinned": pinned}
    for strategy in ("fsdp_offload", "zero2_offload")
    for pinned in (False, True)
]
GROUPS: Final = {"TORCH_CPP_LOG_LEVEL": "INFO", "NCCL_DEBUG": "VERSION"}
"""With these torch and NCCL print which process groups they make: no record names them."""

NO_OTHER_PLUGINS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""pytest-benchmark before 5.3 warns as soon as pytest-xdist is there. Our warnings are errors, and
that one ended pytest with an INTERNALERROR."""

INTERNAL: Final = "INTERNALERROR> "

STACKS: Final = {"TORCH_SHOW_CPP_STACKTRACES": "1", "PYTHONFAULTHANDLER": "1"}
LAYERS: Final = 8
HELPERS: Final = ROOT / "tests" / "helpers"
TEST_FOLDERS: Final = "planning data records configs measuring engines training causes doctor"
STARTS_RANKS: Final = re.compile(
    r"\b(launch_environment|cold_environment|warm_environment|as_launched|launch|toolkit)[,)]"
    r"|\bspawn\(|\bPopen\(|fail_in_"
)
"""Fixtures and calls by which a test starts ranks or the installed command."""


@dataclass(kw_only=True)
class Task:
    """A step that runs, in a process of its own."""

    folder: Path
    """Its scratch folder."""

    smoke: bool
    measured: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])

    def note(self, **facts: Any) -> None:
        """Keep evidence at once: the step may be ended before it is through."""
        self.measured |= facts
        self.write()

    def check(self, held: object, problem: str) -> None:
        if not held:
            self.problems.append(problem)
            self.write()

    def write(self, **facts: Any) -> None:
        content = {"measured": self.measured, "problems": self.problems, "skipped": None} | facts
        write_json(self.folder / EVIDENCE, content)

    def run(self, words: Sequence[str], log: str, *, seconds: float = 600) -> tuple[int, str]:
        """Run a Python command to its end, and return its exit code and what it printed."""
        command = [sys.executable, *words]
        environment = python_environment()
        return self._ended(command, log, seconds=seconds, environment=environment, cold=True)

    def train(
        self, flags: Sequence[str], log: str, *, watch: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        """Run `accelerate launch` with `toolkit.train` under the checked-in config of `single`."""
        config = ROOT / "accelerate_configs" / "single.yaml"
        words = ["-m", "toolkit.train", *flags]
        command = launch_command(config, words, num_processes=1, gpu_ids="all")
        environment = launch_environment({}, loopback=True)
        return self._ended(command, log, environment=environment, watch=watch)

    def _ended(self, command: Sequence[str], log: str, **options: Any) -> tuple[int, str]:
        file = self.folder / f"{log}.log"
        code = ended(command, file, **{"seconds": 600.0, "folder": ROOT} | options)
        return -1 if code is None else code, file.read_text(encoding="utf-8", errors="replace")

    def model(self) -> Path:
        """Write a random model of Qwen2.5's shape, with the built-in tokenizer."""
        from kit.models import build
        from toolkit.data.tokens import load_tokenizer
        from toolkit.training.model import build_model

        folder = self.folder / "model"
        model = build("qwen-0.5b", smoke=self.smoke, dtype="bfloat16", layers=LAYERS)
        model.save_pretrained(folder)
        load_tokenizer(build_model()).save_pretrained(folder)
        return folder


@dataclass(frozen=True, kw_only=True)
class Step:
    name: str
    title: str
    seconds: float
    """The estimate for one GPU."""

    timeout: float
    run: Callable[[Task], None]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Further variables of its process."""


def doctor(task: Task) -> None:
    """Check the machine, whose GPU has to be named."""
    from toolkit import environment

    code, output = task.run(["-m", "toolkit.cli", "doctor", "--json"], "doctor")
    report = json.loads(output[output.index("{") :])
    findings = [{key: one[key] for key in ("name", "level", "text")} for one in report["findings"]]
    gpus = [] if task.smoke else [gpu.name for gpu in environment.gpus()]
    task.note(exit_code=code, failed=report["failed"], warned=report["warned"], gpus=gpus)
    task.note(findings=findings)
    task.check(code == 0, f"exit code {code}, {report['failed']} checks failed")
    texts = " ".join(one["text"] for one in findings)
    for gpu in gpus:
        task.check(gpu in texts, f"{gpu} is not named")


def warm(task: Task) -> None:
    """Fork a process from a warm one, as each launch of a comparison is, and compute in it."""
    script = task.folder / "forked.py"
    script.write_text(COMPUTES)
    environment = launch_environment({}, loopback=True)
    cold: list[str] = []
    begun = time.monotonic()
    with warm_process(environment) as path, (task.folder / "forked.log").open("wb") as file:
        process = start(
            [sys.executable, str(script)],
            environment=environment | {SOCKET: str(path)},
            stdout=file.fileno(),
            stderr=file.fileno(),
            on_cold=cold.append,
        )
        code = process.wait()
        printed = path.with_name("log").read_text(encoding="utf-8", errors="replace")
    task.note(seconds=round(time.monotonic() - begun, 1), started_cold=cold, exit_code=code)
    task.note(printed=both_ends(printed, KEPT_CHARACTERS))
    task.note(computed=(task.folder / "forked.log").read_text("utf-8").strip())
    task.check(not cold, f"started cold: {'; '.join(cold)}")
    device = "cpu" if task.smoke else "cuda"
    task.check(code == 0 and f"55.0 on {device}" in task.measured["computed"], f"exit code {code}")


COMPUTES: Final = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
print(torch.arange(11.0, device=device).sum().item(), "on", device)
"""


def compare(task: Task, strategies: Sequence[str], *flags: str) -> None:
    """Run `toolkit compare` with one process and NCCL, and check each run."""
    from kit.runs import run_compare

    steps = "3" if task.smoke else "8"
    words = ["--strategies", ",".join(("single", *strategies)), "--num_processes", "1"]
    words += ["--max_steps", steps, "--throughput_steps", "4", *flags]
    results = run_compare(task.folder, words)
    runs = [run_facts(run, task.folder / "comparison") for run in results["runs"]]
    task.note(exit_code=results["exit_code"], started_cold=results["started_cold"], runs=runs)
    task.note(printed=results["printed"])
    task.check(results["exit_code"] == 0, f"exit code {results['exit_code']}")
    for run in runs:
        problem = f"{run['name']}: {run['status']}, {run['reason']}"
        task.check(run["status"] == "ok", problem)
        if run["status"] != "ok":
            continue
        task.check(not run["broken_gates"], f"{run['name']}: broken {run['broken_gates']}")
        task.check(run["attested"], f"{run['name']}: the attestation did not hold")
        if not task.smoke:
            task.check(not run["rehearsal"], f"{run['name']} was a rehearsal")
            needs_nccl = not run["name"].startswith("single")
            task.check("nccl" in run["groups"] or not needs_nccl, f"{run['name']}: no NCCL group")


def run_facts(run: dict[str, Any], comparison: Path) -> dict[str, Any]:
    """Return what is worth keeping of a run of a comparison, flat for a row of a table."""
    folder = None if run["folder"] is None else comparison / run["folder"]
    log = ""
    record: Any = {}
    if folder is not None:
        with suppress(OSError):
            log = (folder / "stdout.log").read_text(encoding="utf-8", errors="replace")
        with suppress(OSError, ValueError):
            record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    version = re.search(r"NCCL version (\S+)", log)  # by NCCL, when it makes a communicator
    groups = {name.lower() for name in re.findall(r"ProcessGroup(NCCL|Gloo)", log)}
    attestation = record.get("attestation") or {}
    predicted = (run["predicted"] or {}).get("peak_bytes") or {}
    return {
        "name": run["name"],
        "status": run["status"],
        "reason": run["reason"],
        "rehearsal": run["rehearsal"],
        "device": next((rank["device"] for rank in record.get("per_rank", ())), None),
        "groups": sorted(groups),
        "nccl": None if version is None else version[1],
        "attested": attestation.get("held"),
        "distributed_type": (attestation.get("engaged") or {}).get("distributed_type"),
        "loss_gap": (run["loss_gap"] or {}).get("max"),
        "grad_norm_gap": run["grad_norm_gap"],
        "weight_gap": run["weight_gap"],
        "broken_gates": sorted(name for name, held in (run["gates"] or {}).items() if not held),
        "peak_mib": mib((run["memory"] or {}).get("peak_bytes")),
        "predicted_mib": [mib(predicted.get("low")), mib(predicted.get("high"))],
        "step_seconds": (run["step_seconds"] or {}).get("median"),
        "tail": None if run["status"] == "ok" else log[-KEPT_CHARACTERS:],
    }


def mib(count: float | None) -> float | None:
    return None if count is None else round(count / 2**20, 1)


def tuned(task: Task) -> None:
    """Train with `--tuned` and compiled layers in bf16."""
    output = task.folder / "tuned"
    flags = ["--tuned", "--compile_blocks", "--bf16_weights", "true", "--bf16", "true"]
    flags += ["--output_dir", str(output)]
    flags += ["--model_name_or_path", str(task.model()), "--learning_rate", "3e-4"]
    flags += ["--packing", "best_fit", "--max_length", "64" if task.smoke else "512"]
    flags += ["--max_steps", "6" if task.smoke else "40", "--per_device_train_batch_size"]
    flags += ["2", "--compile_backend", "aot_eager"] if task.smoke else ["8"]
    code, printed = task.train(flags, "tuned")
    task.note(exit_code=code, printed=printed[-KEPT_CHARACTERS:])
    task.check(code == 0, f"exit code {code}")
    record: Any = read_record(output)
    losses = record["losses"]
    task.note(speed=record["training"]["speed"], losses=losses, precision=record["precision"])
    task.note(device=record["per_rank"][0]["device"], rehearsal=record["rehearsal"])
    task.note(step_seconds=record["step_seconds"], first_step_seconds=record["first_step_seconds"])
    task.note(tokens_per_second=record["tokens_per_second"], peak_mib=mib(peak_of(record)))
    on = record["training"]["speed"]["on"]
    task.check("compile_blocks" in on, f"nothing was compiled: {on}")
    finite = all(loss is not None and abs(loss) < float("inf") for loss in losses)
    task.check(finite and statistics.mean(losses[-3:]) < losses[0], f"losses do not fall: {losses}")
    task.check(task.smoke or not record["rehearsal"], "it was a rehearsal")


def peak_of(record: Any) -> float | None:
    return (record["memory"] or {}).get("peak_bytes")


def resume(task: Task) -> None:
    """End a run by SIGTERM in the middle, resume it, and compare it with one that was not ended."""
    from toolkit.comparing.parity.gates import limit_of

    steps = 24 if task.smoke else 300
    flags = ["--max_steps", str(steps), "--save_steps", str(steps // 2), "--logging_steps", "1"]
    whole, cut = task.folder / "whole", task.folder / "cut"
    sent: list[int] = []

    def signal_once() -> None:
        for status in read_statuses(cut / "status"):
            if not sent and status.state == "running" and status.step >= steps // 4:
                os.kill(status.pid, signal.SIGTERM)
                sent.append(status.step)

    with ThreadPoolExecutor() as pool:
        other = pool.submit(task.train, [*flags, "--output_dir", str(whole)], "whole")
        flags += ["--output_dir", str(cut)]
        code, printed = task.train(flags, "cut", watch=signal_once)
        states = [status.state for status in read_statuses(cut / "status")]
        saved = sorted(folder.name for folder in cut.glob("checkpoint-*"))
        task.note(signal_after_step=sent, cut_exit_code=code, states=states, saved=saved)
        task.note(printed=printed[-KEPT_CHARACTERS:])
        task.check(states == ["preempted"] and code, f"states {states}, exit code {code}")
        task.check(saved, "no checkpoint was saved")
        resumed, printed = task.train([*flags, "--resume_from_checkpoint", "last"], "resumed")
    whole_code, _ = other.result()
    task.note(resumed_exit_code=resumed, whole_exit_code=whole_code)
    task.note(resumed_printed=printed[-KEPT_CHARACTERS:])
    task.check(resumed == whole_code == 0, f"resumed: exit code {resumed}; whole: {whole_code}")
    expected, record = read_record(whole), read_record(cut)
    first = record["first_step"]
    pairs = list(zip(expected["losses"][first - 1 :], record["losses"], strict=True))
    gap = max(abs(one - two) for one, two in pairs)
    task.note(first_step=first, steps_compared=len(pairs), loss_gap=gap, to_the_last_bit=gap == 0)
    task.check(1 < first <= steps and gap <= limit_of("loss", "no"), f"from {first}: gap {gap}")


def too_large(task: Task) -> None:
    """Train with a batch that does not fit, and ask why it failed."""
    if task.smoke:
        raise Refused("without a GPU there is no memory of a GPU to exceed")
    import torch

    batch, predicted = too_large_a_batch(torch.cuda.get_device_properties(0).total_memory)
    output = task.folder / "too-large"
    flags = ["--model_name_or_path", str(task.model()), "--output_dir", str(output)]
    flags += ["--bf16", "true", "--packing", "fixed", "--max_length", str(ROW_TOKENS)]
    flags += ["--max_steps", "2", "--per_device_train_batch_size", str(batch)]
    task.note(batch=batch, predicted_gib=predicted)
    torch.cuda.empty_cache()
    blame(task, output, *task.train([*flags, "--gradient_accumulation_steps", "1"], "too-large"))


ROW_TOKENS: Final = 1024
LACKING: Final = 1.3


def too_large_a_batch(memory_bytes: int) -> tuple[int, list[float]]:
    """Return a batch whose lowest estimate is surely more than a GPU has, and the estimate."""
    from kit.models import config_values
    from toolkit.planning.job import PlannedJob
    from toolkit.planning.memory.estimate import estimate_memory
    from toolkit.planning.models.architectures import shape_from_config
    from toolkit.strategies import STRATEGIES

    shape = shape_from_config(config_values("qwen-0.5b", smoke=False, layers=LAYERS), name="qwen")
    job = PlannedJob(
        model=shape, strategy=STRATEGIES["single"], gpus=1, batch=8, sequence=ROW_TOKENS,
        precision="bf16", optimizer="adamw",
    )  # fmt: skip
    while (needed := estimate_memory(job).total).low < LACKING * memory_bytes:
        job = job.with_(batch=job.batch + 8)
    return job.batch, [round(end / 2**30, 1) for end in (needed.low, needed.high)]


def blame(task: Task, output: Path, code: int, printed: str) -> None:
    """Check what the run and the doctor say of an exhausted GPU."""
    advice = [line for line in printed.splitlines() if line.startswith("toolkit: ")]
    task.note(exit_code=code, advice=advice, printed=printed[-KEPT_CHARACTERS:])
    doctors_code, said = task.run(["-m", "toolkit.cli", "doctor", str(output)], "doctor")
    task.note(doctor_exit_code=doctors_code, doctor=said[-KEPT_CHARACTERS:])
    task.check(code == 1, f"exit code {code}")
    named = any("out-of-memory" in line and "What helps" in line for line in advice)
    task.check(named, "the run did not name the cause and what helps")
    task.check(doctors_code == 1 and "cuda-out-of-memory" in said, "doctor did not name the cause")
    task.check("The planner expects" in said, "the planner's figures do not stand beside it")


def two_ranks(task: Task) -> None:
    """Train under FSDP with two ranks on one device and save; beside it, gather in four ways."""
    from kit.shared import launch_sharing
    from kit.shared_rank import KEEP_SAVE

    device = "cpu" if task.smoke else "cuda"
    cases = ("full_tensor",) if task.smoke else GATHERS
    probe = str(ROOT / "benchmarks" / "kit" / "gloo_probe.py")
    with ThreadPoolExecutor() as pool:
        probes = {
            case: pool.submit(task.run, ["-P", probe, case, device], f"probe-{case}", seconds=90)
            for case in cases
        }
        outcome = launch_sharing(
            "fsdp",
            task.folder,
            ranks=2,
            steps=4,
            environment=STACKS | {KEEP_SAVE: "1"},
            timeout=300 if task.smoke else 80,
        )
        saved = sorted(file.name for file in (task.folder / "run").glob("final/*.safetensors"))
        task.note(status=outcome.status, reason=outcome.reason, saved=saved)
        log = (task.folder / "run" / "stdout.log").read_text(encoding="utf-8", errors="replace")
        task.note(printed=log[-5 * KEPT_CHARACTERS :] if outcome.status != "ok" else None)
        task.note(gathers=[gather_facts(case, *one.result()) for case, one in probes.items()])
    task.check(outcome.status == "ok" and saved, f"the training: {outcome.reason or 'not saved'}")
    for one in task.measured["gathers"]:
        task.check(one["ends"] == "well", f"{one['gather']}: {one['last_line']}")


GATHERS: Final = ("collective", "functional", "full_tensor", "state_dict")


def gather_facts(case: str, code: int, printed: str) -> dict[str, Any]:
    last = printed.strip().rpartition("\n")[2]
    tail = None if code == 0 else printed[-KEPT_CHARACTERS:]
    return {"gather": case, "ends": "well" if code == 0 else "badly", "last_line": last} | {
        "printed": tail
    }


def pageable(task: Task) -> None:
    """Time steps that offload to pageable memory, and to pinned memory."""
    from kit import offload

    machine = Machine(gpus=0 if task.smoke else 1, smoke=task.smoke, out=task.folder)
    launches: list[dict[str, Any]] = []
    for changes in PAGEABLE[:1] if task.smoke else PAGEABLE:
        settings = offload.settings_of(changes, machine)
        facts: dict[str, Any] = {"launch": offload.described(settings)}
        try:
            found = offload.measure(settings, machine)
            facts |= {"step_seconds": found["step_seconds"], "copied": found["copied"]}
            facts |= {"optimizer_seconds": found["phases_seconds"].get("optimizer")}
            facts |= {"pinned_mib": mib(found["pinned_bytes"]), "peak_mib": mib(peak_of(found))}
            facts |= {"host_peak_mib": mib(found["memory"]["host_peak_bytes"])}
        except Exception as error:
            facts |= {"error": str(error)[-KEPT_CHARACTERS:]}
            task.check(None, f"{facts['launch']}: {one_line(str(error))[:300]}")
        launches.append(facts)
        task.note(launches=launches)


def tests(task: Task) -> None:
    """Run the tests that start no ranks, with the GPUs visible."""
    folders = ["records"] if task.smoke else TEST_FOLDERS.split()
    files = sorted(file for one in folders for file in (ROOT / "tests" / one).glob("test_*.py"))
    files = [file for file in files if not STARTS_RANKS.search(file.read_text("utf-8"))]
    lacking = {str(file.relative_to(ROOT)): names for file in files if (names := missing(file))}
    chosen = [str(file) for file in files if str(file.relative_to(ROOT)) not in lacking]
    words = ["-m", "pytest", "-q", "-n", "2" if task.smoke else "12", "-p", "no:cacheprovider"]
    words += ["-p", "xdist", "-p", "timeout"]
    # Between two tests, so that the summary is still printed.
    words += ["--session-timeout", "100", "--durations=0", "--durations-min=5"]
    code, printed = task.run([*words, *chosen], "tests")
    task.note(files=len(chosen), left_out=lacking, **facts_of_pytest(code, printed))
    summary = task.measured["summary"] or task.measured["internal_error"]
    failures = task.measured["failures"]
    task.check(code == 0, f"exit code {code}, {len(failures)} failures; {summary}")


def missing(file: Path) -> list[str]:
    """Return the packages that a file of tests imports and that are not installed.

    Where pytest can't import one file, it runs the tests of none.
    """
    names = sorted(set(re.findall(r"^(?:import|from) (\w+)", file.read_text("utf-8"), re.M)))
    beside = {one.stem for folder in (file.parent, HELPERS) for one in folder.glob("*.py")}
    return [name for name in names if name not in beside and find_spec(name) is None]


def facts_of_pytest(code: int, printed: str) -> dict[str, Any]:
    lines = printed.strip().splitlines()
    internal = [line.removeprefix(INTERNAL) for line in lines if line.startswith(INTERNAL)]
    return {
        "exit_code": code,
        "failures": [line for line in lines if line.startswith(("FAILED ", "ERROR "))],
        "summary": next((line for line in reversed(lines) if " passed" in line), None),
        "internal_error": next((line for line in reversed(internal) if line.strip()), None),
        "printed": None if code == 0 else both_ends(printed, KEPT_CHARACTERS),
    }


STEPS: Final = {
    step.name: step
    for step in (
        Step(name="doctor", title="`toolkit doctor` names the GPU", seconds=2, timeout=40,
             run=doctor),
        Step(name="warm", title="A process is forked from a warm one", seconds=20, timeout=60,
             run=warm),
        Step(name="too-large", title="A batch that does not fit is explained", seconds=50,
             timeout=90, run=too_large),
        Step(name="resume", title="SIGTERM, a checkpoint, and the same losses", seconds=45,
             timeout=100, run=resume),
        Step(name="tuned", title="`--tuned --compile_blocks` in bf16", seconds=75, timeout=120,
             run=tuned),
        # Seconds of comparisons are those of runs that all start cold.
        Step(name="compare", title="Strategies on one process with NCCL", seconds=170, timeout=260,
             run=lambda task: compare(
                 task, ALONE[1::2] if task.smoke else ALONE, "--timeout", "100"),
             environment=GROUPS),
        Step(name="two-ranks-fsdp", title="FSDP saves with two ranks on one GPU over gloo",
             seconds=35, timeout=120, run=two_ranks),
        Step(name="compare-bf16", title="Strategies in bf16", seconds=110, timeout=200,
             run=lambda task: compare(
                 task, ("zero2", "fsdp"), "--precision", "bf16", "--timeout", "80"),
             environment=GROUPS),
        Step(name="compare-offload", title="CPU offload on one process", seconds=150, timeout=280,
             run=lambda task: compare(task, OFFLOADS, "--timeout", "150"), environment=GROUPS),
        Step(name="pageable-offload", title="Offload to pageable memory against pinned",
             seconds=130, timeout=240, run=pageable),
        Step(name="tests", title="Tests that start no ranks", seconds=120, timeout=150, run=tests,
             environment=NO_OTHER_PLUGINS),
    )
}  # fmt: skip
"""In the order in which they run: those first that show much in few seconds."""


def main() -> int:
    name, folder, size = sys.argv[1:]
    return run_step(STEPS[name], Task(folder=Path(folder), smoke=size == "smoke"))


def run_step(step: Step, task: Task) -> int:
    """Run a step in this process, and write what it found."""
    try:
        step.run(task)
    except Refused as refusal:
        task.write(skipped=str(refusal))
        return 0
    except Exception as error:
        traceback.print_exc()
        task.problems.append(f"{type(error).__name__}: {error}")
    task.write()
    return 1 if task.problems else 0


def ended(
    command: Sequence[str],
    log: Path,
    *,
    seconds: float,
    environment: dict[str, str],
    folder: Path | None = None,
    cold: bool = False,
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command to its end, or end all its processes after `seconds` and return None.

    Args:
        command: Begins with this Python.
        log: The file for its output.
        folder: Where it starts.
        cold: Not forked from a warm process, even if the environment names one.
        watch: Called again and again while it runs.
    """
    words = supervised(command, redacting=True)
    with log.open("wb") as file:
        out = file.fileno()
        process: Any
        if cold:
            process = subprocess.Popen(
                words, env=environment, cwd=folder, stdout=out, stderr=out, start_new_session=True
            )
        else:
            process = start(
                words,
                environment=environment,
                folder=folder,
                stdout=out,
                stderr=out,
                on_cold=print,
            )
        end = time.monotonic() + seconds
        try:
            while (code := process.poll()) is None and time.monotonic() < end:
                watch()
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.terminate()  # what supervises the command kills all that descends from it
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                process.kill()
    return code


if __name__ == "__main__":
    sys.exit(main())
