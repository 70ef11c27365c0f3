"""Control messages that cannot be decoded leave no descriptors behind."""

from __future__ import annotations

import os
import socket

import pytest

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol.control_messages import ControlSocket, FreeCopy


def test_descriptors_that_came_before_an_invalid_message_are_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = ControlSocket(ours), ControlSocket(theirs)
    try:
        before = os.listdir("/proc/self/fd")
        sender.send(FreeCopy(("a:1",)), [0, 1])
        socket.send_fds(ours, [b"\xc1"], [2])
        with pytest.raises(ProtocolError):
            receiver.receive()
        assert os.listdir("/proc/self/fd") == before
    finally:
        sender.close()
        receiver.close()
