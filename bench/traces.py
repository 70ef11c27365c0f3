"""Files of the public workload traces."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

TRACES = Path(os.environ.get("GRID_TRACES") or Path(__file__).parents[2] / "shared" / "data")


def lines_of(file: Path) -> list[str]:
    """The lines of a compressed text."""
    with gzip.open(file, "rt") as text:
        return list(text)
