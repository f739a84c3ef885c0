"""Build the site: `python docs/site/build_site.py build/site`.

The pages, the notebooks and the reference are collected in a temporary folder, laid out as in the
repository, so that the links between them hold. A warning of Sphinx or a dead link is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from dead_links import dead_links
from reference import reference_pages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXECUTED = "TOOLKIT_EXECUTED_NOTEBOOKS"
COPIED = ("docs", "benchmarks/results", "examples")
SINGLE = ("CONTRIBUTING.md", "LICENSE")
GROUPS = {
    "First steps": ("training", "data", "evaluation", "strategies", "notebooks"),
    "Before you rent": (
        "planning",
        "rehearsal",
        "check",
        "certify",
        "verify",
        "releases",
        "configs",
        "renting",
    ),
    "Compare": ("comparing", "reports", "glossary"),
    "Train well": ("checkpoints", "guards", "adapters", "speed"),
    "When it breaks": ("doctor", "complaints", "exit-codes", "limits"),
    "Build on it": ("files", "changes", "extending", "SKILL"),
}
"""The pages of `docs/`, in the order in which one learns."""

NO_OUTPUTS = "This notebook was not run for this build of the site, so its outputs are missing."


def main() -> int:
    """Build, and return 1 for a warning or a dead link."""
    parser = argparse.ArgumentParser(description="Build the site of the docs.")
    parser.add_argument("output", type=Path, help="folder for the HTML")
    parser.add_argument(
        "--notebooks",
        type=Path,
        default=os.environ.get(EXECUTED) or None,
        help="folder with an executed copy of every notebook: tests/test_notebooks.py writes them "
        f"into the folder that {EXECUTED} names, which is the default here too; without it, the "
        "site has no outputs",
    )
    arguments = parser.parse_args()
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as temporary:
        source, html = Path(temporary) / "source", Path(temporary) / "html"
        without = write_source(source, executed=arguments.notebooks)
        if without and arguments.notebooks:
            print(f"{arguments.notebooks} holds no copy of {', '.join(without)}", file=sys.stderr)
            return 1
        flags = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(HERE)]
        if build_main([*flags, "--doctree-dir", f"{temporary}/trees", str(source), str(html)]):
            return 1
        dead = list(dead_links(html))
        for line in dead:
            print(f"dead link: {line}", file=sys.stderr)
        if dead:
            return 1
        shutil.copytree(html, arguments.output, dirs_exist_ok=True)
    if without:
        print(f"built without outputs: {', '.join(without)}. See --help.")
    return 0


def write_source(folder: Path, *, executed: Path | None = None) -> list[str]:
    """Collect the pages of the site in `folder`; return the notebooks without outputs."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("site"))
    for name in SINGLE:
        shutil.copy(ROOT / name, folder)
    for page in folder.rglob("*.md"):
        page.write_text(page.read_text("utf-8").replace("../README.md", "../index.md"), "utf-8")
    (folder / "reference").mkdir()
    for name, text in reference_pages().items():
        (folder / "reference" / f"{name}.md").write_text(text, "utf-8")
    (folder / "notebooks").mkdir()
    without = [
        path.name
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        if not _copy_notebook(path, folder / "notebooks" / path.name, executed)
    ]
    (folder / "index.md").write_text(index_page(folder), "utf-8")
    return without


def index_page(folder: Path) -> str:
    """Return the README, followed by lists of all pages for the sidebar."""
    readme = (ROOT / "README.md").read_text("utf-8")
    first, *others = ((name, [f"docs/{page}" for page in pages]) for name, pages in GROUPS.items())
    lists = {
        first[0]: first[1],
        "Notebooks": _names(folder, "notebooks", "*.ipynb"),
        "Examples": _names(folder, "examples", "*.md"),
        **dict(others),
        "Reference": [f"reference/{name}" for name in reference_pages()],
        "Contributing": ["CONTRIBUTING"],
        "Measurements": _names(folder, "benchmarks/results", "*.md"),
    }
    trees = (
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```"
        for caption, names in lists.items()
    )
    return "\n\n".join([readme, *trees]) + "\n"


def _names(folder: Path, room: str, pattern: str) -> list[str]:
    return [f"{room}/{path.stem}" for path in sorted((folder / room).glob(pattern))]


def _copy_notebook(path: Path, to: Path, executed: Path | None) -> bool:
    """Copy the executed notebook, or else the one without outputs, with a note that says so."""
    copy = None if executed is None else executed / path.name
    if copy is not None and copy.is_file():
        shutil.copy(copy, to)
        return True
    content = json.loads(path.read_text("utf-8"))
    note = {
        "cell_type": "markdown",
        "id": "no-outputs",
        "metadata": {},
        "source": f"> {NO_OUTPUTS}",
    }
    content["cells"].insert(1, note)
    content["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    to.write_text(json.dumps(content), "utf-8")
    return False


if __name__ == "__main__":
    sys.exit(main())
