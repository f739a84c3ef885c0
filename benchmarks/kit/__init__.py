"""The parts of `gpu_kit.py`: each is a module with a TITLE, `cells`, `measure` and `tables`."""

import sys
from pathlib import Path

# The kit runs from a checkout, on machines where nothing can be installed.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
