"""The link between control plane and agent under mutated messages: a lying agent, and a lying control plane."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from distributed_grid import __version__, wire
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.errors import ProtocolError
from distributed_grid.posix.sockets import short_path
from tests.fuzz import websocket
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import Known, make_corpus
from tests.fuzz.target import HANG_SECONDS, Hang, Tally, exchange, finish, fragments

FRAMES_PER_CONNECTION = 60
LAST_SEQ, LAST_STREAM = 123_456_789, 987_654_321
STARTED = 0.003  # of the valid orders to start something, so many are sent: each is a process
SHARED: Known = {
    "protocol": lambda rng: wire.PROTOCOL,
    "version": lambda rng: __version__,
    "lease_id": lambda rng: rng.choice(("finished.1", "a.1", f"job{rng.randrange(40)}.{rng.randrange(3)}", "no dot")),
    "epoch": lambda rng: rng.choice((0, 1, 5)),
    "fence": lambda rng: rng.choice((0, 1, 2**32, 2**40 + rng.randrange(100))),
    "host": lambda rng: "127.0.0.1",
    "port": lambda rng: 1,
    "argv": lambda rng: rng.choice((["true"], ["false"], ["/nonexistent"])),
    "env": lambda rng: rng.choice(([], [["A", "b"]])),
    "cwd": lambda rng: "",
    "workdir": lambda rng: rng.choice(("", f"{rng.getrandbits(256):064x}")),
    "timeout_ms": lambda rng: rng.choice((0, 5_000)),
    "grace_ms": lambda rng: rng.choice((0, 100)),
}


def members(union: Any) -> tuple[type, ...]:
    """The types of a union of messages."""
    return tuple(union.__args__)


class _Frames:
    """Mutated messages of one direction, in two heaps: those that the other end decodes, and those it refuses."""

    def __init__(
        self, mutator: Mutator, corpus: list[Any], decode: Callable[[bytes], Any], allows: Callable[[Any], bool]
    ) -> None:
        self._mutator = mutator
        self._corpus = corpus
        self._decode = decode
        self._allows = allows
        self._accepted: list[bytes] = []
        self._refused: list[bytes] = []

    def accepted(self) -> bytes:
        while not self._accepted:
            self._make()
        return self._accepted.pop()

    def refused(self) -> bytes:
        while not self._refused:
            self._make()
        return self._refused.pop()

    def _make(self) -> None:
        data = self._mutator.encoded(self._mutator.rng.choice(self._corpus))
        try:
            message = self._decode(data)
        except ProtocolError:
            self._refused.append(data)
            del self._refused[:-50]
            return
        if self._allows(message):
            self._accepted.append(data)


def _broken_websocket(mutator: Mutator, data: bytes, *, masked: bool) -> bytes:
    """A frame that is broken as a frame of WebSockets, or an unusual one."""
    rng = mutator.rng
    whole = websocket.frame(data, masked=masked)
    pick = rng.randrange(6)
    if pick == 0:
        return mutator.damaged(whole[:8]) + whole[8:]
    if pick == 1:
        return websocket.frame(data[:200], rng.randrange(16), masked=masked)
    if pick == 2:
        return websocket.frame(data, websocket.TEXT, masked=masked)
    if pick == 3:
        length = rng.choice((2**63 - 1, 2**64 - 1, 2**32))
        return bytes([0x82, (0x80 if masked else 0) | 127]) + length.to_bytes(8, "big")
    if pick == 4:
        return websocket.frame(data[:60], websocket.CLOSE, masked=masked)
    return websocket.frame(data, masked=not masked)


def _in_parts(mutator: Mutator, data: bytes, *, masked: bool) -> bytes:
    """A message in one frame, or now and then in several with a ping among them."""
    if mutator.rng.random() > 0.03 or len(data) < 2:
        return websocket.frame(data, masked=masked)
    cut = mutator.rng.randrange(1, len(data))
    return (
        websocket.frame(data[:cut], masked=masked, fin=False)
        + websocket.frame(b"?", websocket.PING, masked=masked)
        + websocket.frame(data[cut:], 0, masked=masked)
    )


def _last_frame(mutator: Mutator, stock: _Frames, *, masked: bool) -> bytes:
    """What ends a connection: a message that is refused, or a broken frame and a farewell."""
    data = stock.refused()
    if mutator.rng.random() < 0.7:
        return websocket.frame(data, masked=masked)
    return _broken_websocket(mutator, data, masked=masked) + websocket.frame(b"", websocket.CLOSE, masked=masked)


class _Answers:
    """The messages that the other end has sent."""

    def __init__(self) -> None:
        self._reader = websocket.FrameReader()
        self.messages: list[bytes] = []
        self._is_closing = False

    def take(self, chunk: bytes) -> bool:
        """Whether the other end is closing the connection."""
        for opcode, payload in self._reader.feed(chunk):
            self._is_closing = self._is_closing or opcode == websocket.CLOSE
            if opcode == websocket.BINARY:
                self.messages.append(payload)
        return self._is_closing

    def seqs(self) -> list[int]:
        """The numbers of the reports among them."""
        found = (getattr(_decoded(payload), "seq", None) for payload in self.messages)
        return [seq for seq in found if seq is not None]

    def has(self, kind: type, is_meant: Callable[[Any], bool] = lambda message: True) -> Callable[[bytes], bool]:
        """Whether there is a message of this type."""

        def take(chunk: bytes) -> bool:
            before = len(self.messages)
            self.take(chunk)
            new = (_decoded(payload) for payload in self.messages[before:])
            return any(isinstance(message, kind) and is_meant(message) for message in new)

        return take


def _decoded(payload: bytes) -> Any:
    try:
        return wire.decode_to_agent(payload)
    except ProtocolError:
        return wire.decode_from_agent(payload)


class LyingAgent:
    """Messages of agents, on the sockets where the daemon listens for some nodes."""

    name = "agent to daemon"

    def __init__(self, links: list[Path], seed: str, check: Callable[[], None]) -> None:
        self._links = links
        self.check = check
        known: Known = {**SHARED, "node": lambda rng: rng.choice(("liar0", "liar1", "honest"))}
        kinds = [kind for kind in members(wire.FromAgent) if kind is not wire.AgentHello]
        self._corpus = make_corpus(kinds, 15, Random(seed), known)
        self._hellos = make_corpus(
            [wire.AgentHello], 40, Random(seed), {**known, "capacity": lambda rng: None, "more": lambda rng: False}
        )

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=False)
        stock = _Frames(mutator, self._corpus, wire.decode_from_agent, lambda message: True)
        for count in tally.batches(frames, FRAMES_PER_CONNECTION):
            self._talk(mutator, stock, count, tally)

    def _talk(self, mutator: Mutator, stock: _Frames, count: int, tally: Tally) -> None:
        rng = mutator.rng
        path = rng.choice(self._links)
        tally.connections += 1
        if rng.random() < 0.03:
            self._knock(path, mutator, tally)
            return
        hello = mutator.encode({**rng.choice(self._hellos), "node": path.stem})
        if rng.random() < 0.1:
            hello = mutator.encoded(msgspec.msgpack.decode(hello))
        with _connect(path) as sock:
            sock.sendall(websocket.UPGRADE)
            assert b" 101 " in websocket.read_head(sock), "the link was not upgraded"
            answers = _Answers()
            tally.frames += 1
            data = websocket.frame(hello, masked=True)
            if _is_unfinished(hello):
                data += websocket.frame(b"", websocket.CLOSE, masked=True)
            is_closed = exchange(sock, data, answers.has(wire.Welcome))
            if not is_closed and not _is_unfinished(hello):
                messages = [stock.accepted() for _ in range(count - 2)]
                tally.frames += len(messages) + 1
                data = b"".join(_in_parts(mutator, one, masked=True) for one in messages)
                nobody = wire.AttemptEndedReport(
                    seq=LAST_SEQ, lease_id="nobody.1", fence=1, outcome=Outcome(Ending.EXITED, exit_code=0)
                )
                data += websocket.frame(wire.encode(nobody), masked=True)
                is_last = answers.has(wire.AcknowledgeReport, lambda answer: answer.seq == LAST_SEQ)
                assert not exchange(sock, data, is_last, pieces=fragments(rng)), "a valid message ended the link"
                finish(sock, _last_frame(mutator, stock, masked=True), answers.take)
        tally.results.update(map(_name_of, answers.messages))
        tally.results["cut"] += 1

    def _knock(self, path: Path, mutator: Mutator, tally: Tally) -> None:
        """An upgrade that is none."""
        with _connect(path) as sock:
            finish(sock, mutator.damaged(websocket.UPGRADE))
        tally.frames += 1
        tally.results["no upgrade"] += 1


def _is_unfinished(hello: bytes) -> bool:
    """Whether a greeting is valid and says that there is more of it: nothing is answered before the rest."""
    try:
        message = wire.decode_from_agent(hello)
    except ProtocolError:
        return False
    return isinstance(message, wire.AgentHello) and message.more


def _name_of(payload: bytes) -> str:
    message = wire.decode_to_agent(payload)
    return "rejected" if isinstance(message, wire.RejectAgent) else type(message).__name__


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(HANG_SECONDS)
    with short_path(path) as name:
        sock.connect(name)
    return sock


class LyingControlPlane:
    """Messages of a control plane, to an agent that dials us."""

    name = "daemon to agent"

    def __init__(self, path: Path, node: str, seed: str) -> None:
        self._node = node
        known: Known = {
            **SHARED,
            "node": lambda rng: rng.choice((node, node, "other")),
            "heartbeat_ms": lambda rng: rng.choice((100, 2_000)),
            "hold_ms": lambda rng: rng.choice((0, 1, 60_000)),
            "beat": lambda rng: rng.choice((0, 1, int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1000))),
            "name": lambda rng: rng.choice((b"stdout", b"stderr", b"../../x", b"work/a", b"\xff", b"")),
            "patterns": lambda rng: rng.choice((["**"], ["../*"], ["[", "a" * 300])),
            "stream": lambda rng: rng.randrange(30),
            "credit": lambda rng: rng.choice((0, 1, 2**20, 2**61)),
        }
        kinds = [kind for kind in members(wire.ToAgent) if kind is not wire.RejectAgent]
        self._corpus = make_corpus(kinds, 15, Random(seed), known)
        self._listener = socket.socket(socket.AF_UNIX)
        with short_path(path) as name:
            self._listener.bind(name)
        self._listener.listen(8)

    def close(self) -> None:
        self._listener.close()

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=False)

        def allows(message: Any) -> bool:
            if isinstance(message, wire.StartAttemptOrder | wire.ServeMemoryOrder | wire.MakeCopyOrder):
                return rng.random() < STARTED
            return not isinstance(message, wire.RejectAgent)

        stock = _Frames(mutator, self._corpus, wire.decode_to_agent, allows)
        for count in tally.batches(frames, FRAMES_PER_CONNECTION):
            self._talk(mutator, stock, count, tally)

    def _talk(self, mutator: Mutator, stock: _Frames, count: int, tally: Tally) -> None:
        rng = mutator.rng
        tally.connections += 1
        answers = _Answers()
        with self._accept() as sock:
            is_welcome = rng.random() < 0.9
            if not is_welcome:
                tally.frames += 1
                exchange(sock, websocket.frame(stock.refused(), masked=False), answers.take)
            else:
                messages = [stock.accepted() for _ in range(count - 1)]
                data = websocket.frame(self._welcome(), masked=False)
                data += b"".join(_in_parts(mutator, one, masked=False) for one in messages)
                honest = wire.encode(
                    wire.ReadFile(stream=LAST_STREAM, lease_id="nobody.1", name=b"stdout", offset=0, credit=1)
                )
                data += websocket.frame(honest, masked=False)
                is_last = answers.has(wire.FileChunk, lambda chunk: chunk.stream == LAST_STREAM)
                assert not exchange(sock, data, is_last, pieces=fragments(rng)), "a valid message ended the link"
                data = b"".join(
                    websocket.frame(wire.encode(wire.AcknowledgeReport(seq)), masked=False) for seq in answers.seqs()
                )
                finish(sock, data + _last_frame(mutator, stock, masked=False), answers.take)
                tally.frames += len(messages) + 1
        tally.results.update(type(_decoded(payload)).__name__ for payload in answers.messages)
        tally.results["cut"] += 1

    def check(self) -> None:
        """It dials again, greets, and beats once it is welcomed."""
        with self._accept() as sock:
            sock.sendall(websocket.frame(self._welcome(), masked=False))
            beats: list[int] = []

            def is_third(beat: wire.Heartbeat) -> bool:
                beats.append(beat.beat)
                return len(beats) > 2  # the first one comes with the welcome, the others with time

            if exchange(sock, b"", _Answers().has(wire.Heartbeat, is_third)):
                raise Hang("the agent hung up on an honest control plane")

    def _accept(self) -> socket.socket:
        """The connection of an agent that has greeted; those that it gave up while nobody listened are passed over."""
        deadline = time.monotonic() + HANG_SECONDS
        while select.select([self._listener], [], [], max(0.0, deadline - time.monotonic()))[0]:
            sock, _ = self._listener.accept()
            sock.settimeout(HANG_SECONDS)
            with contextlib.suppress(ConnectionError):
                websocket.accept_upgrade(sock)
                if sock.recv(1, socket.MSG_PEEK):
                    return sock
            sock.close()
        raise Hang(f"the agent did not dial again within {HANG_SECONDS:g} s")

    def _welcome(self) -> bytes:
        return wire.encode(
            wire.Welcome(protocol=wire.PROTOCOL, version=__version__, epoch=1, hold_ms=60_000, heartbeat_ms=200)
        )
