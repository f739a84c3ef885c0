"""Rules on the training loops of scripts: gradients, optimizers, what is wrapped, labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from toolkit.configs.check.finding import Finding, named
from toolkit.configs.check.source import ACCELERATOR, DEEPSPEED, PREPARE, Source, keywords_of

_ACCUMULATION: Final = re.compile(r"grad\w*_accum\w*|accum\w*_steps|accum\w*_iter\w*")
_SETS_ACCUMULATION: Final = {"gradient_accumulation_steps", "gradient_accumulation_plugin"}
_CAUSAL: Final = re.compile(r"transformers\.\w*(?:ForCausalLM|LMHeadModel)(?:\.from_\w+)?")
_OWN_LOSS: Final = ("cross_entropy", "CrossEntropyLoss", "NLLLoss", "nll_loss")
_TOLD: Final = re.compile(
    r"(?i)distributed_type|deepspeed|fsdp|zero_?3|zero_stage|num_processes|parallel|module"
)


def is_told(source: Source, node: ast.AST) -> bool:
    """Whether a node stands under a condition on the backend, or on what wraps the model.

    The script looks at how it runs, and may do the right thing.
    """
    tests = [one.test for one in source.parents_of(node) if isinstance(one, ast.If | ast.IfExp)]
    return any(_TOLD.search(ast.unparse(test)) for test in tests)


def _divided_twice(source: Source) -> Iterator[Finding]:
    """A loss divided by the accumulation before a `backward` that divides it."""
    for call in source.calls_to(f"{ACCELERATOR}.backward", f"{DEEPSPEED}.backward"):
        division = _division(source, call)
        if division is None or is_told(source, division):
            continue
        if source.called(call) == f"{ACCELERATOR}.backward":
            if (case := _by_accelerator(source, call)) is not None:
                yield source.finding(case, division)
        elif "scale_wrt_gas" not in keywords_of(call):
            yield source.finding("loss-divided-twice.engine", division)


def _by_accelerator(source: Source, call: ast.Call) -> str | None:
    """Return what a divided loss means, by what made the accelerator; None: it is not known."""
    assert isinstance(call.func, ast.Attribute)
    makings = source.makings(call.func.value)
    words = [keywords_of(made.call).keys() for made in makings if made.call is not None]
    if not words or any(None in one for one in words):
        return None
    if all(_SETS_ACCUMULATION & one for one in words):
        return "loss-divided-twice.accelerator"
    if [*source.calls_to(f"{ACCELERATOR}.accumulate")]:
        return "loss-divided-twice.config"
    return None if any(_SETS_ACCUMULATION & one for one in words) else "accumulation-by-hand.steps"


def _division(source: Source, backward: ast.Call) -> ast.AST | None:
    """Return where the loss of a `backward` is divided by the accumulation, in the same loop."""
    loss = backward.args[0] if backward.args else None
    if isinstance(loss, ast.BinOp):
        return loss if _divides(loss.op, loss.right) else None
    loops = (one for one in source.parents_of(backward) if isinstance(one, ast.For | ast.While))
    loop, found = next(loops, None), None
    for node in ast.walk(loop) if loop is not None and isinstance(loss, ast.Name) else ():
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=operator, value=value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=operator, right=value)):
                pass
            case _:
                continue
        if isinstance(loss, ast.Name) and name == loss.id and node.lineno < backward.lineno:
            if isinstance(operator, ast.Mult):
                return None
            found = node if _divides(operator, value) else found
    return found


def _divides(operator: ast.operator, divisor: ast.expr) -> bool:
    return isinstance(operator, ast.Div) and bool(_ACCUMULATION.search(ast.unparse(divisor)))


def _optimizers(source: Source) -> Iterator[tuple[ast.Call, ast.Name]]:
    """Give the optimizers that are made of all parameters of one name, and that name."""
    for call in source.calls:
        if (source.called(call) or "").startswith(("torch.optim.", "bitsandbytes.optim.")):
            given = call.args[0] if call.args else keywords_of(call).get("params")
            if (model := _parameters_of(given)) is not None:
                yield call, model


def _parameters_of(node: ast.expr | None) -> ast.Name | None:
    """Return the name in `name.parameters()`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() as model, attr="parameters")):
            return model
        case _:
            return None


def _before_adapters(source: Source) -> Iterator[Finding]:
    """An optimizer made of the weights that adapters then freeze."""
    made = list(_optimizers(source))
    for call in source.calls_to("peft.get_peft_model"):
        for optimizer, model in made:
            again = [one.lineno for one, other in made if other.id == model.id]
            here = source.scope_of(call) is source.scope_of(optimizer)
            if (
                [ast.unparse(one) for one in call.args[:1]] == [model.id]
                and here
                and max(again) < call.lineno
            ):
                yield source.finding(
                    "optimizer-before-adapters.frozen", optimizer, model=model.id, line=call.lineno
                )


def _prepared_apart(source: Source) -> Iterator[Finding]:
    """A trained model that is prepared without its optimizer."""
    trained = {(model.id, source.scope_of(model)) for _, model in _optimizers(source)}
    for call in source.calls_to(PREPARE):
        names = [one for one in call.args if isinstance(one, ast.Name)]
        models = [one.id for one in names if (one.id, source.scope_of(one)) in trained]
        together = len(names) < len(call.args) or any("optim" in one.id.lower() for one in names)
        if models and not (together or is_told(source, call)):
            yield source.finding("prepared-apart.model", call, model=models[0])


def _clipped_by_torch(source: Source) -> Iterator[Finding]:
    """Gradients of a wrapped model that torch clips."""
    for call in source.calls:
        if source.dotted(call.func) not in named("clips") or not call.args or is_told(source, call):
            continue
        model = _parameters_of(call.args[0])
        makers = {"?"} if model is None else source.makers(model)
        if makers == {PREPARE}:
            given = ast.unparse(call.args[0])
            yield source.finding("clipped-by-torch.wrapped", call, parameters=given)
        elif makers == {DEEPSPEED}:
            yield source.finding("clipped-by-torch.engine", call)


def _modules_of_wrappers(source: Source) -> Iterator[Finding]:
    """`.module` of a model that may have no wrapper."""
    for node in source.nodes:
        match node:
            case ast.Attribute(attr="module", value=ast.Name() as model):
                if source.makers(model) == {PREPARE} and not is_told(source, node):
                    yield source.finding("module-of-wrapper.attribute", node, model=model.id)
            case _:
                pass


def _shifted_twice(source: Source) -> Iterator[Finding]:
    """Labels that are shifted for a model that shifts them itself."""
    if any((source.dotted(one.func) or "").endswith(_OWN_LOSS) for one in source.calls):
        return
    if not any(_gives_labels(source, call) for call in source.calls):
        return
    for node in source.nodes:
        slices = dict(_slices(node))
        if slices.get("labels") != ":1:":
            continue
        # The inputs stand beside the labels, or in an assignment of their own.
        around = ast.walk(source.scope_of(node)) if isinstance(node, ast.Assign) else [node]
        if any(("input_ids", "::-1") in _slices(one) for one in around):
            yield source.finding("labels-shifted-twice.slices", node)


def _gives_labels(source: Source, call: ast.Call) -> bool:
    """Whether a call is that of a causal model of transformers, with labels or a whole batch."""
    words = keywords_of(call).keys()
    if not isinstance(call.func, ast.Name) or "shift_labels" in words:
        return False
    of_causal = all(_CAUSAL.fullmatch(one.by) for one in source.origins(call.func))
    return of_causal and bool({"labels", None} & words)


def _slices(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Give keys of a row and the slice of `input_ids`, on its last axis, that each gets."""
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    match node:
        case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
            pairs = [(key, value)]
        case ast.Dict(keys=keys, values=values):
            pairs = list(zip(keys, values, strict=True))
        case ast.Call(keywords=words):
            pairs = [(ast.Constant(one.arg), one.value) for one in words]
        case _:
            pass
    for key, value in pairs:
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            value = value.func.value  # .clone(), .contiguous()
        if isinstance(key, ast.Constant) and isinstance(value, ast.Subscript):
            axes = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
            match axes[-1]:
                case ast.Slice(lower=lower, upper=upper) if "input_ids" in ast.unparse(value.value):
                    ends = (ast.unparse(one) if one else "" for one in (lower, upper))
                    yield str(key.value), ":" + ":".join(ends)
                case _:
                    pass


RULES: Final = (
    _divided_twice,
    _before_adapters,
    _prepared_apart,
    _clipped_by_torch,
    _modules_of_wrappers,
    _shifted_twice,
)
