"""The journal of a move: written records are read again, unwritten ones are not, whatever else lies in their place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.offloading.guard_core import GuardRecord
from distributed_grid.agent.offloading.move_journal import (
    MAX_WHY_CHARS,
    MoveJournal,
    OriginalProcess,
    decode_record,
    encode_record,
    read_journal,
)
from distributed_grid.domain.states import MoveState

ORIGINAL = OriginalProcess("move-1", "gpu1", 100, 7, "boot", "/data", 1, 2)
FROZEN = GuardRecord(MoveState.FROZEN, 10, 20, ((100, 7),), ((101, 8),))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_what_was_written_is_read_again(folder: int, tmp_path: Path) -> None:
    MoveJournal.create(folder, ORIGINAL)
    journal = MoveJournal(folder)
    thawed = GuardRecord(MoveState.THAWED, 15, why="as ordered", frozen_ms=5)
    journal.append(FROZEN, durable=False)
    journal.append(thawed, durable=True)
    assert journal.read() == read_journal(tmp_path) == (ORIGINAL, (FROZEN, thawed))
    journal.close()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == ["journal"]


def test_a_journal_is_begun_once(folder: int, tmp_path: Path) -> None:
    MoveJournal.create(folder, ORIGINAL)
    with pytest.raises(FileExistsError):
        MoveJournal.create(folder, ORIGINAL._replace(pid=1))
    assert read_journal(tmp_path)[0] == ORIGINAL
    assert os.listdir(folder) == ["journal"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": 1}', "null", "\0" * 100])
def test_a_journal_that_does_not_say_whose_it_is_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal").write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011 that of json is one, too
        read_journal(tmp_path)


def test_a_link_in_its_place_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "journal").symlink_to("other")
    with pytest.raises(OSError, match="journal"):
        read_journal(tmp_path)


def test_a_reason_that_is_too_long_is_cut() -> None:
    found = decode_record(encode_record(FROZEN._replace(why="x" * 10_000)))
    assert found is not None
    assert len(found.why) == MAX_WHY_CHARS


@given(st.integers(0, len(encode_record(FROZEN)) - 3))
def test_a_line_that_was_cut_short_is_no_record(length: int) -> None:
    assert decode_record(encode_record(FROZEN)[:length]) is None


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_nothing_else_is_a_record(line: bytes) -> None:
    assert decode_record(line) is None
