"""A socket can be in any folder, however long its path is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distributed_grid.posix.sockets import receive_descriptors, short_path


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_socket_is_bound_and_reached_at_any_depth(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a folder with a long name, as homes on networks have them"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory.sock"
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with short_path(path) as name:
            assert len(name) < 108
            listener.bind(name)
        listener.listen()
        with short_path(str(path)) as name:
            client.connect(name)
        assert path.is_socket()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there_is_an_error_as_everywhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), short_path(tmp_path / ("x" * 120) / "sock"):
        pass


def test_received_descriptors_are_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"two"], [0, 1])
        packed, descriptors = receive_descriptors(theirs, 100, 5)
    assert packed == b"two"
    assert [os.get_inheritable(fd) for fd in descriptors] == [False, False]
    for fd in descriptors:
        os.close(fd)
