"""What a keeper was asked to have done: copies made, copies freed.

Rule 1. An order is remembered until it is answered, and given again to a server that was started again.
Rule 2. Frees that come together are asked for together, and told together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from distributed_grid.memory.protocol.control_messages import FreeCopy, MakeReplica, ReplicaMade, batches
from distributed_grid.memory.protocol.ticket import is_copy_id
from distributed_grid.memory.server.copy_file import ENDING
from distributed_grid.memory.supervisor.server_link import ServerLink
from distributed_grid.wire import CopiesFreedReport, CopyMadeReport, MakeCopyOrder

TOGETHER_SECONDS: Final = 0.005


class PendingOrders:
    """The orders of one keeper. `is_wanted` says whether a server runs or is to run; where none is, what is on disk,
    in `spill`, is freed here."""

    def __init__(
        self,
        grip: ServerLink,
        spill: Path,
        *,
        is_wanted: Callable[[], bool],
        tell: Callable[[CopyMadeReport | CopiesFreedReport], None],
    ) -> None:
        self._grip = grip
        self._spill = spill
        self._is_wanted = is_wanted
        self._tell = tell
        self._copying: dict[tuple[str, int], MakeReplica] = {}
        self._to_free: dict[str, bool] = {}  # and whether this server was asked
        self._freed: list[str] = []
        self._later: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Pass on what comes; safe twice."""
        self._stopped = False

    def stop(self) -> None:
        """Pass on nothing more; what was ordered is remembered. Safe twice."""
        self._stopped = True
        if self._later is not None:
            self._later.cancel()
            self._later = None

    # ------------------------------------------------------------------ given and answered

    def make_copy(self, order: MakeCopyOrder) -> None:
        """Have a copy made elsewhere, and tell how that went; an order given twice is done once."""
        wanted = MakeReplica(order.source, order.generation, order.target, order.ticket)
        if not self._is_wanted():
            self._tell(CopyMadeReport(order.source, order.generation, "no memory server runs here"))
            return
        self._copying[order.source, order.generation] = wanted
        self._grip.say(wanted)

    def made(self, answer: ReplicaMade) -> None:
        """A copy was made, or could not be."""
        if self._copying.pop((answer.source, answer.generation), None) is not None:
            self._tell(CopyMadeReport(answer.source, answer.generation, answer.problem))

    def free(self, copies: Iterable[str]) -> None:
        """Have these let go of, and tell; those that are not here are told, too."""
        for copy in copies:
            self._to_free.setdefault(copy, False)
        self._soon()

    def freed(self, copies: Iterable[str]) -> None:
        """These were let go of."""
        self._freed += [copy for copy in copies if self._to_free.pop(copy, None) is not None]
        self._soon()

    # ------------------------------------------------------------------ one server after another

    def begin_anew(self) -> None:
        """There is another server, which was asked for nothing yet."""
        self._to_free = dict.fromkeys(self._to_free, False)

    def give_again(self) -> None:
        """The server serves: it is asked for all that is not answered."""
        for wanted in self._copying.values():
            self._grip.say(wanted)
        self._soon()

    # ------------------------------------------------------------------ together

    def _soon(self) -> None:
        """Pass on what came together, together."""
        if self._later is None and not self._stopped:
            self._later = asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._pass_on)

    def _pass_on(self) -> None:
        self._later = None
        if self._grip.serving is not None:
            for names in batches([copy for copy, asked in self._to_free.items() if not asked]):
                self._grip.say(FreeCopy(names))
                self._to_free.update(dict.fromkeys(names, True))
        elif not self._is_wanted():
            self._free_without_server()
        if self._freed:
            freed, self._freed = tuple(self._freed), []
            self._tell(CopiesFreedReport(freed))

    def _free_without_server(self) -> None:
        """Nothing is in memory; what is on disk is deleted here."""
        for copy in self._to_free:
            if is_copy_id(copy):
                (self._spill / f"{copy}{ENDING}").unlink(missing_ok=True)
            self._freed.append(copy)
        self._to_free.clear()
