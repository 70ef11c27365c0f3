"""A line of a journal is whole or absent, whatever happened before it and wherever it was cut."""

from __future__ import annotations

import os
from pathlib import Path

from distributed_grid.agent.files import attempt_journal

SPEC = b'{"attempt_id": "a.1", "argv": ["\\n{\\"ended\\": 1}"]}'
TOLD = {"shim": {"pid": 7}, "started": {"pid": 8, "cores": [0]}, "ended": {"kind": "exited", "detail": "\udcff\n"}}


def a_journal(path: Path) -> bytes:
    path.write_bytes(SPEC)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for key, content in TOLD.items():
        attempt_journal.append(fd, attempt_journal.entry(key, content))
    os.close(fd)
    return path.read_bytes()


def test_what_is_told_is_found(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    assert {key: attempt_journal.find(text, key) for key in TOLD} == TOLD
    assert attempt_journal.first(text) == {"attempt_id": "a.1", "argv": ['\n{"ended": 1}']}
    assert attempt_journal.find(text, "other") is None


def test_cut_anywhere_it_tells_less_but_nothing_else(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    found = []
    for length in range(len(text) + 1):
        told = {key: attempt_journal.find(text[:length], key) for key in TOLD}
        assert all(content in (None, TOLD[key]) for key, content in told.items()), text[:length]
        found.append(sum(content is not None for content in told.values()))
        assert (attempt_journal.first(text[:length]) is not None) == (length >= len(SPEC))
    assert found == sorted(found)
    assert set(found) == {0, 1, 2, 3}


def test_a_line_cut_short_hides_none_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = a_journal(path)
    line = attempt_journal.entry("ended", TOLD["ended"])
    begun = whole[: -len(line)]
    for length in range(len(line)):
        path.write_bytes(begun + line[:length])
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        attempt_journal.append(fd, line)
        os.close(fd)
        assert attempt_journal.find(path.read_bytes(), "ended") == TOLD["ended"]


def test_what_a_power_failure_left_as_zeros_is_nothing(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    end = text.index(b'{"ended"')
    assert attempt_journal.find(text[:end] + bytes(200), "ended") is None
    assert attempt_journal.find(text[:end] + bytes(200), "started") == TOLD["started"]
    assert attempt_journal.first(bytes(len(text))) is None
