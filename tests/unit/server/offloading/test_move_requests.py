"""What runs in place of a moved process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distributed_grid.domain.processes import ProcessInfo, StandardStream, StreamKind
from distributed_grid.errors import Refused
from distributed_grid.server.offloading.move_requests import READ_FROM_FILE, check_input, command_line


def a_process(kind: str, path: str = "", argv: tuple[str, ...] = ("sort", "-n")) -> ProcessInfo:
    streams = (StandardStream(StreamKind(kind), path), StandardStream(), StandardStream())
    return ProcessInfo(
        pid=7,
        pid_start=1,
        boot="boot",
        ppid=1,
        uid=0,
        user="ann",
        name="sort",
        argv=argv,
        cwd="/data/ann",
        streams=streams,
    )


@pytest.mark.parametrize("process", [a_process("null"), a_process("closed")])
def test_without_input_the_command_is_the_same(process: ProcessInfo) -> None:
    check_input(process)
    assert command_line(process) == ("sort", "-n")


def test_a_file_of_the_working_directory_stays_the_input(tmp_path: Path) -> None:
    process = a_process("file", "/data/ann/deep/a file; rm -rf $HOME")
    check_input(process)
    command = command_line(process)
    assert command == (*READ_FROM_FILE, "deep/a file; rm -rf $HOME", "sort", "-n")
    file = tmp_path / command[3]
    file.parent.mkdir()
    file.write_text("10\n9\n")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "9\n10\n"


@pytest.mark.parametrize(("kind", "path"), [("file", "/data/annex/x"), ("pipe", ""), ("socket", ""), ("other", "")])
def test_other_input_is_refused_with_what_it_is(kind: str, path: str) -> None:
    with pytest.raises(Refused, match=kind):
        check_input(a_process(kind, path))
