"""The home directory is known by every name that leads to it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from distributed_grid.posix.environment import holds_home, home_directories


def test_both_homes_count_and_so_does_every_directory_above_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "ann"
    home.mkdir()
    (home / "work").mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert home_directories() == tuple(dict.fromkeys((str(home), os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir))))
    assert all(holds_home(directory) for directory in (home, tmp_path, "/", pwd.getpwuid(os.getuid()).pw_dir))
    assert not holds_home(home / "work")
    assert not holds_home(tmp_path / "nowhere")


@pytest.mark.parametrize("value", ["", "relative", "/no/such/home"])
def test_an_odd_home_variable_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    monkeypatch.setenv("HOME", value)
    assert not holds_home(tmp_path)
    assert holds_home("/")
