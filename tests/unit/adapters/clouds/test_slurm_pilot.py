"""Private files of pilots: a folder that cannot be made is an error, and never waited for without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_grid.adapters.clouds.slurm_pilot import PilotFiles
from distributed_grid.errors import GridError


@pytest.mark.parametrize("directory", ["/proc/no-such-place/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_named(directory: str) -> None:
    files = PilotFiles(Path(directory), "worker-1", "grid-1")
    with pytest.raises(GridError, match=f"cannot use {directory}/worker-1"), files.locked():
        pass
