"""A life of the memory that ended empty goes on with the next server, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_grid.memory.server.server import INCARNATION_FILE, load_incarnation, save_incarnation


def test_a_life_that_was_left_is_taken_once(tmp_path: Path) -> None:
    save_incarnation(tmp_path, "ab12", b"k" * 32)
    save_incarnation(tmp_path, "cd34", b"l" * 32)
    assert (tmp_path / INCARNATION_FILE).stat().st_mode & 0o777 == 0o600
    assert load_incarnation(tmp_path) == ("cd34", b"l" * 32)
    assert load_incarnation(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"incarnation": "a", "key": "zz", "boot": "00"}'])
def test_a_file_that_says_no_life_is_none_and_goes(tmp_path: Path, content: str) -> None:
    (tmp_path / INCARNATION_FILE).write_text(content)
    assert load_incarnation(tmp_path) is None
    assert not (tmp_path / INCARNATION_FILE).exists()


def test_a_life_before_the_machine_was_started_is_over(tmp_path: Path) -> None:
    save_incarnation(tmp_path, "ab12", b"k" * 32)
    path = tmp_path / INCARNATION_FILE
    path.write_text(path.read_text().replace('"boot": "', '"boot": "00')[: -len('"}')][:-2] + '"}')
    assert load_incarnation(tmp_path) is None
