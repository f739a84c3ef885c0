"""`python -m toolkit.configs [ROOT]`: make the two checked-in folders of configs anew."""

from __future__ import annotations

import sys
from pathlib import Path

from toolkit.configs.files import write_bundled

if __name__ == "__main__":
    for path in write_bundled(Path(sys.argv[1] if len(sys.argv) > 1 else ".")):
        print(path)  # noqa: T201
