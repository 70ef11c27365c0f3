"""Installing as docs/guide/install.md tells: with uv, with pipx, from a wheel, and with Poetry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.clones import base_python, clone_to, stranger, version

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
UV = str(Path(sys.executable).with_name("uv"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a fresh clone, as somebody with an empty home; a failure shows what it said."""
    folder = clone_to(tmp_path / "clone")  # Poetry itself stumbles over a space in a path
    settings = {"POETRY_VIRTUALENVS_IN_PROJECT": "true", "NO_COLOR": "1"}
    settings |= {"PIP_COMPILE": "0", "PYTHONDONTWRITEBYTECODE": ""}  # what is used is compiled, and once
    environment = stranger(tmp_path / "home") | settings
    caches = {"UV_CACHE_DIR": ".cache/uv", "PIP_CACHE_DIR": ".cache/pip", "POETRY_CACHE_DIR": ".cache/pypoetry"}
    environment |= {name: os.environ.get(name, str(Path.home() / folder)) for name, folder in caches.items()}

    def run(*command: str, check: bool = True, cwd: Path = folder) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def tool(run: Run, folder: Path, package: str) -> str:
    """A command from a package of the same name, in an environment of its own."""
    run(UV, "venv", "--quiet", "--python", base_python(), str(folder))
    installed = run(UV, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), package, check=False)
    if installed.returncode != 0:
        pytest.skip(f"{package} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin" / package)


def works(run: Run, grid: str, elsewhere: Path) -> None:
    """The command serves outside any clone, and leaves nothing running."""
    elsewhere.mkdir()
    assert version() in run(grid, "--version", cwd=elsewhere).stdout
    try:
        assert "alive" in run(grid, "status", cwd=elsewhere).stdout
        assert run(grid, "run-shared", "echo", "hello", cwd=elsewhere).stdout == "hello\n"
    finally:
        run(grid, "daemon", "stop", cwd=elsewhere)


def test_uv_installs_it_as_a_tool(run: Run, tmp_path: Path) -> None:
    run(UV, "tool", "install", "--quiet", "--python", base_python(), ".")
    works(run, str(tmp_path / "home/.local/bin/grid"), tmp_path / "elsewhere")


def test_pipx_installs_it_as_a_tool(run: Run, tmp_path: Path) -> None:
    run(tool(run, tmp_path / "tools", "pipx"), "install", "--python", base_python(), ".")
    works(run, str(tmp_path / "home/.local/bin/grid"), tmp_path / "elsewhere")


def test_a_wheel_works_in_a_virtual_environment_outside_any_clone(run: Run, tmp_path: Path) -> None:
    run(UV, "build", "--quiet", "--wheel", "--python", base_python(), "--out-dir", str(tmp_path / "dist"))
    (wheel,) = (tmp_path / "dist").glob("distributed_grid-*.whl")
    run(base_python(), "-m", "venv", str(tmp_path / "env"))
    run(str(tmp_path / "env/bin/pip"), "install", "--quiet", str(wheel))
    works(run, str(tmp_path / "env/bin/grid"), tmp_path / "elsewhere")


def test_poetry_installs_the_project_and_runs_it(run: Run, tmp_path: Path) -> None:
    poetry = tool(run, tmp_path / "tools", "poetry")
    installed = run(poetry, "install", "--only", "main", "--no-interaction", check=False)
    said = installed.stdout + installed.stderr
    if installed.returncode != 0 and ("Expecting value" in said or ") not found." in said):
        # The package index of this machine has HTML only, and Poetry's built-in source insists on JSON.
        ask = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        address = run(base_python(), "-c", ask).stdout.strip()
        run(poetry, "source", "add", "--priority=primary", "machine", address)
        installed = run(poetry, "install", "--only", "main", "--no-interaction", check=False)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    try:
        assert run(poetry, "run", "grid", "status").stdout.strip()
    finally:
        run(poetry, "run", "grid", "daemon", "stop")
