"""Copies of the project as a stranger gets them: the files of the repository, and an empty home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.project import PROJECT


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
