"""State directories that cannot be used say so in one line; unusual ones work."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.crashes.conftest import (
    a_gate,
    daemon_pid,
    kill_nine,
    mount,
    needs_root,
    one_line,
    open_gate,
    places,
    unmount,
)
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def read_only(tmp_path: Path, new_grid: Callable[..., Shell]) -> Iterator[Callable[[Path], None]]:
    """Makes a directory read-only, as only a mount can for root."""
    needs_root("mount a directory read-only")
    mounted: list[Path] = []

    def make(place: Path) -> None:
        mount("--bind", str(place), str(place))
        mounted.append(place)
        mount("-o", "remount,ro,bind", str(place))

    yield make
    for place in mounted:
        unmount(place)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used before"])
def test_a_read_only_state_directory_is_refused_in_one_line(
    new_grid: Callable[..., Shell], read_only: Callable[[Path], None], tmp_path: Path, used: bool
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    grid = new_grid(state)
    if used:
        grid("status", check=0)
        grid("daemon", "stop", check=0)
    read_only(state)
    for words in (("status",), ("daemon", "start")):
        said = one_line(grid(*words))
        assert str(state) in said
        assert "ead-only" in said
    one_line(grid("daemon", "status"), code=3)


def test_a_state_directory_of_another_user_is_refused(new_grid: Callable[..., Shell], tmp_path: Path) -> None:
    needs_root("give a directory to somebody else")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 65534, 65534)
    said = one_line(new_grid(state)("status"))
    assert str(state) in said
    assert "belongs to another user (uid 65534)" in said


def test_a_state_directory_that_is_a_file_is_refused(new_grid: Callable[..., Shell], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert str(tmp_path / "state") in one_line(new_grid(tmp_path / "state")("status"))


def _damage(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[0:16] = b"not a database!!"
    database.write_bytes(content)


def _age(database: Path) -> None:
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA user_version = 999")
        db.commit()


def _empty(database: Path) -> None:
    database.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "message"),
    [(_damage, "is not a database"), (_age, "has schema version 999"), (_empty, "is not a database")],
    ids=["damaged", "newer", "empty"],
)
def test_an_unusable_database_is_told_to_whoever_starts_the_daemon_and_left_alone(
    grid: Shell, harm: Callable[[Path], None], message: str
) -> None:
    grid("status", check=0)
    grid("daemon", "stop", check=0)
    database = places(grid).database
    sound = database.read_bytes()
    harm(database)
    before = {path: path.read_bytes() for path in database.parent.glob("grid.db*")}

    said = one_line(grid("status"))
    assert str(database) in said
    assert message in said
    assert {path: path.read_bytes() for path in database.parent.glob("grid.db*")} == before
    assert daemon_pid(grid) is None

    database.write_bytes(sound)  # a backup put in its place, as the message says
    grid("status", check=0)


@pytest.mark.parametrize(
    "name", ["/".join(["a-very-deep-folder-of-somebody-who-likes-long-names"] * 4), "two words/über 'quoted' $HOME"]
)
def test_a_state_directory_with_a_long_or_odd_path_works(
    new_grid: Callable[..., Shell], tmp_path: Path, name: str
) -> None:
    state = tmp_path / name
    state.parent.mkdir(parents=True)
    grid = new_grid(state)
    gate = a_gate(grid, "gate")
    assert grid("run-shared", "sh", "-c", "cd $GRID_JOB_DIR && pwd; exit 3").returncode == 3
    assert (len(os.fsencode(places(grid).socket)) > 108) or " " in str(state)
    job = grid.detach("sh", "-c", "read x < gate; exit 4")
    wait_until(lambda: grid.job(job)["state"] == "running")
    kill_nine(grid)
    open_gate(gate)
    assert grid("jobs", "wait", job, "--timeout", "10").returncode == 4


def test_the_state_directory_is_readable_by_its_owner_only(grid: Shell) -> None:
    grid.state_dir.mkdir(mode=0o755)
    grid("run-shared", "true", check=0)
    for folder in (grid.state_dir, grid.host_dir, places(grid).jobs):
        assert folder.stat().st_mode & 0o077 == 0, folder
    found = subprocess.run(["find", str(grid.state_dir), "-perm", "/077", "!", "-type", "l"], capture_output=True)
    assert found.stdout == b""
