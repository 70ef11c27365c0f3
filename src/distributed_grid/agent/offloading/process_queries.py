"""Answers to the control plane's questions about processes and files of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from distributed_grid.agent.offloading.process_inventory import ProcessInventory, Surroundings
from distributed_grid.agent.offloading.work_trees import missing_files
from distributed_grid.domain.processes import ProcessInfo
from distributed_grid.supervision import start_logged
from distributed_grid.wire import (
    MAX_MESSAGE_BYTES,
    MAX_PROCESSES,
    CheckFiles,
    FilesChecked,
    ListProcesses,
    ProcessListing,
    clipped,
    encode,
)

MAX_QUERIES = 8
PAGE_BYTES = MAX_MESSAGE_BYTES // 4


class ProcessQueries:
    """Answers in threads, one after the other: the disk may be slow, and a table of processes long.

    The processes of the machine are those of the node `typed_on`; of other nodes that it has there are none.
    """

    def __init__(
        self,
        typed_on: str,
        surroundings: Callable[[], Surroundings],
        send: Callable[[ProcessListing | FilesChecked], None],
    ) -> None:
        self._typed_on = typed_on
        self._surroundings = surroundings
        self._send = send
        self._inventory = ProcessInventory()
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def received(self, query: ListProcesses | CheckFiles) -> None:
        """Begin to answer; a failure is sent as the answer."""
        if len(self._under_way) >= MAX_QUERIES:
            problem = f"{MAX_QUERIES} questions about processes are not answered yet: a file system may hang"
            self._send(_failed(query, problem))
            return
        task = start_logged(self._answer(query), "a question about processes")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def close(self) -> None:
        """Answer nothing any more. Safe twice."""
        for task in tuple(self._under_way):
            task.cancel()

    async def _answer(self, query: ListProcesses | CheckFiles) -> None:
        async with self._one_at_a_time:
            try:
                if isinstance(query, CheckFiles):
                    missing = await asyncio.to_thread(missing_files, query.files)
                    self._send(FilesChecked(query.stream, tuple(missing)))
                    return
                found: list[ProcessInfo] = []
                if query.node == self._typed_on:
                    around, pid, names = self._surroundings(), query.pid, query.variables
                    found = await asyncio.to_thread(self._inventory.scan, around, pid=pid, variables=names)
            except Exception as failure:  # whatever is wrong with a process here, whoever asked must hear of it
                self._send(_failed(query, f"the processes could not be read: {failure}"))
                return
        pages = list(pages_of(found))
        for number, page in enumerate(pages, 1):
            self._send(ProcessListing(query.stream, tuple(page), more=number < len(pages)))


def pages_of(processes: Sequence[ProcessInfo]) -> Iterator[list[ProcessInfo]]:
    """Pages that fit into a message; one that is empty where there is nothing."""
    page: list[ProcessInfo] = []
    size = 0
    for one in processes:
        length = len(encode(ProcessListing(0, (one,))))
        if page and (len(page) >= MAX_PROCESSES or size + length > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(one)
        size += length
    yield page


def _failed(query: ListProcesses | CheckFiles, problem: str) -> ProcessListing | FilesChecked:
    if isinstance(query, CheckFiles):
        return FilesChecked(query.stream, problem=clipped(problem))
    return ProcessListing(query.stream, problem=clipped(problem))
