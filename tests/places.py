"""Where things are, for tests that launch them."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KIT = str(ROOT / "benchmarks" / "gpu_kit.py")
SCRIPTS = Path(__file__).resolve().parent / "scripts"
CHROMIUM = shutil.which("chromium")
