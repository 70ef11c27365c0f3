"""Output that cannot be written: which error each cause raises, on real pipes, terminals and devices."""

from __future__ import annotations

import os
import pty
import threading

import pytest

from distributed_grid.cli.standard_streams import HungUp, OutputFailed, OutputFile


def test_a_full_disk_is_an_error_of_one_line() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OutputFailed, match=r"^cannot write the output: No space left on device$"):
            OutputFile(full).write(b"x")
    finally:
        os.close(full)


def test_a_descriptor_that_takes_no_bytes_is_an_error_of_one_line() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        with pytest.raises(OutputFailed, match=r"^cannot write the output: Bad file descriptor$"):
            OutputFile(null).write(b"x")
    finally:
        os.close(null)


def test_a_terminal_that_has_closed_is_a_hang_up() -> None:
    master, terminal = pty.openpty()
    output = OutputFile(terminal)
    assert output.write(b"x") == 1
    os.close(master)
    try:
        with pytest.raises(HungUp):
            output.write(b"x")
    finally:
        os.close(terminal)


def test_a_reader_that_has_gone_stays_a_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(BrokenPipeError):
            OutputFile(writer).write(b"x")
    finally:
        os.close(writer)


def test_a_pipe_that_another_process_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = 0
    while (count := _write_some(writer)) > 0:
        size += count
    received = []
    draining = threading.Thread(target=lambda: received.append(len(os.read(reader, size))))
    draining.start()
    try:
        assert OutputFile(writer).write(b"x") == 1
    finally:
        draining.join()
        os.close(reader)
        os.close(writer)
    assert received[0] > 0


def _write_some(descriptor: int) -> int:
    try:
        return os.write(descriptor, bytes(4096))
    except BlockingIOError:
        return 0
