"""A real `grid` in a temporary state directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shell import Shell


@pytest.fixture(scope="module")
def shared_grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """One grid for all the tests of a file that leave nothing behind in it."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    yield shell
    shell.close()


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[Shell]:
    """A grid of this machine alone, started by the first command."""
    cwd = tmp_path / "here"
    cwd.mkdir()
    shell = Shell(tmp_path / "state", cwd)
    yield shell
    shell.close()
