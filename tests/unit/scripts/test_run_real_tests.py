"""`scripts/run_real_tests.py`: what fails beside others gets one more try, and only one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "run_real_tests.py"
SECOND_TIME = """
import pathlib

def test_passes_the_second_time():
    before = pathlib.Path("before")
    was_there = before.exists()
    before.touch()
    assert was_there
"""
SHARED_HISTORY = """
import pathlib

history = []

def test_comes_first():
    history.append("x")
    assert not pathlib.Path("before").exists()

def test_needs_the_first_one():
    before = pathlib.Path("before")
    was_there = before.exists()
    before.touch()
    assert was_there and history
"""
NEVER = """
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_never(number):
    open("runs", "a").write("x")
    assert False
"""


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    words = [sys.executable, str(SCRIPT), "-q", "test_it.py"]
    plain = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # these tests need none, and loading them takes seconds
    return subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True, check=False)


def test_what_passes_alone_is_listed_and_passes(tmp_path: Path) -> None:
    done = run(tmp_path, SECOND_TIME)
    assert done.returncode == 0, done.stdout
    assert "passed only when run alone:\n  test_it.py::test_passes_the_second_time\n" in done.stdout


def test_the_file_is_run_again_and_what_had_passed_may_fail(tmp_path: Path) -> None:
    done = run(tmp_path, SHARED_HISTORY)
    assert done.returncode == 0, done.stdout
    assert "passed only when run alone:\n  test_it.py::test_needs_the_first_one\n" in done.stdout


@pytest.mark.parametrize(("count", "runs"), [(12, 24), (13, 13)])
def test_what_fails_twice_has_failed_and_many_get_no_second_try(tmp_path: Path, count: int, runs: int) -> None:
    assert run(tmp_path, NEVER.format(count=count)).returncode == 1
    assert len((tmp_path / "runs").read_text()) == runs


def test_a_run_that_is_broken_is_not_repeated(tmp_path: Path) -> None:
    assert run(tmp_path, "import nothing_like_this").returncode == 2
