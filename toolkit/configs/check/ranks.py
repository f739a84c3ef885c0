"""Rules on what the ranks of a script do together: collectives, saves, rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from toolkit.configs.check.finding import Finding, named
from toolkit.configs.check.loops import is_told
from toolkit.configs.check.source import (
    ACCELERATOR,
    DEEPSPEED,
    PREPARE,
    Source,
    is_trainer_class,
    keywords_of,
)

_MAIN: Final = ("is_main_process", "is_local_main_process")
_ON_MAIN: Final = ("on_main_process", "on_local_main_process")


def _on_one_rank(source: Source) -> Iterator[Finding]:
    """What every rank has to do together, done by the main one alone."""
    for call in source.calls:
        main = _side(source, call)
        if main is None or {"group", "process_group"} & keywords_of(call).keys():
            continue
        case = None
        name = source.called(call) or ""
        owner, _, method = name.rpartition(".")
        of_trainer = is_trainer_class(source.library_class(owner))
        runs = of_trainer and method in ("train", "evaluate", "predict")
        if runs or name in named("collectives"):
            case = None if _answered(source, call, name, main) else "call"
        elif is_told(source, call):
            continue
        elif name in named("saves") or (of_trainer and method in ("save_model", "push_to_hub")):
            case = "save"
        elif isinstance(call.func, ast.Name) and source.makers(call.func) <= {PREPARE, DEEPSPEED}:
            case = "model"
        if case is not None:
            who = "the main process alone" if main else "all but the main process"
            yield source.finding(f"on-one-rank.{case}", call, call=ast.unparse(call.func), who=who)


def _side(source: Source, node: ast.AST) -> bool | None:
    """Whether only the main process runs a node (True), or only the others; None for all."""
    for parent in source.parents_of(node):
        if isinstance(parent, ast.If) and node is not parent.test:
            asked = _asks_for_main(source, parent.test)
            if asked is not None:
                # All else is more than the other processes where more was asked.
                others = None if isinstance(parent.test, ast.BoolOp) else not asked
                return asked if node in parent.body else others
        if isinstance(parent, ast.FunctionDef):
            marked = any(_is_main(source, one, _ON_MAIN) for one in parent.decorator_list)
            return True if marked else None
        node = parent
    return None


def _asks_for_main(source: Source, test: ast.expr) -> bool | None:
    """Whether a condition holds on the main process alone (True), or the others; None: neither."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner) if not isinstance(inner, ast.BoolOp):
            asked = _asks_for_main(source, inner)
            return None if asked is None else not asked
        case ast.BoolOp(op=ast.And()):
            parts = [_asks_for_main(source, part) for part in test.values]
            return next((one for one in parts if one is not None), None)
        case ast.Compare(
            left=rank, ops=[ast.Eq() | ast.NotEq() as equal], comparators=[ast.Constant(value=0)]
        ) if source.makers(rank) == {"torch.distributed.get_rank"}:
            return isinstance(equal, ast.Eq)
        case ast.Call(func=ast.Attribute(attr="is_world_process_zero", value=owner)):
            classes = [source.library_class(one) for one in source.makers(owner)]
            return True if all(is_trainer_class(one) for one in classes) else None
        case _:
            return True if _is_main(source, test, _MAIN) else None


def _is_main(source: Source, node: ast.expr, names: tuple[str, ...]) -> bool:
    """Whether a node is such an attribute of an accelerator or its state."""
    if not isinstance(node, ast.Attribute) or node.attr not in names:
        return False
    return source.makers(node.value) <= named("states")


def _answered(source: Source, call: ast.Call, name: str, main: bool) -> bool:
    """Whether the other ranks make the same call, in a branch of their own."""
    scope = source.scope_of(call)
    same = [one for one in source.calls if source.called(one) == name]
    return any(source.scope_of(one) is scope and _side(source, one) is not main for one in same)


def _states_of_shards(source: Source) -> Iterator[Finding]:
    """`state_dict()` of a prepared model that is saved."""
    for call in source.calls:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "state_dict":
            continue
        parent = source.parents[call]
        saver = source.parents[parent] if isinstance(parent, ast.keyword) else parent
        if not isinstance(saver, ast.Call) or "save" not in ast.unparse(saver.func):
            continue
        if _is_wrapped(source, function.value) and not is_told(source, call):
            yield source.finding("state-of-shards.saved", call, call=ast.unparse(call))


def _is_wrapped(source: Source, model: ast.expr) -> bool:
    """Whether a value certainly is a prepared model, or was one before it was unwrapped."""
    for one in source.makings(model):
        if one.call is None:
            return False
        if one.by == f"{ACCELERATOR}.unwrap_model" and one.call.args:
            if source.makers(one.call.args[0]) != {PREPARE}:
                return False
        elif one.by != DEEPSPEED or one.index:
            given = ast.unparse(one.call.args[one.index or 0]).lower() if one.call.args else ""
            if one.by != PREPARE or any(part in given for part in ("optim", "sched", "load")):
                return False
    return True


def _shuffled_apart(source: Source) -> Iterator[Finding]:
    """Rows that each rank puts into an order of its own, and of which each takes every N-th."""
    shuffles = [one for rows in _shared_rows(source) for one in _shuffles(source, rows) or ()]
    for call in dict.fromkeys(shuffles):
        words = {name: ast.unparse(value) for name, value in keywords_of(call).items()}
        method = ast.unparse(call.func).rpartition(".")[2]
        by_place = method == "shuffle" and call.args
        told = by_place or None in words or "generator" in words or words.get("shuffle") == "False"
        if told or words.get("seed", "None") != "None":
            continue
        seeds = [one for one in source.calls if _seeds(source, one, call)]
        if not seeds:
            yield source.finding("shuffled-apart.never", call, method=method)
        elif all(_is_conditional(source, one) for one in seeds):
            line = seeds[0].lineno
            yield source.finding("shuffled-apart.sometimes", call, method=method, line=line)


def _shared_rows(source: Source) -> Iterator[ast.expr]:
    """Give the rows that a trainer, or a loader beside `prepare`, shares out among the ranks."""
    prepares = any(source.called(one) == PREPARE for one in source.calls)
    for call in source.calls:
        if is_trainer_class(source.library_class(source.called(call) or "")):
            given = keywords_of(call)
            yield from (given[name] for name in ("train_dataset", "eval_dataset") if name in given)
        elif prepares and source.dotted(call.func) in named("loaders"):
            yield from call.args[:1]


def _shuffles(source: Source, rows: ast.expr, steps: int = 12) -> list[ast.Call] | None:
    """Return the shuffles that rows of datasets went through; None for other rows, and a stream.

    A stream is read by one rank and sent to the others.
    """
    match rows:
        case ast.Subscript(value=inner):
            return _shuffles(source, inner, steps)
        case ast.Call(func=function):
            name = source.dotted(function)
            if name is None and isinstance(function, ast.Attribute):
                before = _shuffles(source, function.value, steps)
                own = [rows] if function.attr in ("shuffle", "train_test_split") else []
                return None if before is None else before + own
            streamed = {"streaming", None} & keywords_of(rows).keys()
            known = name in named("datasets") and not streamed
            return [] if known else None
        case ast.Name() if steps:
            found: list[ast.Call] = []
            for one in source.bindings(rows):
                before = None if one.value is None else _shuffles(source, one.value, steps - 1)
                if before is None:
                    return None
                found += before
            return found
        case _:
            return None


def _seeds(source: Source, seed: ast.Call, before: ast.Call) -> bool:
    """Whether a call seeds numpy, which datasets shuffles with, alike on all ranks."""
    if source.dotted(seed.func) not in named("seeds") or "device_specific" in keywords_of(seed):
        return False
    return source.scope_of(seed) is not source.scope_of(before) or seed.lineno < before.lineno


def _is_conditional(source: Source, call: ast.Call) -> bool:
    tests = [one.test for one in source.parents_of(call) if isinstance(one, ast.If)]
    return any("__name__" not in ast.unparse(test) for test in tests)


def _rows_of_samplers(source: Source) -> Iterator[Finding]:
    """A DistributedSampler that is sharded once more, or whose order never changes."""
    told = any(ast.unparse(one.func).endswith(".set_epoch") for one in source.calls)
    for loader in source.calls:
        given = keywords_of(loader).get("sampler")
        if source.dotted(loader.func) not in named("loaders") or given is None:
            continue
        makings = source.makings(given)
        sampler = next((one.call for one in makings if one.by in named("samplers")), None)
        if sampler is None:
            continue
        prepared = [one for one in _uses(source, loader) if source.called(one[0]) == PREPARE]
        if prepared and {one.by for one in makings} <= named("samplers"):
            yield source.finding("sharded-twice.loader", prepared[0][1])
        fixed = any(ast.unparse(one) == "shuffle=False" for one in sampler.keywords)
        loops = [one for one in source.nodes if isinstance(one, ast.For)]
        again = any(_reads_again(source, loop, loader) for loop in loops)
        if again and not (prepared or fixed or told):
            yield source.finding("epoch-not-set.loop", sampler)


def _uses(source: Source, loader: ast.Call) -> Iterator[tuple[ast.Call, ast.Name]]:
    """Give the calls that a loader is an argument of, by its name."""
    for call in source.calls:
        for argument in call.args:
            named = isinstance(argument, ast.Name)
            if named and [one.call for one in source.makings(argument)] == [loader]:
                yield call, argument


def _reads_again(source: Source, loop: ast.For, loader: ast.Call) -> bool:
    """Whether a loop reads a loader, inside of another loop."""
    rows = loop.iter
    while isinstance(rows, ast.Call) and rows.args:  # enumerate, tqdm
        rows = rows.args[0]
    nested = any(isinstance(one, ast.For | ast.While) for one in source.parents_of(loop))
    return nested and loader in [one.call for one in source.makings(rows)]


RULES: Final = (_on_one_rank, _states_of_shards, _shuffled_apart, _rows_of_samplers)
