"""What only one room may know: `engines` alone looks into what a backend made of a model."""

import ast
from pathlib import Path

import pytest

import toolkit

PACKAGE = Path(toolkit.__file__).parent

ENGINES_ALONE = {
    *("FSDPModule", "FullyShardedDataParallel", "DTensor", "DistributedDataParallel"),
    *("DistributedType", "zero_optimization_stage", "is_fsdp2", "OpBuilder"),
    *("ds_id", "ds_tensor", "ds_numel", "ds_shape", "ds_status", "ds_persist", "_hp_mapping"),
}
"""Names by which one backend is told from another, as imports, variables, attributes or strings."""


def known_of_backends(source: str) -> list[str]:
    """Return the lines of a module that name what `engines` alone may know."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # of `getattr` and `hasattr`; text has more words than one
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        found += [
            f"line {node.lineno}: {name}"
            for name in names
            if name in ENGINES_ALONE or (is_import and name.partition(".")[0] == "deepspeed")
        ]
    return found


def test_engines_alone_know_the_backends():
    engines = PACKAGE / "engines"
    # It runs under any release, with nothing of the toolkit beside it.
    alone = PACKAGE / "verifying" / "stand_alone.py"
    modules = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(engines)]
    modules.remove(alone)
    assert len(modules) > 100
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in modules
        if (lines := known_of_backends(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def comparisons_of_backends(source: str) -> list[int]:
    """Return the lines that compare a strategy's backend or stage, instead of matching it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr in ("backend", "zero_stage")
    ]


def test_a_backend_is_matched_and_not_compared():
    """A `match` that ends in `refuse_backend` has the type checker list what a new one needs."""
    lines = {
        str(path.relative_to(PACKAGE)): compared
        for path in PACKAGE.rglob("*.py")
        if (compared := comparisons_of_backends(path.read_text(encoding="utf-8")))
    }
    lines.pop("strategies.py")  # a stage is compared there, for what is sharded from it on
    assert lines == {}


@pytest.mark.parametrize(
    "source",
    ["strategy.backend == 'ddp'", "'ddp' != s.backend", "job.strategy.zero_stage in (1, 2)"],
)
def test_each_comparison_of_a_backend_is_found(source):
    assert comparisons_of_backends(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import FSDPModule",
        "import deepspeed.zero",
        "from deepspeed.utils import safe_get_full_grad",
        "from torch.distributed import fsdp\nisinstance(model, fsdp.FSDPModule)",
        "hasattr(parameter, 'ds_id')",
        "accelerator.distributed_type == DistributedType.FSDP",
        "model.zero_optimization_stage()",
    ],
)
def test_each_way_to_ask_a_model_for_its_backend_is_found(source):
    assert known_of_backends(source)


def test_a_config_of_deepspeed_and_a_sentence_on_it_may_be_read_anywhere():
    assert not known_of_backends(
        "from toolkit.backends.deepspeed_json import deepspeed_config\nsaid = 'ds_id is of ZeRO-3'"
    )
