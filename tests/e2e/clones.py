"""Copies of the project as a stranger gets them: the files of the repository, and an empty home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.project import PROJECT
from tests.support.shell import Shell


def clone_to(folder: Path) -> Path:
    """Copy what is in the repository, or would be with the next commit, and nothing that is ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (source := PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def stranger(home: Path) -> dict[str, str]:
    """The environment of a new user of this machine, with packages from where everybody here gets them."""
    ours = (
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
        "XDG_",
        "GRID_",
        "POETRY_",
        "COV_",
        "PYTEST_",
        "MAKE",
        "MFLAGS",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = (Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf")
    for file in filter(Path.is_file, settings):
        environment.setdefault("PIP_CONFIG_FILE", str(file))
    home.mkdir(parents=True, exist_ok=True)
    return environment | {"HOME": str(home)}


def version() -> str:
    return str(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])


def base_python() -> str:
    """The Python under the virtual environment these tests run in."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class UsedClone(Shell):
    """A clone as the current directory of somebody who types what a guide says, with the shipped configs as they are.

    The home is empty, and the state directory is the one in it. `poetry run` is the Python that these tests run in.
    """

    def __init__(self, folder: Path) -> None:
        home, tools = folder / "home", folder / "tools"
        home.mkdir()
        tools.mkdir()
        (tools / "poetry").write_text('#!/bin/sh\n[ "$1" = run ] && shift && exec "$@"\n')
        (tools / "poetry").chmod(0o755)
        super().__init__(home / ".distributed_grid", clone_to(folder / "clone"))
        del self.env["GRID_STATE_DIR"]
        self.env |= {"HOME": str(home), "PATH": f"{tools}:{self.env['PATH']}"}

    def type(self, script: str) -> str:
        """Type a block of a guide, whose commands must all succeed; returns what they show."""
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{script}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process be a program that was started in the clone."""
        for name in [name for name in os.environ if name.startswith("GRID_")]:
            monkeypatch.delenv(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.cwd)
