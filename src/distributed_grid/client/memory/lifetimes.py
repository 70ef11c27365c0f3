"""Lifetimes of blocks: renewals while a program runs, and staged blocks, which last only once they are named."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_grid.errors import BlockLost, GridError, NotFound

if TYPE_CHECKING:
    from distributed_grid.api.answers.memory import BlockRow
    from distributed_grid.client.memory.directory import BlockDirectoryClient
    from distributed_grid.memory.client.block_client import BlockClient

RETRY_SECONDS = 5.0
STAGE_SECONDS = 60.0
"""How long an unfinished block lasts after its last renewal."""

log = logging.getLogger(__name__)


@dataclass
class _Renewal:
    every_seconds: float
    renew: Callable[[], object]
    due: float


class Renewals:
    """Renewals of the blocks of a running program, in one thread that starts with the first of them.

    A block that is gone is not renewed again; any other failure is retried soon, well before the block expires. The
    thread ends with the program, and then the blocks expire.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._renewals: dict[str, _Renewal] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._wakes_at = math.inf

    def add(self, name: str, every_seconds: float, renew: Callable[[], object]) -> None:
        """Renew this from now on; under a name that is in use nothing changes."""
        with self._condition:
            if self._stopped or name in self._renewals:
                return
            added = self._renewals[name] = _Renewal(every_seconds, renew, time.monotonic() + every_seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory-renewals", daemon=True)
                self._thread.start()
            elif added.due < self._wakes_at:
                self._condition.notify()

    def remove(self, name: str) -> None:
        """Renew this no more; a second time is harmless. A renewal in progress may still be done."""
        with self._condition:
            self._renewals.pop(name, None)

    def stop(self) -> None:
        """Renew nothing more; safe to call twice."""
        with self._condition:
            self._stopped = True
            self._renewals.clear()
            self._condition.notify()

    def _run(self) -> None:
        while (chosen := self._wait_for_next()) is not None:
            name, renewal = chosen
            try:
                renewal.renew()
                pause = renewal.every_seconds
            except (NotFound, BlockLost):
                self.remove(name)
                continue
            except (GridError, OSError) as failure:
                log.warning("cannot renew %s yet: %s", name, failure)
                pause = min(renewal.every_seconds, RETRY_SECONDS)
            except Exception:  # the outermost loop of the thread: the others are renewed all the same
                log.exception("cannot renew %s yet", name)
                pause = min(renewal.every_seconds, RETRY_SECONDS)
            renewal.due = time.monotonic() + pause

    def _wait_for_next(self) -> tuple[str, _Renewal] | None:
        """The next renewal, once it is due; None after `stop`."""
        with self._condition:
            while not self._stopped:
                first = min(self._renewals.items(), key=lambda item: item[1].due, default=None)
                pause = first[1].due - time.monotonic() if first is not None else None
                if first is not None and pause is not None and pause <= 0:
                    return first
                self._wakes_at = first[1].due if first is not None else math.inf
                self._condition.wait(pause)
            return None


class StagedBlock:
    """A block that gets its name when it is complete; an interrupted writer leaves nothing behind."""

    def __init__(self, directory: BlockDirectoryClient, blocks: BlockClient, block_id: str) -> None:
        self.block_id = block_id
        self._directory = directory
        self._blocks = blocks
        self._lock = threading.Lock()
        self._is_named = False

    def write(self, data: bytes | memoryview, offset: int = 0) -> None:
        """Write a part of it."""
        self._blocks.write(self.block_id, data, offset)

    def renew(self) -> None:
        """Extend its time, as long as it has no name."""
        with self._lock:
            if not self._is_named:
                self._directory.name_block(block_id=self.block_id, name="", ttl_seconds=STAGE_SECONDS)

    def name(self, name: str, *, ttl_seconds: float, meta: str = "") -> BlockRow:
        """Give it its name and its time; the block that had the name is freed."""
        with self._lock:
            self._is_named = True  # from here on it may be the only block of that name: never free it
            answer = self._directory.name_block(block_id=self.block_id, name=name, meta=meta, ttl_seconds=ttl_seconds)
        return answer.block

    def close(self) -> None:
        """Free it, unless it was named."""
        self._blocks.forget(self.block_id)
        if not self._is_named:
            with contextlib.suppress(GridError, OSError):  # never allocated, or no answer: its time ends it
                self._directory.free_block(block_id=self.block_id)
