"""A memory server under mutated frames: the data protocol of clients, and the control messages of its supervisor."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from random import Random
from typing import Any

import lz4.block
import msgspec

from distributed_grid.errors import ProtocolError
from distributed_grid.memory.protocol import control_messages as control
from distributed_grid.memory.protocol.frames import (
    ANSWER,
    CHUNK_BYTES,
    COMPRESSED,
    FILL,
    MAGIC,
    NONCE_BYTES,
    OPENED,
    READ,
    REQUEST,
    STEADY,
    VERSION,
    WRITE,
    FrameStatus,
    Op,
    TicketClaims,
    client_proof,
    derive_secret,
    digest_of,
    issue_ticket,
    read_claims,
)
from distributed_grid.memory.server.server import CONTROL_SOCKET
from distributed_grid.memory.supervisor.server_process import LOG_FILE, start_server, try_lock_file
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.sockets import short_path
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import Known, make_corpus
from tests.fuzz.target import HANG_SECONDS, Hang, Tally, exchange, finish, fragments

FRAMES_PER_CONNECTION = 200
PACKETS_PER_CONNECTION = 40
BLOCK_BYTES = 2 * CHUNK_BYTES + 1000
HONEST_COPY = "honest:1"
COPIES = tuple(f"fuzz:{number}" for number in range(8))
MAX_SIZE = 64 * 1024 * 1024
INCARNATION = "fuzzed"
MAX_OFFSETS = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, 2**32, 2**62, 2**63, 2**64 - 1)
WORDS = (0, 1, 2, 4, 100, 32 * 1024, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2**31, 2**32 - 1)


class ServerProcess:
    """A memory server that was started and configured as its supervisor does it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.key = b"k" * 32
        self.log = folder / LOG_FILE
        lock = try_lock_file(folder / "memory.lock")
        self._process = start_server(folder, lock)
        os.close(lock)
        self.pid = self._process.pid
        link = control.ControlSocket(self._process.sock)
        link.send(control.ConfigureServer(str(folder), "127.0.0.1", 0, INCARNATION, self.key))
        link.send(control.StartServing())
        ready = self._wait_until_ready(link)
        self.address = (ready.endpoint.host, ready.endpoint.port)
        self.path = ready.endpoint.path
        self._link = link

    def _wait_until_ready(self, link: control.ControlSocket) -> control.ServerReady:
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            select.select([link], [], [], 1)
            for message, fds in link.receive():
                control.close_all(fds)
                if isinstance(message, control.ServerReady):
                    return message
        raise Hang("the memory server does not start")

    def connect(self, *, local: bool) -> socket.socket:
        """A connection of a client."""
        if not local:
            return socket.create_connection(self.address, HANG_SECONDS)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(HANG_SECONDS)
        with short_path(self.path) as name:
            sock.connect(name)
        return sock

    def free(self, copies: tuple[str, ...]) -> None:
        """Free copies, as a supervisor that has just come; return when that is done."""
        link = control.ControlSocket(self.connect_control())
        try:
            link.send(control.FreeCopy(copies))
            deadline = time.monotonic() + HANG_SECONDS
            while time.monotonic() < deadline:
                select.select([link], [], [], 1)
                received = link.receive()
                for _, fds in received:
                    control.close_all(fds)
                if any(isinstance(message, control.CopyFreed) for message, _ in received):
                    return
            raise Hang("the memory server does not free copies")
        finally:
            link.close()

    def connect_control(self) -> socket.socket:
        """A connection of a supervisor."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(HANG_SECONDS)
        with short_path(self.folder / CONTROL_SOCKET) as name:
            sock.connect(name)
        return sock

    def close(self) -> None:
        self._link.close()
        self._process.kill()


class Session:
    """An honest client on one connection: one request, one answer."""

    def __init__(self, server: ServerProcess, *, local: bool) -> None:
        self._server = server
        self.sock = server.connect(local=local)
        self._client_nonce = os.urandom(NONCE_BYTES)
        status, body = self.request(Op.HELLO, payload=self._client_nonce + VERSION.to_bytes(2, "little"))
        assert status is FrameStatus.OK, status
        self._server_nonce = body[:NONCE_BYTES]

    def opening(self, packed: bytes) -> bytes:
        """The payload that opens a copy with these claims, proven."""
        proof = client_proof(derive_secret(self._server.key, packed), self._client_nonce, self._server_nonce, packed)
        return len(packed).to_bytes(2, "little") + packed + proof

    def open(self, copy: str, rights: int) -> int:
        """The handle of a copy."""
        status, handle = self.try_open(copy, rights)
        assert status is FrameStatus.OK, status
        return handle

    def try_open(self, copy: str, rights: int) -> tuple[FrameStatus, int]:
        """The handle of a copy, or why there is none."""
        claims = TicketClaims(copy, 1, BLOCK_BYTES, rights, boot_ms() + 600_000, 0, INCARNATION)
        payload = self.opening(issue_ticket(self._server.key, claims).claims)
        status, body = self.request(Op.OPEN, payload=payload)
        return status, int(OPENED.unpack_from(body)[0]) if status is FrameStatus.OK else 0

    def request(
        self, op: Op, handle: int = 0, *, offset: int = 0, length: int = 0, payload: bytes = b"", digest: int = 0
    ) -> tuple[FrameStatus, bytes]:
        self.sock.sendall(
            REQUEST.pack(MAGIC, op, 0, handle, 7, length or len(payload), len(payload), offset, digest) + payload
        )
        _, status, _, _, wire, _ = ANSWER.unpack(self._receive(ANSWER.size))
        return FrameStatus(status), self._receive(wire)

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = self.sock.recv(count - len(data))
            if not chunk:
                raise Hang("the memory server hung up on an honest client")
            data += chunk
        return data


class DataFrames:
    """Requests of clients, with tickets and without, over TCP and over the Unix socket."""

    name = "memory data"

    def __init__(self, server: ServerProcess, seed: str) -> None:
        self._server = server
        self._content = Random(seed).randbytes(CHUNK_BYTES)
        self._copies = COPIES
        session = Session(server, local=True)
        with session.sock:
            handle = session.open(HONEST_COPY, READ | WRITE)
            status, _ = session.request(Op.WRITE, handle, payload=self._content, digest=digest_of(self._content))
            assert status is FrameStatus.OK, status

    def check(self) -> None:
        """Content written by a correct client is still there."""
        session = Session(self._server, local=False)
        with session.sock:
            handle = session.open(HONEST_COPY, READ)
            status, data = session.request(Op.READ, handle, length=CHUNK_BYTES)
            assert status is FrameStatus.OK, status
            assert data == self._content, "the content of an honest block has changed"

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=False)
        for count in tally.batches(frames, FRAMES_PER_CONNECTION):
            tally.connections += 1
            if rng.random() < 0.1:
                self._talk_unknown(mutator, tally)
            else:
                if tally.connections % 10 == 0:  # what was made of the others lets nobody in any more
                    self._server.free(self._copies)
                    self._copies = tuple(f"fuzz:{tally.connections}-{number}" for number in range(8))
                self._talk(mutator, count, tally)
        self._server.free(self._copies)
        self._copies = tuple(f"fuzz:{tally.connections}-{number}" for number in range(8, 16))

    def _talk_unknown(self, mutator: Mutator, tally: Tally) -> None:
        """Without a ticket: whatever comes first is broken."""
        rng = mutator.rng
        with self._server.connect(local=rng.random() < 0.5) as sock:
            data = mutator.damaged(REQUEST.pack(MAGIC, rng.randrange(10), 0, 1, 1, 0, 18, 0, 0) + bytes(18))
            answers = _Answers(tally)
            finish(sock, data, answers.take)
        tally.frames += 1
        tally.results["cut"] += 1

    def _talk(self, mutator: Mutator, count: int, tally: Tally) -> None:
        rng = mutator.rng
        session = Session(self._server, local=rng.random() < 0.5)
        with session.sock as sock:
            handles = [session.try_open(rng.choice(self._copies), READ | WRITE)[1] for _ in range(2)]
            requests = [self._request(mutator, session, handles) for _ in range(count - 1)]
            answers = _Answers(tally, len(requests))
            before = tally.frames
            if requests and exchange(sock, b"".join(requests), answers.take, pieces=fragments(rng)):
                tally.results["cut"] += 1
                tally.frames += 1 if tally.frames - before < count else 0
                return
            last = mutator.damaged(self._request(mutator, session, handles))
            finish(sock, last)
            tally.frames += 1
            tally.results["cut"] += 1

    def _request(self, mutator: Mutator, session: Session, handles: list[int]) -> bytes:
        """A request with one or two fields that are not as they should be; its payload is as long as it says."""
        rng = mutator.rng
        op: int = rng.choice((*Op, Op.READ, Op.WRITE))
        length = rng.choice((1, 100, 4096, CHUNK_BYTES if rng.random() < 0.02 else 512))
        payload = b""
        flags, digest = rng.choice((0, 0, COMPRESSED, STEADY)), 0
        offset = rng.randrange(0, BLOCK_BYTES - length)
        if op == Op.WRITE:
            data = rng.randbytes(64) * (length // 64 + 1)
            payload = data[:length]
            digest = digest_of(payload)
            if flags & COMPRESSED:
                payload = lz4.block.compress(payload, store_size=False)
                if rng.random() < 0.5:
                    payload = mutator.damaged(payload)
            if not 1 <= len(payload) <= length:
                payload, flags = data[:length], 0
        elif op == Op.OPEN:
            payload = self._opening(mutator, session)
        elif op == Op.SEVER:
            payload = rng.randbytes(rng.choice((0, 1, NONCE_BYTES)))
        elif op == Op.HELLO:
            op, payload = rng.choice((Op.HELLO, 0, 10, 77, 255)), b""
        if op != Op.WRITE and op != Op.READ:
            length = rng.choice(WORDS)
        fields = [MAGIC, op, flags, rng.choice(handles), rng.getrandbits(32), length, len(payload), offset, digest]
        for _ in range(rng.choice((0, 1, 1, 2))):
            place = rng.choice((2, 3, 4, 5, 7, 8))
            if op == Op.WRITE and place in (5, 7) and rng.random() < 0.8:
                continue  # most of these would end the connection
            fields[place] = {
                2: rng.randrange(256),
                3: rng.choice((*handles, 0, 3, 2**32 - 1)),
                4: rng.choice(WORDS),
                5: rng.choice(WORDS),
                7: rng.choice(MAX_OFFSETS),
                8: rng.choice((0, 1, 2**64 - 1)),
            }[place]
        return REQUEST.pack(*fields) + payload

    def _opening(self, mutator: Mutator, session: Session) -> bytes:
        """A ticket with claims that are not as they should be: proven, or not."""
        rng = mutator.rng
        claims: list[Any] = [
            rng.choice(self._copies),
            rng.choice((0, 1, 1)),
            BLOCK_BYTES,
            rng.choice((0, READ, WRITE, FILL, READ | WRITE)),
            boot_ms() + rng.choice((-1, 1, 60_000)),
            0,
            INCARNATION,
            False,
        ]
        packed = mutator.encoded(claims)
        try:
            found = read_claims(packed)
        except ProtocolError:
            pass
        else:
            if found.size > MAX_SIZE or found.copy not in self._copies:
                packed = mutator.encode(claims)
        whole = session.opening(packed[:1000])
        return whole if rng.random() < 0.7 else mutator.damaged(whole)[:1050]


class _Answers:
    """Counts answers by their status."""

    def __init__(self, tally: Tally, expected: int = -1) -> None:
        self._tally = tally
        self._expected = expected
        self._data = bytearray()

    def take(self, chunk: bytes) -> bool:
        """Whether all have come."""
        self._data += chunk
        at = 0
        while len(self._data) - at >= ANSWER.size:
            _, status, _, _, wire, _ = ANSWER.unpack_from(self._data, at)
            if len(self._data) - at < ANSWER.size + wire:
                break
            at += ANSWER.size + wire
            self._tally.results[FrameStatus(status).name.lower()] += 1
            if self._expected >= 0:
                self._tally.frames += 1
                self._expected -= 1
        del self._data[:at]
        return self._expected == 0


CONTROL_KNOWN: Known = {
    "copies": lambda rng: [rng.choice((*COPIES, "nobody:1", "x" * 300, "../x")) for _ in range(rng.randrange(4))],
    "until_boot_ms": lambda rng: rng.choice((0, 2**62)),
    "source": lambda rng: rng.choice((*COPIES, "nobody:1", "../x")),
    "host": lambda rng: "127.0.0.1",
    "port": lambda rng: 1,
    "path": lambda rng: "",
    "claims": lambda rng: msgspec.msgpack.encode(["fuzz:1", 2, BLOCK_BYTES, FILL, 2**60, 0, INCARNATION, False]),
}


class ControlMessages:
    """Control messages of a supervisor, some of them with descriptors."""

    name = "memory control"

    def __init__(self, server: ServerProcess, seed: str, data: DataFrames) -> None:
        self._server = server
        self.check = data.check
        obeyed = (control.SetHold, control.FreeCopy, control.MakeReplica, control.SupervisorLeaving)
        self._corpus = make_corpus(obeyed, 20, Random(seed), CONTROL_KNOWN)
        self._others = make_corpus(control.Message.__args__, 5, Random(seed), CONTROL_KNOWN)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(control.Message)
        self._null = os.open("/dev/null", os.O_RDONLY)

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=False)
        for count in tally.batches(frames, PACKETS_PER_CONNECTION):
            self._talk(mutator, count, tally)

    def _talk(self, mutator: Mutator, count: int, tally: Tally) -> None:
        rng = mutator.rng
        tally.connections += 1
        accepted: list[bytes] = []
        refused = b""
        while len(accepted) < count - 1 or not refused:
            packet = mutator.encoded(rng.choice(self._corpus if rng.random() < 0.9 else self._others))[:120_000]
            verdict = self._verdict(packet)
            if verdict == "refused" and packet:
                refused = packet
            elif verdict == "obeyed" and len(accepted) < count - 1:
                accepted.append(packet)
        with self._server.connect_control() as sock:
            for packet in (*accepted, refused):
                fds = [self._null] * rng.randrange(1, 5) if rng.random() < 0.1 else []
                try:
                    socket.send_fds(sock, [packet], fds)
                except (ConnectionError, BrokenPipeError):
                    break
            exchange(sock, b"", lambda chunk: False)
        tally.frames += len(accepted) + 1
        tally.results["obeyed"] += len(accepted)
        tally.results["cut"] += 1

    def _verdict(self, packet: bytes) -> str:
        """Whether the server obeys or refuses it, or would rightly end or free what is honest."""
        try:
            message = self._decoder.decode(packet)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return "refused"
        match message:
            case control.SetHold(until_boot_ms=until) if 0 < until < 2**60:
                return "harmful"
            case control.FreeCopy(copies=copies) if HONEST_COPY in copies:
                return "harmful"
            case control.MakeReplica(source=source) if source == HONEST_COPY or source not in COPIES:
                return "harmful"
            case control.SetHold() | control.FreeCopy() | control.MakeReplica() | control.SupervisorLeaving():
                return "obeyed"
        return "refused"

    def close(self) -> None:
        os.close(self._null)
