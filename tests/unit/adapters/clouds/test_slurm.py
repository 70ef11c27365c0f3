"""Private files of pilots: a folder that cannot be made is an error, and never waited for without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.adapters.clouds.slurm import LEFTOVER_SECONDS, Leftovers, PilotFiles
from distributed_grid.errors import GridError


@pytest.mark.parametrize("directory", ["/proc/no-such-place/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_is_named(directory: str) -> None:
    files = PilotFiles(Path(directory), "worker-1", "grid-1")
    with pytest.raises(GridError, match=f"cannot use {directory}/worker-1"), files.locked():
        pass


@pytest.mark.parametrize("days", [-365, -40, 40, 365])
def test_leftovers_are_removed_some_time_after_they_were_seen_whatever_their_times_say(
    tmp_path: Path, days: int
) -> None:
    seconds = 1000.0
    leftovers = Leftovers(tmp_path, lambda: seconds)
    for worker in ("worker-1", "worker-2"):
        with PilotFiles(tmp_path, worker, "grid-1").locked():
            pass
    for folder in tmp_path.iterdir():
        moment = folder.stat().st_mtime - days * 86_400
        os.utime(folder, (moment, moment))
    for _ in range(2):
        leftovers.remove("grid-1", ["worker-2"])
        assert len(list(tmp_path.iterdir())) == 2
        seconds += LEFTOVER_SECONDS
    seconds += 1
    leftovers.remove("grid-1", ["worker-2"])
    assert [folder.name.startswith("worker-2") for folder in tmp_path.iterdir()] == [True]
