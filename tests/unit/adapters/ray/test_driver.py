"""Whether Ray's head still listens, as its driver asks once a second."""

from __future__ import annotations

import asyncio
import socket

from distributed_grid.adapters.ray.driver import is_refused


def test_a_head_that_listens_is_not_refused_and_one_that_has_ended_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        endpoint = head.getsockname()[:2]
        assert not asyncio.run(is_refused(endpoint, 5))
    assert asyncio.run(is_refused(endpoint, 5))


def test_silence_is_no_proof_that_it_has_ended() -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen(0)
        queued = [socket.socket() for _ in range(3)]
        try:
            for one in queued:  # its backlog is full: whoever else connects is not answered
                one.setblocking(False)
                one.connect_ex(head.getsockname())
            assert not asyncio.run(is_refused(head.getsockname()[:2], 0.2))
        finally:
            for one in queued:
                one.close()
