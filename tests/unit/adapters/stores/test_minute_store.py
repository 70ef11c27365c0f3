"""Minutes in a file of their own: bounded, replaced when written again, and never worth an error."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.adapters.stores.minute_store import MinuteStore

MINUTE_MS = 60_000


def a_store(path: Path) -> MinuteStore:
    return MinuteStore(path, row_bytes=4)


def test_what_was_written_is_there_after_a_restart_without_what_is_too_old(tmp_path: Path) -> None:
    store = a_store(tmp_path / "history.db")
    assert store.load(0, 10 * MINUTE_MS) == []
    assert store.write([(n * MINUTE_MS, "gpu1", b"%04d" % n) for n in range(5)], before_ms=0)
    assert store.write([(4 * MINUTE_MS, "gpu1", b"new!"), (4 * MINUTE_MS, "gpu2", b"0004")], before_ms=2 * MINUTE_MS)
    store.close()
    store.close()
    again = a_store(tmp_path / "history.db")
    assert again.load(0, 10 * MINUTE_MS) == [("gpu1", b"0002"), ("gpu1", b"0003"), ("gpu1", b"new!"), ("gpu2", b"0004")]
    assert again.load(3 * MINUTE_MS, 3 * MINUTE_MS) == [("gpu1", b"0003")]
    again.close()
    assert (tmp_path / "history.db").stat().st_mode & 0o777 == 0o600


def overwrite(path: Path) -> None:
    path.write_bytes(b"this is no database, and never was one" * 100)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"\xff" * 3000)


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()


def odd_row(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO minutes VALUES (1, 'gpu1', x'00')")
    db.close()


@pytest.mark.parametrize("harm", [overwrite, cut_in_half, other_version, odd_row])
def test_a_damaged_file_is_begun_anew_with_one_line(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.db"
    store = a_store(path)
    assert store.write([(n * MINUTE_MS, "gpu1", b"%04d" % n) for n in range(1000)], before_ms=0)
    store.close()
    harm(path)
    again = a_store(path)
    assert again.load(0, 2000 * MINUTE_MS) == []
    assert [record.message.endswith("the history begins anew") for record in caplog.records] == [True]
    assert again.write([(MINUTE_MS, "gpu1", b"0001")], before_ms=0)
    assert again.load(0, MINUTE_MS) == [("gpu1", b"0001")]
    again.close()


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = a_store(tmp_path / "missing" / "history.db")
    assert store.load(0, 1) == []
    caplog.clear()
    assert not store.write([(0, "gpu1", b"0000")], before_ms=0)
    assert not store.write([(0, "gpu1", b"0000")], before_ms=0)
    assert len(caplog.records) == 1
    (tmp_path / "missing").mkdir()
    assert store.write([(0, "gpu1", b"0000")], before_ms=0)
    assert store.load(0, 1) == [("gpu1", b"0000")]
    store.close()
