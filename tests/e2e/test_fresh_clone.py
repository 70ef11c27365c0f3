"""`./grid` in a clone that was never used before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.clones import clone_to, stranger, version

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


class Clone:
    """A copy of the project, used by somebody who has nothing yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = clone_to(folder / "a clone" / "of grid")
        self.environment = stranger(folder / "home")
        self.stamp = self.folder / ".venv" / ".ready-runtime"
        self.unfinished = self.folder / ".venv" / ".unfinished"

    def start(self, *arguments: str, command: str = "./grid", cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [command, *arguments],
            cwd=cwd or self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, command: str = "./grid", cwd: Path | None = None) -> tuple[int, str, str]:
        process = self.start(*arguments, command=command, cwd=cwd)
        out, err = process.communicate()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def first_uses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clone, list[tuple[int, str, str]]]:
    """A clone, and what its first two users saw, who came at the same moment."""
    clone = Clone(tmp_path_factory.mktemp("fresh"))
    assert not (clone.folder / ".venv").exists()
    both = [clone.start("--version"), clone.start("--version")]
    spoken = [process.communicate() for process in both]
    return clone, [(process.returncode, *words) for process, words in zip(both, spoken, strict=True)]


@pytest.fixture
def clone(first_uses: tuple[Clone, list[tuple[int, str, str]]]) -> Clone:
    return first_uses[0]


def test_two_first_uses_at_once_both_work_and_one_of_them_does_the_work(first_uses) -> None:
    _, answers = first_uses
    for code, out, err in answers:
        assert code == 0, err
        assert version() in out
        assert "grid:" not in out
        assert len(err.splitlines()) == 1, err
    assert sorted("first use" in err for _, _, err in answers) == [False, True]


def test_a_second_use_installs_nothing_and_says_nothing_about_it(clone: Clone) -> None:
    made = clone.stamp.stat().st_mtime_ns
    code, out, err = clone.run("--version")
    assert (code, err) == (0, "")
    assert version() in out
    assert clone.stamp.stat().st_mtime_ns == made


def test_without_ray_the_start_of_ray_says_what_to_type(clone: Clone) -> None:
    try:
        code, _, err = clone.run("cluster", "start", "--ray")
    finally:
        clone.run("daemon", "stop")
    assert code == 1
    assert err.splitlines()[-1].endswith("has no Ray to speak to it with; type: make ray")


def test_it_works_through_symlinks_and_from_other_folders(clone: Clone, tmp_path: Path) -> None:
    made = clone.stamp.stat().st_mtime_ns
    (tmp_path / "direct").symlink_to(clone.folder / "grid")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "grid").symlink_to("../direct")
    for command in (str(clone.folder / "grid"), "./direct", "bin/grid", str(tmp_path / "bin" / "grid")):
        code, out, err = clone.run("--version", command=command, cwd=tmp_path)
        assert (code, err) == (0, ""), command
        assert version() in out
    assert clone.stamp.stat().st_mtime_ns == made


def test_a_changed_lock_file_refreshes_what_is_there(clone: Clone) -> None:
    made = clone.stamp.stat().st_mtime_ns
    python = (clone.folder / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
    with (clone.folder / "requirements.lock").open("a") as lock:
        lock.write("\n")
    code, out, err = clone.run("--version")
    assert code == 0, err
    assert version() in out
    assert "up to date" in err
    assert clone.stamp.stat().st_mtime_ns > made
    assert (clone.folder / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == python, "it was made anew"


def test_a_killed_first_use_is_repaired_by_the_next(clone: Clone) -> None:
    shutil.rmtree(clone.folder / ".venv")
    killed = clone.start("--version")
    deadline = time.monotonic() + 120
    while not list((clone.folder / ".venv").glob("lib/*/site-packages/starlette*/METADATA")):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert clone.unfinished.exists()
    assert not clone.stamp.exists()

    code, out, err = clone.run("--version")
    assert code == 0, err
    assert version() in out
    assert "cut short" in err
    assert clone.stamp.exists()
    assert not clone.unfinished.exists()


def test_without_a_python_one_line_says_so(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cksum", "readlink", "sh"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    clone.environment["PATH"] = str(tools)
    code, out, err = clone.run("--version")
    assert (code, out) == (1, "")
    assert err.splitlines() == ["grid: needs Python 3.11 or newer, and found none on the PATH (set PYTHON to name one)"]
