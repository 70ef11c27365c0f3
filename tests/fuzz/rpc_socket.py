"""The daemon's Unix socket under mutated requests."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.framing import JSON, Unpacker, frame
from distributed_grid.client.client import Client
from distributed_grid.errors import GridError
from distributed_grid.posix.sockets import short_path
from distributed_grid.server.rest.listener import parse_address
from distributed_grid.state_dir import StateDir
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import Known, make_corpus
from tests.fuzz.target import Tally, exchange, finish, fragments

FRAMES_PER_CONNECTION = 60
EFFECTIVE = 0.02  # of the valid requests that change something, so many are sent: the ledger is not to grow for ever
HONEST_NODES = ("here", "honest")
KNOWN: Known = {
    "request_id": lambda rng: f"id-{rng.randrange(200)}",
    "argv": lambda rng: rng.choice((["true"], ["false"], ["/nonexistent"], ["true", "é", ""])),
    "env": lambda rng: rng.choice(({}, {"A": "b"})),
    "cwd": lambda rng: rng.choice(("", "/")),
    "workdir": lambda rng: "",
    "job_id": lambda rng: rng.choice(("finished", "", "id-3", "nobody", f"job{rng.randrange(50)}")),
    "id": lambda rng: rng.choice(("finished", "id-1", "nobody")),
    "subject": lambda rng: rng.choice((None, "finished", "liar0")),
    "node": lambda rng: rng.choice(("", "liar0", "nobody")),
    "target": lambda rng: rng.choice(("liar0", "honest", "")),
    "resource_type": lambda rng: rng.choice(("cpu", "memory", "gpu", "custom")),
    "resources": lambda rng: rng.choice(({}, {"memory": 0.1}, {"gpu": 1})),
    "amount": lambda rng: rng.choice((1.0, 0.5, 1e9)),
    "strategy": lambda rng: rng.choice(("", "spread", "node_specific")),
    "priority": lambda rng: rng.choice(("low", "medium", "high")),
    "wait_seconds": lambda rng: rng.choice((0.0, 0.01)),
    "timeout_seconds": lambda rng: rng.choice((0.0, 5.0)),
    "duration_seconds": lambda rng: rng.choice((0.1, 1.0)),
    "grace_seconds": lambda rng: 0.1,
    "retries": lambda rng: 0,
    "require": lambda rng: rng.choice(([], ["liar0"], ["here"])),
    "prefer": lambda rng: [],
    "labels": lambda rng: [],
    "affinity": lambda rng: rng.choice(([], ["finished"])),
    "gang": lambda rng: 1,
    "limit": lambda rng: rng.randrange(1, 20),
    "size": lambda rng: rng.choice((1, 4096, 2**20)),
    "ttl_seconds": lambda rng: 1.0,
    "listen": lambda rng: "",
    "protocol": lambda rng: 2,
    "version": lambda rng: __version__,
    "config": lambda rng: None,
    "config_path": lambda rng: None,
}
NEVER = (requests.StopDaemon, requests.AttachRay)
CHANGING = (
    requests.RequestLease,
    requests.RequestBoost,
    requests.SubmitJob,
    requests.RunInBoost,
    requests.RunInLease,
    requests.AllocateBlock,
    requests.CreateToken,
    requests.CreateJoinToken,
    requests.DrainNode,
)
STREAMED = (
    requests.ListEvents,
    requests.ReadLogs,
    requests.FetchFiles,
    requests.DrainNode,
    requests.ManageCluster,
    requests.TrainPredictor,
)


def is_harmful(op: requests.Message) -> bool:
    """Whether a valid request would end the daemon, move its port, reach other machines or stop honest work."""
    if isinstance(op, (*NEVER, requests.DetachRay)):
        return True
    if isinstance(op, requests.KeepRunning) and op.listen:
        try:
            parse_address(op.listen)
        except GridError:
            return False
        return True
    if isinstance(op, requests.ClientHello):  # a newer client or another config makes it exit
        return op.version != __version__ or op.config is not None or op.config_path is not None
    if isinstance(op, requests.ManageCluster):
        return True
    return isinstance(op, requests.DrainNode) and op.node in HONEST_NODES


def is_long(op: requests.Message) -> bool:
    """Whether its answer may take its time: nothing can be asked after it on the same connection."""
    if isinstance(op, requests.ListEvents | requests.ReadLogs):
        return op.follow
    return isinstance(
        op,
        requests.RequestLease
        | requests.RequestBoost
        | requests.WaitForJob
        | requests.AllocateBlock
        | requests.DrainNode
        | requests.CommandInLease,
    )


class RpcSocket:
    """Requests in JSON, many on one connection; the last one of each breaks the framing or is not waited for."""

    name = "daemon socket"

    def __init__(self, state_dir: Path, seed: str) -> None:
        self._state_dir = StateDir(state_dir)
        kinds = [kind for kind in requests.REQUEST_TYPES if kind not in NEVER]
        self._corpus = make_corpus(kinds, 12, Random(seed), KNOWN)
        self._queries = [message for message in self._corpus if message["op"].startswith(("get_", "list_", "find_"))]

    def check(self) -> None:
        with Client(self._state_dir, may_start=False) as client:
            assert client.call("get_daemon_info")["pid"], "the daemon does not know itself"

    def run(self, frames: int, rng: Random, tally: Tally) -> None:
        mutator = Mutator(rng, as_json=True)
        for count in tally.batches(frames, FRAMES_PER_CONNECTION):
            self._talk(mutator, count, tally)

    def _talk(self, mutator: Mutator, count: int, tally: Tally) -> None:
        tally.connections += 1
        bodies = [self._body(mutator, may_take_long=False) for _ in range(count - 1)]
        with self._connect() as sock:
            answers = _Answers([is_streamed for _, is_streamed in bodies], tally)
            data = b"".join(frame(JSON, body) for body, _ in bodies)
            if bodies and exchange(sock, data, answers.take, pieces=fragments(mutator.rng)):
                tally.results["cut"] += 1
                return
            self._end(sock, mutator, tally)

    def _end(self, sock: socket.socket, mutator: Mutator, tally: Tally) -> None:
        """One last frame: broken, or one whose answer nobody waits for."""
        tally.frames += 1
        if mutator.rng.random() < 0.7:
            whole = frame(JSON, mutator.encode(mutator.rng.choice(self._queries)))
            head = mutator.damaged(whole[:5]) + whole[5:] if mutator.rng.random() < 0.5 else mutator.damaged(whole)
            finish(sock, head)
            tally.results["cut"] += 1
        else:
            sock.sendall(frame(JSON, self._body(mutator, may_take_long=True)[0]))
            tally.results["left"] += 1

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        with short_path(self._state_dir.socket) as path:
            sock.connect(path)
        return sock

    def _body(self, mutator: Mutator, *, may_take_long: bool) -> tuple[bytes, bool]:
        """A mutated request that does no harm, and whether its answer is a stream."""
        while True:
            body = mutator.encoded(mutator.rng.choice(self._corpus))
            try:
                op = requests.parse(body)
            except GridError:
                return body, False
            if is_harmful(op) or (is_long(op) and not may_take_long):
                continue
            if isinstance(op, CHANGING) and mutator.rng.random() > EFFECTIVE:
                continue
            return body, isinstance(op, STREAMED)


class _Answers:
    """Counts the answers to requests that were sent together; they come in the same order."""

    def __init__(self, streamed: list[bool], tally: Tally) -> None:
        self._streamed = streamed
        self._tally = tally
        self._unpacker = Unpacker()
        self._count = 0

    def take(self, chunk: bytes) -> bool:
        """Whether all have been answered with this."""
        for kind, body in self._unpacker.feed(chunk):
            message: Any = msgspec.json.decode(body) if kind == JSON else {}
            error = message.get("error") if isinstance(message, dict) else None
            if self._streamed[self._count] and not error and not message.get("done"):
                continue
            kind_of_answer = str(error["type"]) if isinstance(error, dict) else "answered"
            assert kind_of_answer != "Bug", json.dumps(error)
            self._tally.results[kind_of_answer] += 1
            self._tally.frames += 1
            self._count += 1
        return self._count == len(self._streamed)
