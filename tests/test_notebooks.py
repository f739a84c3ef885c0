"""Notebooks: calls and no functions, committed without outputs, and they run."""

import ast
import json
import os
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from toolkit.launching.forking import SOCKET, warm_process

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


SHOWN = {
    "01_first_run": (
        "deepspeed_config_file: deepspeed_configs/zero2.json",
        "<td style='text-align:left'>DeepSpeedEngine</td>",
        "after: 'Return the platform_tag of the system Python was built on.'",
    ),
    "02_choose_a_strategy": (
        "zero2    70 GB on each of two GPUs\nzero3    56 GB on each of two GPUs",
        "zero2       24.86    24.86     4.97",
        "zero3  60,969,216 60,969,216",
        "Memory by category, predicted beside measured",
        "Qwen/Qwen2.5-1.5B on L4: ",
        "zero3   140.0 GB",
    ),
    "03_compare_backends": (
        "**All 8 runs trained the same model",
        "held: loss, grad_norm, weights, data",
        "tensor-loop        right to the byte",
        "counted 0.2, by the formula 0.2",
        "The bubble of a pipeline",
    ),
    "04_your_own_loop": (
        "attested zero3: distributed_type DEEPSPEED",
        "attested fsdp: distributed_type FSDP",
        "fsdp_hybrid    ok",
        "attested ddp: distributed_type MULTI_GPU, num_processes 2",
    ),
    "05_own_trainer": (
        "'perplexity': ",
        "270,336 of 2,606,784",
        "qlora",
        "## How to load it",
    ),
    "06_when_it_breaks": (
        "The loss of step 2 is not finite",
        "Did you mean 'zero3'?",
        "unused-parameters: ",
        "rank 1 is missing: it has not entered all_reduce",
        "sound: False",
        "ddp {'loss': False",
        "The first difference: ",
    ),
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    for cell in code_of(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_it_holds_calls_and_no_functions(notebook):
    for cell in code_of(notebook):
        if cell.source.startswith("%%writefile"):
            continue  # a script of the user's, which runs in processes of its own
        lines = cell.source.splitlines()
        python = [line for line in lines if not line.startswith("!") and " = !" not in line]
        kinds = [type(node) for node in ast.walk(ast.parse("\n".join(python)))]
        assert not {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda} & set(kinds)
        assert len(lines) <= 10, "more than ten lines belong into the package"


def test_the_kernel_never_loads_what_touches_cuda(notebook):
    cells = [c.source for c in code_of(notebook) if not c.source.startswith("%%writefile")]
    # Accelerate's launcher forks from this kernel before anything touches CUDA.
    source = "\n".join(cells).replace("from accelerate import notebook_launcher", "")
    for package in ("torch", "transformers", "accelerate", "deepspeed"):
        assert f"import {package}" not in source
        assert f"from {package}" not in source


SHORT = ("05_own_trainer",)
"""The one of the short tier: the cheapest that trains."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.short] * (path.stem in SHORT)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_it_runs_from_top_to_bottom(path, tmp_path, kernel_environment):
    ran = run(path, tmp_path, kernel_environment)
    text = "\n".join(texts_of(ran))
    for part in SHOWN[path.stem]:
        assert part in text, text
    assert "\x1b" not in text
    assert "CUDAs" not in text
    if path.stem == "01_first_run":
        (launching,) = [cell for cell in code_of(ran) if "toolkit.launch(" in cell.source]
        one_output_for_the_lines_and_one_for_the_answer(*launching.outputs)


def one_output_for_the_lines_and_one_for_the_answer(lines, answer):
    assert (lines.output_type, answer.output_type) == ("display_data", "execute_result")
    shown = lines.data["text/plain"]
    assert "\ntrained   60 steps" in shown
    assert "\ntry it    toolkit generate runs/zero2" in shown
    assert "DeepSpeedEngine" in answer.data["text/html"]


LAUNCHES_WITH = """
import json
from toolkit.comparing.run.preparing import run_environment
print(json.dumps(run_environment(rehearsal=True)))
"""


@pytest.fixture(scope="module")
def kernel_environment(request, cold_environment, tmp_path_factory):
    """The variables of a user, and where a warm process is that a kernel can launch from.

    Jupyter adds variables of its own, so one cell says with which ones its launches start.
    """
    if request.config.getoption("--cold"):
        yield cold_environment
        return
    asking = new_notebook(cells=[new_code_cell(LAUNCHES_WITH)])
    ran = client_of(asking, tmp_path_factory.mktemp("asking")).execute(env=cold_environment)
    with warm_process(json.loads(ran.cells[0].outputs[0].text)) as socket:
        yield cold_environment | {SOCKET: str(socket)}


def run(path, folder, environment):
    """Run a copy of a notebook in `folder`, which is where its cells write."""
    copy = Path(shutil.copy(path, folder))
    notebook = nbformat.read(copy, as_version=4)
    ran = client_of(notebook, folder).execute(env=environment)
    if executed := os.environ.get("TOOLKIT_EXECUTED_NOTEBOOKS"):  # for the site
        Path(executed).mkdir(parents=True, exist_ok=True)
        nbformat.write(ran, Path(executed) / path.name)
    return ran


def client_of(notebook, folder):
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    )


def texts_of(notebook):
    for cell in code_of(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text
            else:
                yield from (output.data[kind] for kind in output.data if kind.startswith("text/"))
