"""Processes: one identity for ever, bounds for whatever an agent tells, and nothing of them in a log."""

from __future__ import annotations

import msgspec
import pytest

from distributed_grid.domain.processes import MAX_PATHS, MAX_WORD_CHARS, ProcessIdentity, ProcessInfo
from tests.unit.scheduling.offloading.processes import a_process


def told(**facts: object) -> ProcessInfo:
    """A process as it arrives from an agent that may say anything."""
    honest = msgspec.to_builtins(a_process("python3", "train.py"))
    return msgspec.convert({**honest, **facts}, ProcessInfo)


def test_a_pid_alone_is_no_identity():
    process = a_process("python3", "train.py")
    assert process.identity == ProcessIdentity(process.pid, process.pid_start, process.boot)
    later = told(pid_start=process.pid_start + 1)
    elsewhere = told(boot="another")
    assert len({process.identity, later.identity, elsewhere.identity}) == 3


def test_neither_arguments_nor_variables_are_shown():
    process = told(argv=["curl", "--token=geheim"], environment=[["PASSWORD", "geheim"]])
    assert "geheim" not in repr(process)
    assert str(process.pid) in repr(process)


@pytest.mark.parametrize(
    "lie",
    [
        {"pid": -1},
        {"pid": 2**31},
        {"uid": 2**32},
        {"pss_bytes": -1},
        {"cpu_milli": 2**62},
        {"argv": ["x" * (MAX_WORD_CHARS + 1)]},
        {"listening": ["tcp 1"] * (MAX_PATHS + 1)},
        {"streams": [{}] * 4},
        {"needs": [["/data", -1]]},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_what_no_process_can_be_is_not_understood(lie):
    with pytest.raises(msgspec.ValidationError):
        told(**lie)


def test_the_largest_that_may_be_told_is_understood():
    argv = ["x" * MAX_WORD_CHARS]
    assert told(argv=argv, pid=2**31 - 1, listening=["tcp 1"] * MAX_PATHS).argv == tuple(argv)
