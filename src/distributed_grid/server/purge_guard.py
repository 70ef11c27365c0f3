"""Guard of a purge: the files of a node are removed only if nobody loses by it.

Results are files that an ended job has made or changed and that nobody has fetched: with any of them the purge is
refused. The output of ended attempts is copied here first, so that it can be read afterwards. Files that cannot be
inspected count as present. If the agent is not connected, the script that SSH runs on the node reads them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from distributed_grid.adapters.child_process import Say
from distributed_grid.agent.files.job_dir import STDERR, STDOUT, is_output_home, mark_home
from distributed_grid.agent.files.result_listing import EVERYTHING, count_results
from distributed_grid.api.answers.cluster import NodeResult, UnfetchedResult
from distributed_grid.control.agent_files import AttemptFiles, FilesGone, RemoteFiles
from distributed_grid.control.grid import Grid
from distributed_grid.domain.deliveries import Delivery, DeliveryEnd
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.moves import MOVE_PREFIX, Move
from distributed_grid.domain.rows import decode_as, decode_row
from distributed_grid.errors import GridError, ProtocolError, Refused, Unreachable
from distributed_grid.ports import Store
from distributed_grid.reactor.offloading.process_moves import JOB_PREFIX
from distributed_grid.server.workers.output_collector import MAX_ATTEMPTS, Haul, OutputReader, attempts_on, copy_output

MAX_JOBS = 10_000
"""Ended jobs of a node whose results are counted, the newest."""
MAX_OUTPUT_BYTES = 1024**3
MAX_LISTED, MAX_NAMED = 1_000, 10
MAX_DELIVERIES = 100
AT_ONCE = 4
INSIST = "--discard-results"
FILES_PER_QUESTION = 1_000
Count = Annotated[int, Meta(ge=0)]
Counted = tuple[Count, Count] | str
"""Number and bytes of the files of an attempt, or the reason why they cannot be counted."""
Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
T = TypeVar("T")


class _Listing(Struct, frozen=True):
    results: dict[str, Counted]


class _OutputParts(Struct, frozen=True):
    parts: list[tuple[str, str, str]]
    more: bool
    starts: dict[str, Count] = {}


class StoppedNodeFiles:
    """Files of attempts on a node whose agent is not connected.

    Output is asked for many attempts at a time: a question costs a new session.
    """

    def __init__(self, ask: Ask) -> None:
        """`ask` runs an operation of the script on the node."""
        self._ask = ask
        self._ahead: list[tuple[str, str, int]] = []
        self._parts: dict[tuple[str, str, int], tuple[int, bytes]] = {}

    async def list_results(self, attempts: Mapping[str, str]) -> dict[str, Counted]:
        """Results of attempts, each given with the digest of its shipped manifest; without those that left none."""
        results: dict[str, Counted] = {}
        ahead = list(attempts.items())
        while ahead:
            asked, ahead = dict(ahead[:FILES_PER_QUESTION]), ahead[FILES_PER_QUESTION:]
            answer = _checked(await self._ask("list-results", {"attempts": asked}), _Listing)
            results |= {attempt: counted for attempt, counted in answer.results.items() if attempt in asked}
        return results

    def expect(self, files: Iterable[tuple[str, str]]) -> None:
        """Announce the output files that will be read, by attempt and name, in this order."""
        self._ahead = [(attempt, name, 0) for attempt, name in files]

    async def read(self, node: str, lease_id: str, name: bytes, offset: int, most: int) -> tuple[int, bytes]:
        """The next part of an output file, perhaps shorter than `most`; empty at its end."""
        file = (lease_id, name.decode(), offset)
        if file not in self._parts:
            await self._fetch(file)
        start, data = self._parts.pop(file, (offset, b""))
        return start, data[:most]

    async def _fetch(self, first: tuple[str, str, int]) -> None:
        """Fetch parts of a file and of those that are read next, with the end of each that was sent whole."""
        asked = [first, *(file for file in self._ahead if file[:2] != first[:2])][:FILES_PER_QUESTION]
        answer = _checked(await self._ask("read-output", {"files": asked}), _OutputParts)
        try:
            parts = {(attempt, name): base64.b64decode(data, validate=True) for attempt, name, data in answer.parts}
        except (binascii.Error, ValueError):
            raise ProtocolError("the node sent output that is damaged") from None
        cut = answer.parts[-1][:2] if answer.more and answer.parts else None
        done: set[tuple[str, str, int]] = set()
        for attempt, name, offset in asked:
            data = parts.get((attempt, name), b"")
            done.add((attempt, name, offset))
            start = answer.starts.get(f"{attempt}/{name}", offset)
            self._parts[attempt, name, offset] = (start, data)
            if (attempt, name) == cut:
                break
            self._parts[attempt, name, start + len(data)] = (start + len(data), b"")
        self._ahead = [file for file in self._ahead if file not in done]


def _checked(answer: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as problem:
        raise ProtocolError(f"the node sent something else than what was asked for: {problem}") from None


class PurgeRefused(Refused):
    """The files of a node may not be removed; `results` are those that were never fetched, if that is the reason."""

    def __init__(self, message: str, results: Sequence[UnfetchedResult] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results[:MAX_LISTED])

    def result_on(self, node: str) -> NodeResult:
        return NodeResult(node_id=node, ok=False, detail=str(self), results=self.results)


class PurgeGuard:
    def __init__(
        self,
        grid: Grid,
        files: AttemptFiles,
        remote: RemoteFiles,
        jobs: Path,
        *,
        max_jobs: int = MAX_JOBS,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self._max_jobs, self._max_output_bytes = max_jobs, max_output_bytes
        self._grid = grid
        self._files = files
        self._remote = remote
        self._jobs = jobs

    async def check(
        self,
        node: str,
        examined: set[str],
        *,
        discard: bool = False,
        stopped: StoppedNodeFiles | None = None,
        say: Say = lambda step: None,
    ) -> None:
        """Return if the files of a node may be removed; PurgeRefused if not, or if that is unknown.

        A later check of the same node skips the attempts in `examined`. With `discard` results do not count, and output
        that cannot be copied is given up. `stopped` reads the files of a node whose agent is not connected.
        """
        if not discard:
            say("looking for results that were not fetched")
            jobs, is_all = await self._grid.query(lambda store: unfetched_jobs(store, node, self._max_jobs))
            by_attempt = {job.attempts[-1].lease_id: job for job in jobs if job.attempts[-1].lease_id not in examined}
            by_attempt = {name: job for name, job in by_attempt.items() if not self._files.is_here(job.attempts[-1])}
            try:
                counted = await self._count(by_attempt, stopped)
            except GridError as failure:
                last = next(iter(by_attempt.values())).id
                jobs_text = "1 job" if len(by_attempt) == 1 else f"{len(by_attempt)} jobs"
                raise PurgeRefused(
                    f"{node} cannot be asked for the results of {jobs_text} that were not fetched, the last is {last}: "
                    f"{failure}; remove them with {INSIST}"
                ) from failure
            if counted:
                results, texts = [], []
                for lease_id, count in counted.items():
                    files, size, unknown = (0, 0, count) if isinstance(count, str) else (*count, "")
                    results.append(UnfetchedResult(by_attempt[lease_id].id, files, size, unknown))
                    amount = unknown or f"{files} file{'' if files == 1 else 's'}, {_size(size)}"
                    texts.append(f"{by_attempt[lease_id].id} ({amount})")
                named = ", ".join(texts[:MAX_NAMED])
                rest = f" and {len(results) - MAX_NAMED} more" if len(results) > MAX_NAMED else ""
                raise PurgeRefused(
                    f"{node} has results that were never fetched: {named}{rest}; "
                    f"fetch them with: grid jobs fetch JOB, or remove them with {INSIST}",
                    results,
                )
            if not is_all:
                raise PurgeRefused(
                    f"more than {self._max_jobs:,} jobs have ended on {node}, and only the results of the last ones "
                    f"can be looked for; remove them all with {INSIST}"
                )
            examined.update(by_attempt)
        problem = await self._keep_output(node, stopped)
        if problem and discard:
            say(f"output is lost: {problem}")
        elif problem:
            raise PurgeRefused(f"the output of jobs on {node} cannot be kept: {problem}; remove it with {INSIST}")

    # ------------------------------------------------------------------ results

    async def _count(self, by_attempt: dict[str, Job], stopped: StoppedNodeFiles | None) -> dict[str, Counted]:
        """Results of attempts, newest first; without those that left none."""
        slots = asyncio.Semaphore(AT_ONCE)
        results: dict[str, Counted] = {}

        async def count(lease_id: str, job: Job) -> None:
            async with slots:
                try:
                    listed = await self._files.find(job.attempts[-1], EVERYTHING, job.command.workdir)
                except FilesGone:
                    return
                except Unreachable:
                    raise
                except GridError as failure:
                    results[lease_id] = str(failure)
                    return
            counted = count_results(listed.entries)
            if counted[0]:
                results[lease_id] = counted

        try:
            async with asyncio.TaskGroup() as group:
                for lease_id, job in by_attempt.items():
                    group.create_task(count(lease_id, job))
        except ExceptionGroup as failed:
            if stopped is None or not isinstance(failed.exceptions[0], Unreachable):
                raise failed.exceptions[0] from None
            results = await stopped.list_results({name: job.command.workdir for name, job in by_attempt.items()})
        return {lease_id: results[lease_id] for lease_id in by_attempt if lease_id in results}

    # ------------------------------------------------------------------ output

    async def _keep_output(self, node: str, stopped: StoppedNodeFiles | None) -> str:
        """Copy the output of the ended attempts of a node; the problem of one that could not be copied, or empty."""
        attempts = await self._grid.query(lambda store: attempts_on(store, node))
        lost = "there are too many attempts" if len(attempts) > MAX_ATTEMPTS else ""
        missing = await asyncio.to_thread(self._without_output, attempts[:MAX_ATTEMPTS])
        limit = self._max_output_bytes
        haul = Haul(limit, limit_text=f"it is larger than {_size(limit)} with that of the others")
        try:
            try:
                await self._copy(self._remote, node, missing, haul)
            except Unreachable:
                if stopped is None:
                    raise
                missing = await asyncio.to_thread(self._without_output, missing)
                stopped.expect((lease_id, name) for lease_id in missing for name in (STDOUT, STDERR))
                await self._copy(stopped, node, missing, haul)
        except OSError as failure:
            return f"{failure.strerror or failure}"
        except GridError as failure:
            return str(failure)
        return lost or (haul.lost[0] if haul.lost else "")

    def _without_output(self, attempts: Sequence[str]) -> list[str]:
        return [lease_id for lease_id in attempts if not is_output_home(str(self._jobs), lease_id)]

    async def _copy(self, reader: OutputReader, node: str, attempts: Sequence[str], haul: Haul) -> None:
        for lease_id in attempts:
            folder, lost = self._jobs / lease_id, len(haul.lost)
            await asyncio.to_thread(os.makedirs, folder, 0o700, exist_ok=True)
            for name in (STDOUT, STDERR):
                await copy_output(reader, node, lease_id, folder / name, haul)
            if len(haul.lost) == lost:
                await asyncio.to_thread(mark_home, str(self._jobs), lease_id, only_output=True)


def unfetched_jobs(store: Store, node: str, max_jobs: int) -> tuple[list[Job], bool]:
    """Ended jobs of a node without a fetch, newest first; and False if the node has more ended jobs than `max_jobs`."""
    rows = store.ended(Job.kind, node=node, limit=max_jobs + 1)
    jobs = [decode_as(Job, row.blob) for row in rows[:max_jobs]]
    ran = [job for job in jobs if job.attempts and job.attempts[-1].started_at_ms]
    return [job for job in ran if not is_fetched(store, job)], len(rows) <= max_jobs


def is_fetched(store: Store, job: Job) -> bool:
    """True if files of an ended job were delivered or fetched, or returned by its move. A pattern without a match has
    fetched nothing."""
    rows = store.ended(Delivery.kind, key=job.uid, limit=MAX_DELIVERIES)
    for delivery in (decode_row(Delivery.kind, row.blob) for row in rows):
        assert isinstance(delivery, Delivery)
        is_whole = not set(EVERYTHING).isdisjoint(delivery.order.patterns)
        if delivery.end is DeliveryEnd.DELIVERED and (delivery.delivered.files or is_whole):
            return True
    if not job.uid.startswith(JOB_PREFIX):
        return False
    moves = store.ended(Move.kind, key=MOVE_PREFIX + job.uid.removeprefix(JOB_PREFIX), limit=1)
    return any(isinstance(move := decode_row(Move.kind, row.blob), Move) and move.is_returned for row in moves)


def _size(size: int) -> str:
    """A size in the largest unit that gives at least 1: `1.2 GB`."""
    if size < 1024:
        return f"{size} byte{'' if size == 1 else 's'}"
    amount, units = size / 1024, ["KB", "MB", "GB", "TB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.4g} {units[0]}"
