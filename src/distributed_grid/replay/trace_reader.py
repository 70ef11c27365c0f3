"""Trace files: any supported format, compressed or not, and the grid's own event log as `grid events --json` prints it.

In an event log a job ran for as long as its last run took, from `started` to `stopped`; a plain lease from `granted` to
its end. What the grid asked for by itself, to balance nodes, is not replayed. Nodes have what they declared, or, where
the log begins after that, the most that was lent there at once.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import AUTOMATIC_PREFIX, GRID_USER
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice, Priority, normalized_custom
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput
from distributed_grid.replay.traces import LoggedJob, Trace, make_trace, read_nodes, read_pods, read_swf

MOST = 2**53
LEASE_ENDS = frozenset({"released", "expired", "withdrawn"})
PREEMPTED = "preempted"
"""The end of a plain lease; a job is only asked to go."""


class _Story:
    """What the log says of one request."""

    def __init__(self, at_ms: int, request: Request, data: dict[str, Any]) -> None:
        self.at_ms = at_ms
        self.request = request
        self.retries = _count(data, "retries")
        self.deadline_in_ms = _count(data, "deadline_in_ms")
        self.is_job = data.get("job_id") is not None
        self.began_ms: int | None = None
        self.ended_ms: int | None = None

    def logged(self, last_ms: int) -> LoggedJob | None:
        """What can be replayed; what was still going on when the log ended ran until then."""
        if self.began_ms is None:
            return None
        run_ms = max((last_ms if self.ended_ms is None else self.ended_ms) - self.began_ms, 1)
        return LoggedJob(self.at_ms, self.request, run_ms, self.retries, self.is_job, self.deadline_in_ms)


def read_events(name: str, lines: Iterable[str]) -> Trace:
    """The requests of a log that ran, and the nodes in it."""
    stories: dict[str, _Story] = {}
    nodes: dict[str, Node] = {}
    lent = _Lent()
    last_ms = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _event(name, number, line)
        last_ms = max(last_ms, event["at_ms"])
        try:
            _take(event, stories, nodes, lent)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, BadInput) as wrong:
            detail = f"{wrong.args[0]!r} is missing" if isinstance(wrong, KeyError) else str(wrong)
            raise BadInput(f"{name}, line {number}: {detail}") from None
    work = [story.logged(last_ms) for story in stories.values()]
    for node in lent.nodes():
        nodes.setdefault(node.name, node)
    never = work.count(None)
    left_out = {"that never ran": never} if never else {}
    return make_trace(name, [one for one in work if one is not None], nodes.values(), left_out)


def _event(name: str, number: int, line: str) -> dict[str, Any]:
    """One line; its moment in milliseconds is added."""
    try:
        event = json.loads(line)
        at_ms = round(datetime.fromisoformat(event["time"]).timestamp() * 1000)
        if not isinstance(event["type"], str) or not isinstance(event["subject"], str):
            raise ValueError("type and subject are texts")
        return {**event, "at_ms": at_ms, "data": event.get("data") or {}}
    except json.JSONDecodeError as wrong:
        raise BadInput(f"{name}, line {number}: not JSON: {wrong.msg}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadInput(f"{name}, line {number}: not an event: it needs type, time and subject") from None


def _take(event: dict[str, Any], stories: dict[str, _Story], nodes: dict[str, Node], lent: _Lent) -> None:
    kind, at_ms, data, subject = event["type"], event["at_ms"], event["data"], event["subject"]
    if kind == "node-declared" and data:
        nodes[subject] = Node(subject, capacity=_capacity(data))
    if kind == "requested" and not (event.get("user") == GRID_USER and subject.startswith(AUTOMATIC_PREFIX)):
        request = _request(subject, event.get("user") or "somebody", data)
        stories[subject] = _Story(at_ms, request, data)
    uid = _request_of(subject)
    story = stories.get(uid)
    if story is None:
        return
    is_over = kind in LEASE_ENDS or (kind == PREEMPTED and not story.is_job)
    if kind == "granted":
        story.began_ms, story.ended_ms = (at_ms, None) if not story.is_job else (story.began_ms, story.ended_ms)
        for victim in (data.get("choice") or {}).get("displaced", ()):
            lent.give_back(_request_of(victim))
        lent.take(uid, data.get("gang") or [event.get("node_id") or ""], story.request.ask)
    elif kind == "started":
        story.began_ms, story.ended_ms = at_ms, None
    elif kind == "stopped" or (is_over and not story.is_job):
        story.ended_ms = at_ms
    if is_over:
        lent.give_back(uid)


def _request_of(lease_id: str) -> str:
    """The request that a lease is for: of a job (`job.1`), or of a gang, whose leases (`gang:2`) end together."""
    return lease_id.partition(":")[0].partition(".")[0]


def _request(uid: str, user: str, data: dict[str, Any]) -> Request:
    if not any(data.get(kind) for kind in ("cpu_milli", "memory_bytes", "gpu_milli", "custom")):
        raise BadInput("this request does not say how much it asked for: it was logged by another version")
    request = Request(
        uid,
        user,
        Amounts(
            _count(data, "cpu_milli"),
            _count(data, "memory_bytes"),
            _count(data, "gpu_milli"),
            _count(data, "gpu_memory_bytes"),
            _custom(data),
            tuple(data.get("gpu_models", ())),
        ),
        Priority.parse(data["priority"]),
        prefer=tuple(data.get("prefer", ())),
        require=tuple(data.get("require", ())),
        wait_ms=_count(data, "wait_ms", None),
        duration_ms=_count(data, "duration_ms"),
        target=str(data.get("target", "")),
        team=str(data.get("team", "")),
        strategy=Strategy.parse(data["strategy"]) if data.get("strategy") else None,
        labels=tuple((key, value) for key, _, value in (label.partition("=") for label in data.get("labels", ()))),
        affinity=tuple(data.get("affinity", ())),
        anti_affinity=tuple(data.get("anti_affinity", ())),
        group=str(data.get("group", "")),
        gang=_count(data, "gang", 1),
        expects_ms=_count(data, "expects_ms"),
    )
    if (problem := request.problem()) is not None:
        raise BadInput(problem)
    return request


def _count(data: dict[str, Any], name: str, usual: int | None = 0) -> int:
    """A number of a record; without a usual one it must be there."""
    found = int(data[name] if usual is None else data.get(name, usual))
    if not 0 <= found <= MOST:
        raise BadInput(f"{name} is out of range: {found}")
    return found


def _capacity(data: dict[str, Any]) -> Capacity:
    size = _count(data, "gpu_memory_bytes")
    gpus = tuple(GpuDevice(index, size, str(model)) for index, model in enumerate(data.get("gpus", ())))
    return Capacity(_count(data, "cpu_milli"), _count(data, "memory_bytes"), gpus, _custom(data))


def _custom(data: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    pairs = (pair.partition("=") for pair in data.get("custom", ()))
    return normalized_custom({key: int(count) for key, _, count in pairs})


class _Lent:
    """What was lent on each node at once, at most."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[list[str], Amounts]] = {}
        self._most: dict[str, Amounts] = {}

    def take(self, uid: str, nodes: list[str], ask: Amounts) -> None:
        self._now[uid] = (nodes, ask)
        for node in nodes:
            self._note(node, ask)

    def _note(self, node: str, ask: Amounts) -> None:
        asks = [ask for there, ask in self._now.values() if node in there]
        most = self._most.get(node, Amounts())
        self._most[node] = Amounts(
            max(most.cpu_milli, sum(one.cpu_milli for one in asks)),
            max(most.memory_bytes, sum(one.memory_bytes for one in asks)),
            max(most.gpu_milli, sum(one.gpu_milli for one in asks)),
            max(most.gpu_memory_bytes, *(one.gpu_memory_bytes for one in asks)),
            normalized_custom({**dict(most.custom), **dict(ask.custom)}),
        )

    def give_back(self, uid: str) -> None:
        self._now.pop(uid, None)

    def nodes(self) -> list[Node]:
        return [
            Node(
                name,
                capacity=Capacity(
                    most.cpu_milli,
                    most.memory_bytes,
                    tuple(GpuDevice(index, most.gpu_memory_bytes) for index in range(-(-most.gpu_milli // 1000))),
                    most.custom,
                ),
            )
            for name, most in self._most.items()
            if name
        ]


GZIP = b"\x1f\x8b"
NODE_LISTS = "*node_list*.csv*"


def read_trace(source: str) -> Trace:
    """The trace in a file, or on the standard input (`-`); its format is told by its content, not by its name."""
    name = "standard input" if source == "-" else Path(source).name
    with _opened(source) as file:
        try:
            lines = list(file)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise BadInput(f"{name} cannot be read: {error}") from None
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        return read_events(name, lines)
    if first.startswith("sn,"):
        raise BadInput(f"{name} is a list of nodes: the list of pods is the trace, and looks for this one beside it")
    if first.startswith("name,"):
        return read_pods(name, lines, _nodes_beside(source))
    if first.startswith(";") or first[:1].isdigit():
        return read_swf(name, lines)
    what = "it is empty" if not first else f"its first line is {first[:40]!r}"
    raise BadInput(f"{name} is no trace: {what}; there is SWF, openb pod lists and `grid events --json`")


@contextmanager
def _opened(source: str) -> Iterator[TextIO]:
    if source == "-":
        yield _text(sys.stdin.buffer)
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise BadInput(f"{source}: {error.strerror}") from None
    with file:
        yield _text(file)


def _text(file: BinaryIO) -> TextIO:
    """The lines of a file, unpacked where it is packed."""
    start = file.peek(2)[:2] if isinstance(file, io.BufferedReader) else b""
    unpacked = gzip.GzipFile(fileobj=file) if start == GZIP else file
    return io.TextIOWrapper(unpacked, encoding="utf-8", newline="")


def _nodes_beside(source: str) -> list[Node]:
    """The machines of the node list in the same folder; none where there is no single one."""
    if source == "-":
        return []
    lists = sorted(Path(source).resolve().parent.glob(NODE_LISTS))
    if len(lists) != 1:
        return []
    with _opened(str(lists[0])) as file:
        return read_nodes(lists[0].name, list(file))
