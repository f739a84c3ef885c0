"""Put faults into the code at drawn places, one at a time, and see whether the tests notice.

    python benchmarks/deliberate_faults.py --seed 1 --out runs/faults
    python benchmarks/deliberate_faults.py --again runs/faults/faults.json --out runs/again

Nobody chooses the places: five operators are applied wherever they fit (see OPERATORS), and the
seed draws from what they give, over all rooms. Each fault is put into a copy of the tracked files,
where the nearest tests run: first those that import the module, or one that imports it; then those
that run the room's code with the others' (RANKS); the short tier's before the long ones. A test
that also fails without the fault catches nothing.

Writes `faults.json` and `faults.md`. A survivor that changes nothing anybody could notice is
equivalent: its reason goes into faults.json by hand, and `--again` takes the reasons over, runs
the other survivors again on the code of today, and writes both files anew. It also goes on with a
run that was stopped.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from toolkit import _HOMES

ROOT = Path(__file__).resolve().parents[1]

FEWEST = 4
"""Places of each room at the least; fewer where that were more than half of all places."""

NEAREST = 8
"""Test files that import the module: more of them know it only by the way."""

TIERS = {"short": "not long and not sweep", "long": "long"}
"""The marks of each tier's tests."""

LIMIT = 400
"""Seconds after which a stage of tests is ended: what it has not caught by then, it has missed."""

LONGEST = 300
"""Seconds of one test with what it sets up: a fault that makes it hang is noticed, too."""

STRATEGIES = (
    "tests/test_every_strategy.py::"
    "test_six_strategies_of_an_engine_are_six_rows_with_every_gate_held"
)
"""The other tests of the file set up a comparison of fourteen further strategies."""

OF_AN_INSTALLATION = "tests/test_search_path.py"
"""It needs an environment with packages of its own, which a copy has not."""

SWAPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}

RANKS = {
    "backends": ("tests/planning", "tests/configs", "tests/test_made_up_backend.py", STRATEGIES),
    "causes": ("tests/causes", "tests/test_failures.py"),
    "certifying": ("tests/certifying",),
    "checkpoints": ("tests/checkpoints/test_damaged_checkpoints.py",
                    "tests/checkpoints/test_ranks_agree.py", "tests/checkpoints"),
    "comparing": ("tests/comparing", "tests/test_parity_faults.py", "tests/test_bisect_faults.py"),
    "configs": ("tests/configs", "tests/test_rehearse.py", "tests/test_attestation.py"),
    "data": ("tests/data", "tests/test_train.py", STRATEGIES),
    "doctor": ("tests/doctor", "tests/test_environment.py", "tests/test_cli.py"),
    "engines": ("tests/engines", "tests/test_attestation.py", STRATEGIES,
                "tests/test_parameter_server.py", "tests/test_split_rows.py",
                "tests/test_parity_faults.py", "tests/test_train.py",
                "tests/checkpoints/test_exact_resuming.py"),
    "jobs": ("tests/planning",),
    "launching": ("tests/launching", "tests/test_failures.py", "tests/test_fork_server.py"),
    "measuring": ("tests/measuring", "tests/planning/test_known_models.py",
                  "tests/planning/test_counted_models.py", "tests/test_attestation.py",
                  "tests/test_guards_in_ranks.py", "tests/test_bisect_faults.py", STRATEGIES,
                  "tests/test_rehearse.py"),
    "planning": ("tests/planning", "tests/test_cli.py"),
    "records": ("tests/test_results.py", "tests/comparing", STRATEGIES),
    "stack": ("tests/verifying", "tests/doctor"),
    "tables": ("tests/tables", "tests/comparing", "tests/planning"),
    "training": ("tests/training", "tests/test_train.py", "tests/test_methods.py",
                 "tests/test_speed_in_ranks.py", STRATEGIES,
                 "tests/checkpoints/test_exact_resuming.py"),
    "top": ("tests/test_cli.py", "tests/test_environment.py", "tests/test_rehearse.py",
            "tests/test_names_and_secrets.py", "tests/test_fork_server.py"),
    "verifying": ("tests/verifying",),
}  # fmt: skip
"""Tests that run the code of a room together with the others', most often in ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    path: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    start: int
    """Bytes from the beginning of the file."""

    end: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    fault: Fault
    caught_by: str | None
    seconds: float
    """0 where its tests were not run yet."""

    tier: str = ""
    """Of the test that caught it; results of before the tiers have none."""

    reason: str = ""
    """Why a survivor is equivalent."""

    survived_before: bool = False
    """Whether an earlier run did not catch it: a test was added, or made sharper, since."""

    @property
    def fate(self) -> str:
        if self.reason:
            return "equivalent"
        if self.caught_by:
            return "caught"
        return "survived" if self.seconds else "not run yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", type=Path, metavar="FAULTS_JSON")
    parser.add_argument("--list", action="store_true", help="print the places and end")
    parser.add_argument("--out", type=Path, default=Path("runs/deliberate_faults"))
    args = parser.parse_args()
    rooms = places()
    if new := rooms.keys() - RANKS.keys():
        parser.error(f"RANKS has no tests of {', '.join(new)}")
    outcomes: dict[Fault, Outcome] = {}
    survived_before: set[Fault] = set()
    if args.again is None:
        seed, faults = args.seed, drawn(rooms, args.places, args.seed)
    else:
        seed, earlier = read(args.again)
        faults = []
        for outcome in earlier:
            settled = outcome.fate in ("caught", "equivalent")
            places_now = [] if settled else in_todays_code(outcome.fault, rooms)
            faults += places_now
            if outcome.survived_before or outcome.fate == "survived":
                survived_before.update(places_now)
            if not places_now:  # a survivor whose code is gone was never caught: it stays one
                outcomes[outcome.fault] = outcome
    outcomes |= {fault: Outcome(fault=fault, caught_by=None, seconds=0) for fault in faults}
    if args.list:
        for fault in faults:
            print(sentence(fault))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for outcome in judged(faults, jobs=args.jobs):
        outcome.survived_before = outcome.fault in survived_before
        outcomes[outcome.fault] = outcome
        print(f"{outcome.caught_by or 'SURVIVED'}: {sentence(outcome.fault)}", flush=True)
        write(args.out, seed, list(outcomes.values()))
    write(args.out, seed, list(outcomes.values()))
    caught, counted = share(list(outcomes.values()))
    print(f"{caught} of {counted} caught, equivalent ones left out; see {args.out / 'faults.md'}")
    sys.exit(0 if caught >= 0.9 * counted else 1)


# Places


def places() -> dict[str, list[Fault]]:
    """Return every fault that an operator can make, by room."""
    rooms: dict[str, list[Fault]] = {}
    for path in sorted((ROOT / "toolkit").rglob("*.py")):
        inside = path.relative_to(ROOT / "toolkit").parts
        room = inside[0] if len(inside) > 1 else "top"
        rooms.setdefault(room, []).extend(faults_of(path))
    return rooms


def faults_of(path: Path) -> Iterator[Fault]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function in nodes_of(ast.parse(source), ""):
        for operator, change in OPERATORS.items():
            for old, new in change(node):
                after = ast.unparse(new)
                fault = Fault(
                    path=str(path.relative_to(ROOT)),
                    line=old.lineno,
                    function=function,
                    operator=operator,
                    before=ast.unparse(old),
                    after=after if isinstance(new, ast.stmt) else f"({after})",
                    start=starts[old.lineno - 1] + old.col_offset,
                    end=starts[old.end_lineno - 1] + old.end_col_offset,
                )
                if fault.before != after and compiles(with_fault(source, fault)):
                    yield fault


def nodes_of(node: ast.AST, function: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Give what runs and can be changed: no annotations, decorators, f-strings, type aliases."""
    if isinstance(node, ast.JoinedStr) or is_for_types(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.expr | ast.stmt):
        yield node, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_of(child, function)


def is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "NewType")


Change = Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]
"""What stands there, and what takes its place."""


def dropped_conditions(node: ast.AST) -> Change:
    """Drop one of `a and b`; or let an `if` be taken always, or never."""
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    if isinstance(node, ast.If | ast.IfExp) and not any(
        # What `and` joins is above; a name that the condition binds would only be missed.
        isinstance(inner, ast.BoolOp | ast.NamedExpr)
        for inner in ast.walk(node.test)
    ):
        yield from ((node.test, ast.Constant(always)) for always in (True, False))


def swapped_comparisons(node: ast.AST) -> Change:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for sign in SWAPPED[type(node.ops[0])]:
            yield node, ast.Compare(node.left, [sign()], node.comparators)


def changed_constants(node: ast.AST) -> Change:
    if isinstance(node, ast.Constant):
        match node.value:
            case bool():
                yield node, ast.Constant(not node.value)
            case int():
                yield node, ast.Constant(node.value + 1)
            case float():
                yield node, ast.Constant(node.value * 1.5 or 1.0)


def skipped_calls(node: ast.AST) -> Change:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, ast.Pass()


def swapped_arguments(node: ast.AST) -> Change:
    if isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args):
        for place in range(len(node.args) - 1):
            first, second = node.args[place : place + 2]
            arguments = [*node.args[:place], second, first, *node.args[place + 2 :]]
            yield node, ast.Call(node.func, arguments, node.keywords)


OPERATORS: dict[str, Callable[[ast.AST], Change]] = {
    "drop a condition": dropped_conditions,
    "swap a comparison": swapped_comparisons,
    "change a constant": changed_constants,
    "skip a call": skipped_calls,
    "swap two arguments": swapped_arguments,
}


def with_fault(source: bytes, fault: Fault) -> bytes:
    return source[: fault.start] + fault.after.encode() + source[fault.end :]


def compiles(source: bytes) -> bool:
    try:
        compile(source, "fault", "exec")
    except SyntaxError:
        return False
    return True


def drawn(rooms: dict[str, list[Fault]], number: int, seed: int) -> list[Fault]:
    """Draw by room in proportion to its places, then an operator, then a place; no place twice."""
    chance = random.Random(seed)
    every = sum(map(len, rooms.values()))
    fewest = min(FEWEST, number // (2 * len(rooms)))
    names = [name for name in rooms for _ in range(min(fewest, len(rooms[name])))]
    weights = [len(places) / every for places in rooms.values()]
    names += chance.choices(list(rooms), weights, k=max(0, number - len(names)))
    faults: dict[tuple[str, int, int], Fault] = {}
    for name in names[:number]:
        left = [
            fault for fault in rooms[name] if (fault.path, fault.start, fault.end) not in faults
        ]
        operator = chance.choice(sorted({fault.operator for fault in left}))
        fault = chance.choice([fault for fault in left if fault.operator == operator])
        faults[fault.path, fault.start, fault.end] = fault
    return list(faults.values())


def in_todays_code(fault: Fault, rooms: dict[str, list[Fault]]) -> list[Fault]:
    """Return the same change at the nearest line of that function, or none where it is gone."""
    alike = [
        place
        for places in rooms.values()
        for place in places
        if (place.path, place.function, place.before, place.after)
        == (fault.path, fault.function, fault.before, fault.after)
    ]
    return sorted(alike, key=lambda place: abs(place.line - fault.line))[:1]


# Tests


def judged(faults: Sequence[Fault], *, jobs: int) -> Iterator[Outcome]:
    """Give each fault's outcome as it comes."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def judge(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return copy.judge(fault)
            finally:
                copies.put(copy)

        for future in as_completed([pool.submit(judge, fault) for fault in faults]):
            yield future.result()


class Copy:
    """The tracked files in a folder of their own, with an environment that imports them."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.tree / name)
        self.programs = environment_for(self.tree, folder / "environment")
        self.folder = folder
        self.broken: set[str] = set()
        """Tests that fail without a fault, too."""

    def judge(self, fault: Fault) -> Outcome:
        path = self.tree / fault.path
        source = path.read_bytes()
        begin = time.monotonic()
        caught_by = None
        stages = [(tier, tests) for tier in TIERS for tests in nearest(fault.path)]
        while caught_by is None and stages:
            tier, tests = stages[0]
            path.write_bytes(with_fault(source, fault))
            try:
                caught_by = self.failing(tests, tier)
            finally:
                path.write_bytes(source)
            if caught_by is None:
                stages = stages[1:]
                continue
            again = self.failing([caught_by] if "::" in caught_by else tests, tier)
            if again is not None and "::" not in caught_by:
                raise SystemExit(f"{caught_by}, without a fault, too: mend {tests} first")
            if again is not None:
                self.broken.add(caught_by)
                caught_by = None
        return Outcome(
            fault=fault,
            caught_by=caught_by,
            seconds=time.monotonic() - begin,
            tier=tier if caught_by else "",
        )

    def failing(self, tests: Sequence[str], tier: str) -> str | None:
        """Run a tier's part of these tests up to the first that fails, and return its name."""
        command = [self.programs / "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
        command += ["-m", TIERS[tier]]
        command += [f"--timeout={LONGEST}", "--timeout-method=signal"]
        command += ["--basetemp", self.folder / "temporary", *tests]
        command += [word for name in self.broken for word in ("--deselect", name)]
        variables = os.environ | {"PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}
        with (self.folder / "log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a fault may have its processes kill their whole group
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                family = psutil.Process(process.pid).children(recursive=True)
                for member in [*family, process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()
                return None
            log.seek(0)
            names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read(), re.MULTILINE)
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        return names[0] if names else f"pytest, which ended with {code}"


def environment_for(tree: Path, folder: Path) -> Path:
    """Make an environment whose `toolkit` is the one in `tree`; return where its programs are."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    packages = Path(sysconfig.get_path("purelib", vars={"base": folder}, scheme="venv"))
    ours = sysconfig.get_path("purelib")
    (packages / "tree.pth").write_text(f"{tree}\n{ours}\n")
    for path in Path(sys.executable).parent.iterdir():
        # Programs of packages name the Python that runs them in their first line.
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:2] == b"#!":
            rest = path.read_text().partition("\n")[2]
            (programs / path.name).write_text(f"#!{programs / 'python'}\n{rest}")
            (programs / path.name).chmod(0o755)
    return programs


def nearest(path: str) -> list[list[str]]:
    """Return the test files that import a module, or else its importers; then those of RANKS."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {test: imported_by(test) for test in every if test != ROOT / OF_AN_INSTALLATION}
    near = [test for test, names in tests.items() if module in names]
    if not near:
        importers = {
            ".".join(other.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for other in (ROOT / "toolkit").rglob("*.py")
            if module in imported_by(other)
        }
        near = [test for test, names in tests.items() if names & importers]
    stem = module.rpartition(".")[2]
    near.sort(key=lambda test: (test.stem != f"test_{stem}", launches(test), len(tests[test])))
    room = path.split("/")[1] if path.count("/") > 1 else "top"
    first = [str(test.relative_to(ROOT)) for test in near[:NEAREST]]
    first = [STRATEGIES if STRATEGIES.startswith(f"{test}::") else test for test in first]
    return [stage for stage in (first, list(RANKS[room])) if stage]


@functools.cache
def imported_by(path: Path) -> set[str]:
    """Return the modules that a file imports, and what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names | {home for name, home in _HOMES.items() if f"toolkit.{name}" in names}


def launches(path: Path) -> bool:
    """Whether a file's tests start ranks, by the fixtures that they take; they are slow."""
    taken = r"^def \w+\([^)]*\b(?:launch|launch_environment|as_launched|toolkit|run_of)\b"
    return re.search(taken, path.read_text(), re.MULTILINE) is not None


# Results


FATES = ("survived", "not run yet", "equivalent", "caught")


def sentence(fault: Fault) -> str:
    change = f"{shortened(fault.before)} -> {shortened(fault.after)}"
    return f"{fault.path}:{fault.line} {fault.function or 'module'}: {fault.operator}: {change}"


def shortened(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


def share(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return how many faults were caught, of how many that were run and are not equivalent."""
    fates = Counter(outcome.fate for outcome in outcomes)
    return fates["caught"], fates["caught"] + fates["survived"]


def read(path: Path) -> tuple[int, list[Outcome]]:
    told = json.loads(path.read_text())
    outcomes = [Outcome(**entry | {"fault": Fault(**entry["fault"])}) for entry in told["outcomes"]]
    return told["seed"], outcomes


def write(folder: Path, seed: int, outcomes: Sequence[Outcome]) -> None:
    content = {"seed": seed, "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (folder / "faults.json").write_text(json.dumps(content, indent=1) + "\n")
    caught, counted = share(outcomes)
    fates = Counter(outcome.fate for outcome in outcomes)
    before = sum(outcome.survived_before for outcome in outcomes if outcome.fate == "caught")
    short = sum(outcome.tier == "short" for outcome in outcomes)
    lines = [
        f"# Deliberate faults, seed {seed}",
        "",
        f"{len(outcomes)} faults: {', '.join(f'{fates[fate]} {fate}' for fate in FATES)}. Of those "
        f"that were run and are not equivalent, {caught / max(counted, 1):.0%} were caught, "
        f"{(caught - before) / max(counted, 1):.0%} at their first run, "
        f"{short / max(counted, 1):.0%} by the short tier.",
        "",
        f"| operator | {' | '.join(FATES)} |",
        f"|---|{'---|' * len(FATES)}",
    ]
    for operator in OPERATORS:
        of_operator = Counter(o.fate for o in outcomes if o.fault.operator == operator)
        lines.append(f"| {operator} | {' | '.join(str(of_operator[fate]) for fate in FATES)} |")
    for fate in FATES:
        lines += ["", f"## {fate.capitalize()}", ""]
        lines += [
            f"- `{sentence(outcome.fault)}`" + words_after(outcome)
            for outcome in sorted(outcomes, key=lambda o: (o.fault.path, o.fault.line))
            if outcome.fate == fate
        ]
    (folder / "faults.md").write_text("\n".join(lines) + "\n")


def words_after(outcome: Outcome) -> str:
    words = outcome.reason or outcome.caught_by or ""
    if outcome.tier == "long":
        words += ", a long test"
    if outcome.survived_before and outcome.caught_by:
        words += ", added after it had survived"
    return f": {words}" if words else ""


if __name__ == "__main__":
    main()
