"""Notebooks: calls and no functions, committed without outputs, and they run."""

import ast
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    for cell in code_of(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_it_holds_calls_and_no_functions(notebook):
    for cell in code_of(notebook):
        lines = cell.source.splitlines()
        python = [line for line in lines if not line.startswith("!") and " = !" not in line]
        kinds = [type(node) for node in ast.walk(ast.parse("\n".join(python)))]
        assert not {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda} & set(kinds)
        assert len(lines) <= 10, "more than ten lines belong into the package"


def test_the_kernel_never_loads_what_touches_cuda(notebook):
    source = "\n".join(cell.source for cell in code_of(notebook))
    for package in ("torch", "transformers", "accelerate", "deepspeed", "notebook_launcher"):
        assert f"import {package}" not in source
        assert f"from {package}" not in source


def test_the_first_run_ends_with_a_table_of_two_good_strategies(tmp_path):
    ran = run(FOLDER / "01_first_run.ipynb", tmp_path)
    text = "\n".join(texts_of(ran))
    assert "deepspeed_config_file: deepspeed_configs/zero2.json" in text
    assert "'wrapper': 'DeepSpeedEngine'" in text

    (report,) = [text for text in texts_of(ran) if text.startswith("# Comparison")]
    rows = [line.split(" | ") for line in report.splitlines() if " | ok | " in line]
    assert [row[0].strip("| ") for row in rows] == ["single", "ddp", "zero2"]
    assert (tmp_path / "runs" / "zero2" / "final" / "model.safetensors").is_file()
    assert ran.cells[-1].outputs[0].output_type == "execute_result"


def run(path, folder):
    """Run a copy of a notebook in `folder`, which is where its cells write."""
    copy = Path(shutil.copy(path, folder))
    notebook = nbformat.read(copy, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def texts_of(notebook):
    for cell in code_of(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text
            else:
                yield from (output.data[kind] for kind in output.data if kind.startswith("text/"))
