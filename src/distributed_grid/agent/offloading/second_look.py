"""Second look at the original of a move, while it stands still: the same inventory as at the request.

Facts of a frozen process can wait for a file system that hangs, so the look has a time limit of its own; what cannot be
read in time counts as changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from distributed_grid.agent.offloading.move_journal import OriginalProcess
from distributed_grid.agent.offloading.process_inventory import ProcessInventory, Surroundings
from distributed_grid.domain.processes import ProcessLook
from distributed_grid.errors import GridError
from distributed_grid.scheduling.offloading.processes import changes_text, process_changes

LOOK_SECONDS = 5.0
log = logging.getLogger(__name__)


async def look_again(original: OriginalProcess, first: ProcessLook, surroundings: Callable[[], Surroundings]) -> str:
    """The reason why the original may not be ended; empty where it is as it was at the request."""
    try:
        around = surroundings()
        async with asyncio.timeout(LOOK_SECONDS):
            return await asyncio.to_thread(_changes_of, original, first, around)
    except TimeoutError:
        return f"it could not be looked at a second time within {LOOK_SECONDS:.0f} s"
    except (GridError, OSError, ValueError) as failure:
        log.warning("no second look at process %d", original.pid, exc_info=failure)
        return f"it could not be looked at a second time: {failure}"


def _changes_of(original: OriginalProcess, first: ProcessLook, around: Surroundings) -> str:
    found = ProcessInventory().scan(around, pid=original.pid, measures_memory=False)
    if not found or (found[0].pid_start, found[0].boot) != (original.start, original.boot):
        return "it could not be looked at a second time: it has ended"
    return changes_text(process_changes(first, found[0]))
