"""Libraries that a Python started by a test is not to find, though they are installed."""

import os

FINDER = """
from importlib.machinery import PathFinder

hidden = {names!r}
find_spec = PathFinder.find_spec


def find_unless_hidden(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_unless_hidden)
"""


def hide(tmp_path, names):
    """Return variables under which Python, and what it starts, finds none of the top modules.

    Neither `import` nor `importlib.util.find_spec` finds them; `importlib.metadata` still does.
    """
    folder = tmp_path / "hiding"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FINDER.format(names=set(names)))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
