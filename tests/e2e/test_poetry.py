"""`poetry install && poetry run grid status`, as the README promises it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.clones import base_python, clone_to, missing, stranger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a fresh clone, as somebody with an empty home."""
    folder = clone_to(tmp_path / "clone")  # Poetry itself stumbles over a space in a path
    environment = stranger(tmp_path / "home") | {"POETRY_VIRTUALENVS_IN_PROJECT": "true", "NO_COLOR": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    return run


@pytest.fixture
def poetry(tmp_path: Path, run: Run) -> str:
    """Poetry 2 or newer, in an environment of its own."""
    tools = tmp_path / "tools"
    made = run(base_python(), "-m", "venv", str(tools))
    assert made.returncode == 0, made.stderr
    installed = run(str(tools / "bin" / "pip"), "install", "--quiet", "--no-compile", "poetry>=2")
    if installed.returncode != 0:
        missing(f"poetry cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return str(tools / "bin" / "poetry")


def test_poetry_installs_the_project_and_runs_it(poetry: str, run: Run, tmp_path: Path) -> None:
    installed = run(poetry, "install", "--no-interaction")
    if installed.returncode != 0 and "Expecting value" in installed.stdout + installed.stderr:
        # The package index of this machine speaks HTML only, and Poetry's built-in source insists on JSON.
        ask = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        address = run(str(Path(poetry).with_name("python")), "-c", ask).stdout.strip()
        added = run(poetry, "source", "add", "--priority=primary", "machine", address)
        assert added.returncode == 0, added.stderr
        installed = run(poetry, "install", "--no-interaction")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    try:
        status = run(poetry, "run", "grid", "status")
        assert status.returncode == 0, status.stdout + status.stderr
        assert status.stdout.strip()
    finally:
        stopped = run(poetry, "run", "grid", "daemon", "stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
