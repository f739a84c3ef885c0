"""Where things are, for tests that launch them."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = str(ROOT / "benchmarks" / "gpu_kit.py")
SCRIPTS = ROOT / "tests" / "scripts"
HELPERS = Path(__file__).resolve().parent
CHROMIUM = shutil.which("chromium")
