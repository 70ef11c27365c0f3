"""Answers of a memory server, byte by byte: to correct, mistaken, stalled and malicious clients."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.client.server_connection import ConnectionBroken, Opened, ServerConnection
from distributed_grid.memory.client.transfer_queue import ChunkRange, TransferQueue
from distributed_grid.memory.protocol.frames import (
    ANSWER,
    CHUNK_BYTES,
    MAGIC,
    NONCE_BYTES,
    READ,
    REQUEST,
    STEADY,
    WRITE,
    FrameStatus,
    Op,
    StatusError,
    TicketClaims,
    client_proof,
    digest_of,
    issue_ticket,
)
from distributed_grid.memory.server.client_connection import ClientConnection, ConnectionClosed
from distributed_grid.memory.server.copy_store import CopyStore
from distributed_grid.memory.server.write_journal import SLOTS, WriteJournal
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import Ticket
from tests.component.memory.memory_servers import FakeDirectory, Lender, lenders, wait_for

KEY = b"k" * 32
SIZE = 2 * CHUNK_BYTES + 100


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lender]:
    with lenders(tmp_path_factory.mktemp("memory")) as (one,):
        yield one


def some_claims(lender: Lender, rights: int = READ | WRITE, **changes: object) -> TicketClaims:
    life = lender.served.endpoint.incarnation
    claims = TicketClaims(f"m{random.getrandbits(60):x}:1", 1, SIZE, rights, boot_ms() + 60_000, 0, life)
    return msgspec.structs.replace(claims, **changes)


def a_channel(lender: Lender) -> ServerConnection:
    return ServerConnection.connect(lender.served.endpoint, seconds=5)


def said_to(lender: Lender, ticket: Ticket) -> FrameStatus:
    channel = a_channel(lender)
    try:
        channel.open(ticket)
    except StatusError as answer:
        return answer.status
    finally:
        channel.close()
    return FrameStatus.OK


def test_a_ticket_opens_its_copy_and_the_server_proves_itself(lender: Lender) -> None:
    assert said_to(lender, issue_ticket(lender.served.key, some_claims(lender))) is FrameStatus.OK


def test_one_address_gets_so_many_connections_and_hears_why_there_are_no_more(tmp_path: Path) -> None:
    with lenders(tmp_path / "memory", max_connections_per_peer=3) as (one,):
        endpoint = one.served.endpoint
        kept = [a_channel(one) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(ConnectionBroken, match="the memory server has too many connections of this machine"):
                a_channel(one)
        flood = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(50)]
        wait_for(lambda: any(_is_closed(sock) for sock in flood))
        ServerConnection.connect_local(endpoint.path, seconds=5).close()  # programs of this machine are not counted
        for sock in flood:
            sock.close()
        kept.pop().close()
        ticket = issue_ticket(one.served.key, some_claims(one))
        wait_for(lambda: _opens(one, ticket))
        for channel in kept:
            channel.open(ticket)
            channel.close()


def _opens(lender: Lender, ticket: Ticket) -> bool:
    with contextlib.suppress(ConnectionBroken):
        return said_to(lender, ticket) is FrameStatus.OK
    return False


def test_a_wrong_secret_is_denied_without_a_reason(lender: Lender) -> None:
    ticket = issue_ticket(lender.served.key, some_claims(lender))
    assert said_to(lender, Ticket(ticket.claims, b"x" * 32)) is FrameStatus.DENIED
    more = issue_ticket(lender.served.key, some_claims(lender, size=SIZE + 1)).claims
    assert said_to(lender, Ticket(more, ticket.secret)) is FrameStatus.DENIED


def test_an_expired_ticket_and_one_of_another_life_are_told_apart(lender: Lender) -> None:
    key = lender.served.key
    assert said_to(lender, issue_ticket(key, some_claims(lender, expires_boot_ms=boot_ms() - 1))) is FrameStatus.EXPIRED
    assert (
        said_to(lender, issue_ticket(key, some_claims(lender, incarnation="before"))) is FrameStatus.WRONG_INCARNATION
    )
    assert (
        said_to(lender, issue_ticket(b"old key", some_claims(lender, incarnation="before")))
        is FrameStatus.WRONG_INCARNATION
    )


def test_a_server_that_cannot_prove_itself_is_not_believed(lender: Lender) -> None:
    """Somebody who answers at that address, but has not the key."""
    ticket = issue_ticket(lender.served.key, some_claims(lender))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(ANSWER.pack(0x6D61, 0, 0, 1, NONCE_BYTES + 2, 0) + bytes(NONCE_BYTES) + b"\1\0")
        channel = ServerConnection.handshake(ours, is_local=True)
        theirs.sendall(ANSWER.pack(0x6D61, 0, 0, 2, 53, 0) + bytes(53))
        with pytest.raises(ConnectionBroken, match="prove"):
            channel.open(ticket)


def test_a_reader_may_not_write(lender: Lender) -> None:
    channel = a_channel(lender)
    opened = channel.open(issue_ticket(lender.served.key, some_claims(lender, READ)))
    with pytest.raises(StatusError) as answer:
        channel.write(TransferQueue([ChunkRange(opened.handle, 0, memoryview(b"x"))]))
    assert answer.value.status is FrameStatus.DENIED
    channel.close()


@pytest.mark.parametrize(("offset", "length"), [(SIZE - 1, 2), (SIZE, 1), (2**63, 1), (CHUNK_BYTES - 1, 2), (0, 0)])
def test_a_read_outside_the_block_or_across_chunks_is_refused(lender: Lender, offset: int, length: int) -> None:
    channel = a_channel(lender)
    opened = channel.open(issue_ticket(lender.served.key, some_claims(lender)))
    channel.sock.sendall(REQUEST.pack(MAGIC, Op.READ, 0, opened.handle, 9, length, 0, offset, 0))
    assert ANSWER.unpack(channel.sock.recv(ANSWER.size, socket.MSG_WAITALL))[1] == FrameStatus.BAD
    assert read(channel, opened, 0, 5) == bytes(5), "the connection is as good as before"
    channel.close()


def read(channel: ServerConnection, opened: Opened, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    channel.read(TransferQueue([ChunkRange(opened.handle, offset, memoryview(buffer))]))
    return bytes(buffer)


def test_a_write_whose_digest_does_not_fit_changes_nothing(lender: Lender) -> None:
    channel = a_channel(lender)
    opened = channel.open(issue_ticket(lender.served.key, some_claims(lender)))
    channel.write(TransferQueue([ChunkRange(opened.handle, 0, memoryview(b"a" * CHUNK_BYTES))]))
    for data, flags in ((b"b" * CHUNK_BYTES, 0), (b"b" * 10, 0), (b"\xff" * 9, 1)):
        channel.sock.sendall(
            REQUEST.pack(MAGIC, Op.WRITE, flags, opened.handle, 9, CHUNK_BYTES if flags else len(data), len(data), 0, 1)
            + data
        )
        assert ANSWER.unpack(channel.sock.recv(ANSWER.size, socket.MSG_WAITALL))[1] == FrameStatus.CORRUPT
    assert read(channel, opened, 0, CHUNK_BYTES) == b"a" * CHUNK_BYTES
    channel.close()


def test_who_goes_away_half_way_leaves_nothing_behind(lender: Lender) -> None:
    channel, other = a_channel(lender), a_channel(lender)
    ticket = issue_ticket(lender.served.key, some_claims(lender))
    opened, again = channel.open(ticket), other.open(ticket)
    other.write(TransferQueue([ChunkRange(again.handle, 0, memoryview(b"a" * CHUNK_BYTES))]))
    for offset in (0, CHUNK_BYTES):
        late = a_channel(lender)
        handle = late.open(ticket).handle
        data = b"b" * CHUNK_BYTES
        head = REQUEST.pack(MAGIC, Op.WRITE, 0, handle, 9, CHUNK_BYTES, CHUNK_BYTES, offset, digest_of(data))
        late.sock.sendall(head + data[: CHUNK_BYTES // 2])
        late.close()
    assert read(channel, opened, 0, CHUNK_BYTES) == b"a" * CHUNK_BYTES
    assert read(channel, opened, CHUNK_BYTES, CHUNK_BYTES) == bytes(CHUNK_BYTES)
    channel.close()
    other.close()


def test_what_is_under_way_on_a_severed_connection_is_never_done(lender: Lender) -> None:
    old, new = a_channel(lender), a_channel(lender)
    ticket = issue_ticket(lender.served.key, some_claims(lender))
    handle, opened = old.open(ticket).handle, new.open(ticket)
    data = b"a" * CHUNK_BYTES
    head = REQUEST.pack(MAGIC, Op.WRITE, 0, handle, 9, CHUNK_BYTES, CHUNK_BYTES, 0, digest_of(data))
    old.sock.sendall(head + data[:-1])
    new.sever(b"x" * NONCE_BYTES)  # somebody else's guess
    new.sever(old.nonce)
    new.write(TransferQueue([ChunkRange(opened.handle, 0, memoryview(b"b" * CHUNK_BYTES))]))
    with contextlib.suppress(OSError):
        old.sock.sendall(data[-1:])
    assert _is_closed(old.sock)
    assert read(new, opened, 0, CHUNK_BYTES) == b"b" * CHUNK_BYTES
    old.close()
    new.close()


def test_a_client_that_stalls_half_way_holds_nobody_up(lender: Lender) -> None:
    ticket = issue_ticket(lender.served.key, some_claims(lender))
    stalled = [a_channel(lender) for _ in range(SLOTS + 5)]  # more than there are warm slots
    for one in stalled:
        handle = one.open(ticket).handle
        one.sock.sendall(REQUEST.pack(MAGIC, Op.WRITE, 0, handle, 9, CHUNK_BYTES, CHUNK_BYTES, 0, 1) + b"some")
    channel = a_channel(lender)
    opened = channel.open(ticket)
    channel.write(TransferQueue([ChunkRange(opened.handle, 0, memoryview(b"w" * CHUNK_BYTES))]))
    channel.write(TransferQueue([ChunkRange(opened.handle, 7, memoryview(b"over"))]))
    assert read(channel, opened, 0, 12) == b"w" * 7 + b"over" + b"w"
    for one in (channel, *stalled):
        one.close()


def test_a_steady_reader_that_takes_nothing_sees_each_chunk_as_it_was_at_one_moment(lender: Lender) -> None:
    slow, writer = a_channel(lender), a_channel(lender)
    ticket = issue_ticket(lender.served.key, some_claims(lender, size=64 * CHUNK_BYTES))
    handle, opened = slow.open(ticket).handle, writer.open(ticket)
    old, new = os.urandom(CHUNK_BYTES), os.urandom(CHUNK_BYTES)
    writer.write(TransferQueue(ChunkRange(opened.handle, at * CHUNK_BYTES, memoryview(old)) for at in range(64)))
    slow.sock.sendall(
        b"".join(
            REQUEST.pack(MAGIC, Op.READ, STEADY, handle, at, CHUNK_BYTES, 0, at * CHUNK_BYTES, 0) for at in range(64)
        )
    )
    writer.write(TransferQueue(ChunkRange(opened.handle, at * CHUNK_BYTES, memoryview(new)) for at in range(64)))
    seen = set()
    for _ in range(64):
        _, status, _, _, length, digest = ANSWER.unpack(slow.sock.recv(ANSWER.size, socket.MSG_WAITALL))
        data = slow.sock.recv(length, socket.MSG_WAITALL)
        assert status == FrameStatus.OK
        assert digest_of(data) == digest
        seen.add(data)
    assert seen <= {old, new}
    slow.close()
    writer.close()


def test_readers_and_writers_of_the_same_chunks_never_see_a_mixture(lender: Lender) -> None:
    directory = FakeDirectory()
    directory.use_path = False
    directory.allocate("same", 32 * CHUNK_BYTES, lender)
    versions = [bytes([number]) * CHUNK_BYTES for number in (1, 2, 3)]
    writer, reader = BlockClient(directory), BlockClient(directory)
    writer.write("same", versions[0] * 32)
    enough = threading.Event()

    def write_on() -> None:
        while not enough.is_set():
            for version in versions:
                writer.write("same", version * 32)

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        for _ in range(20):
            found = reader.read("same", 32 * CHUNK_BYTES)
            assert {found[at : at + CHUNK_BYTES] for at in range(0, len(found), CHUNK_BYTES)} <= set(versions)
    finally:
        enough.set()
        thread.join()
        writer.close()
        reader.close()
        lender.free("same:1")


def test_sixty_four_clients_at_once(lender: Lender) -> None:
    directory = FakeDirectory()
    directory.use_path = False
    directory.allocate("many", 64 * CHUNK_BYTES, lender)
    found = directory.find_block(block_id="many")
    barrier = threading.Barrier(64, timeout=30)

    def one_client(number: int) -> None:
        blocks = BlockClient(directory)
        blocks.add_location(found)
        mine = bytes([number]) * CHUNK_BYTES
        blocks.write("many", mine, number * CHUNK_BYTES)
        barrier.wait()
        at = (number + 7) % 64
        theirs = blocks.read("many", CHUNK_BYTES, at * CHUNK_BYTES)
        barrier.wait()
        assert theirs == bytes([at]) * CHUNK_BYTES
        blocks.write("many", b"!", number * CHUNK_BYTES + 99)
        assert blocks.read("many", 10, number * CHUNK_BYTES + 95) == mine[:4] + b"!" + mine[:5]
        blocks.close()

    with ThreadPoolExecutor(64) as crowd:
        list(crowd.map(one_client, range(64)))


def test_who_shows_no_ticket_is_bounded_in_number(lender: Lender) -> None:
    crowd = [socket.create_connection((lender.served.endpoint.host, lender.served.endpoint.port)) for _ in range(300)]
    try:
        time_out = time.monotonic() + 5
        while sum(_is_closed(one) for one in crowd) < 300 - 256:
            assert time.monotonic() < time_out
            time.sleep(0.01)
    finally:
        for one in crowd:
            one.close()
    said = FrameStatus.DENIED
    deadline = time.monotonic() + 5
    while said is not FrameStatus.OK and time.monotonic() < deadline:
        try:
            said = said_to(lender, issue_ticket(lender.served.key, some_claims(lender)))
        except ConnectionBroken:
            time.sleep(0.01)
    assert said is FrameStatus.OK


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# ---------------------------------------------------------------------- rubbish, against the real state machine


class NoSupervisor:
    def hold_elsewhere(self, backing: object) -> bool:
        return True

    def sever(self, nonce: bytes) -> None:
        pass


class Bench:
    """A connection without a process around it: sent bytes are handled at once."""

    def __init__(self, spill: Path) -> None:
        self.store = CopyStore(spill, "life", KEY, WriteJournal.make())
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        self.sock = ours
        self.connection = ClientConnection(theirs, self.store, NoSupervisor(), is_local=True, now=0.0)

    def send(self, data: bytes) -> bytes:
        """What comes back; `ConnectionClosed` and OSError as the loop would see them."""
        received = b""
        while data:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                received += self._run_turn()
        return received + self._run_turn()

    def _run_turn(self) -> bytes:
        received = b""
        while self.connection.run_turn() or self.connection.waits_to_send:
            received += self._receive()
        return received + self._receive()

    def _receive(self) -> bytes:
        received = b""
        while True:
            try:
                got, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, 4)
            except BlockingIOError:
                return received
            for fd in fds:
                os.close(fd)
            if not got:
                return received
            received += got

    def close(self) -> None:
        self.connection.close()
        self.sock.close()
        for copy in list(self.store.held):
            self.store.free(copy, 0)


def a_valid_conversation(bench: Bench, copy: str, steps: list[tuple[int, int, int]]) -> list[bytes]:
    """Greeting and opening are said; the requests that could follow are returned."""
    nonce = bytes(NONCE_BYTES)
    answer = bench.send(REQUEST.pack(MAGIC, Op.HELLO, 0, 0, 1, 0, NONCE_BYTES + 2, 0, 0) + nonce + b"\1\0")
    theirs = answer[ANSWER.size : ANSWER.size + NONCE_BYTES]
    ticket = issue_ticket(KEY, TicketClaims(copy, 1, SIZE, 7 & (READ | WRITE), boot_ms() + 60_000, 0, "life"))
    body = len(ticket.claims).to_bytes(2, "little") + ticket.claims
    body += client_proof(ticket.secret, nonce, theirs, ticket.claims)
    bench.send(REQUEST.pack(MAGIC, Op.OPEN, 0, 0, 2, 0, len(body), 0, 0) + body)
    said = []
    for op, at, length in steps:
        data = bytes([at % 256]) * length if op == Op.WRITE else b""
        head = REQUEST.pack(MAGIC, op, 0, 1, at, length, len(data), at * 31, digest_of(data) if data else 0)
        said.append(head + data)
    return said


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9000), st.integers(0, 3000)), max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS, rubbish=st.binary(max_size=200), at=st.integers(0, 5000), flip=st.integers(1, 255), cut=st.booleans()
)
def test_no_conversation_however_wrong_does_more_than_end(
    tmp_path: Path, steps: list[tuple[int, int, int]], rubbish: bytes, at: int, flip: int, cut: bool
) -> None:
    bench = Bench(tmp_path)
    try:
        said = bytearray(b"".join(a_valid_conversation(bench, "fuzz:1", steps)) + rubbish)
        if said:
            said[at % len(said)] ^= flip
        bench.send(bytes(said[: len(said) // 2]) if cut else bytes(said))
    except (ConnectionClosed, OSError):
        pass
    finally:
        bench.close()
    assert len(bench.store.staging._free) == SLOTS - 1, "a slot was lost"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), framed=st.booleans(), op=st.integers(0, 255), wire=st.integers(0, 2**32 - 1))
def test_rubbish_instead_of_a_greeting_opens_nothing(
    tmp_path: Path, data: bytes, framed: bool, op: int, wire: int
) -> None:
    bench = Bench(tmp_path)
    try:
        head = REQUEST.pack(MAGIC, op, 0, 0, 1, wire, min(wire, len(data)) if wire % 2 else wire, 0, 0)
        bench.send(head + data if framed else data)
    except (ConnectionClosed, OSError):
        pass
    finally:
        held = dict(bench.store.held)
        bench.close()
    assert not held


def test_a_real_server_goes_on_serving_after_a_lot_of_rubbish(lender: Lender) -> None:
    pid, seed = lender.pid, random.Random(7)
    for _ in range(200):
        with socket.create_connection((lender.served.endpoint.host, lender.served.endpoint.port)) as sock:
            head = REQUEST.pack(MAGIC, seed.randrange(256), 0, 0, 1, 0, seed.choice([0, 18, 2**31]), 0, 0)
            sock.sendall(seed.choice([b"", head]) + seed.randbytes(seed.randrange(2000)))
    assert said_to(lender, issue_ticket(lender.served.key, some_claims(lender))) is FrameStatus.OK
    assert lender.pid == pid
    assert "internal error" not in (lender.folder / "memory.log").read_text()
