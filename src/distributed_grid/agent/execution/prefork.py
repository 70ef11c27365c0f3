"""A process that waits for an attempt, sees it through as its shim, and waits for the next.

Most of what a short command costs would otherwise be the fork and the pages that are copied after it.

Rule 1. It takes the next attempt only when nothing of the last is left: no process, no control group, no limit.
Rule 2. It takes the next only when the agent has heard of the last one's end. Until then the agent may pause, move
        or measure what is below this process, and has to find nobody else there.
Rule 3. It ends with its spawner, and so with its agent: whoever adopts an attempt finds a shim that has no other.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Final, NoReturn

from distributed_grid.agent.execution.shim import Shim
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.timer import DeadlineTimer
from distributed_grid.posix.boot_clock import boot_id

if TYPE_CHECKING:
    from distributed_grid.agent.limits.cgroups import Controllers

BOOT_ID: Final = boot_id()
ATTEMPTS: Final = 200  # then it makes room for a fresh one: nothing collects its garbage
READY: Final = b"+"


class PreforkedShim:
    """Waits at its end of a socket, on which the spawner sends an attempt id, its lock, and a channel to tell on."""

    def __init__(self, root: str, orders: socket.socket, controllers: Controllers) -> None:
        self.root = root
        self.orders = orders
        self.controllers = controllers
        self.alarm = DeadlineTimer()
        self.identity = self._who()

    def serve(self) -> NoReturn:
        """One attempt after another, as long as the rules allow."""
        for left in reversed(range(ATTEMPTS)):
            attempt_id, descriptors = self._next()
            if not attempt_id or not self._see_through(attempt_id, *descriptors) or not left:
                break
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_next` will notice
                self.orders.send(READY)
        os._exit(0)

    def _next(self) -> tuple[str, list[int]]:
        """The next attempt, its lock and its channel; nothing when the spawner ended or needs no spare any more."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.orders, 512, 2)
        except ConnectionResetError:
            return "", []
        return packet.decode(), descriptors

    def _see_through(self, attempt_id: str, lock: int, channel: int) -> bool:
        """Run it; whether there may be another. The lock stays open, and so held, until nothing of it is left."""
        for fd in (lock, channel):
            os.set_inheritable(fd, False)  # unlike those opened here, received ones would go on to the command
        shim = Shim(self.root, attempt_id, lock, channel)
        if not shim.run(self.identity, self.alarm, self.controllers):
            return False
        _wait_until_heard(channel)
        os.close(channel)
        os.close(lock)
        self.identity = self._who()
        return not self.alarm.take(signal.SIGTERM)

    def _who(self) -> dict[str, str | int]:
        """Boot, pid and start time are who it is; what it has waited for so far was not the next attempt's."""
        me = process_tree.look(os.getpid())
        assert me is not None
        return {"boot": BOOT_ID, "pid": me.pid, "start": me.start, "waited_ticks": me.waited_ticks}


def _wait_until_heard(channel: int) -> None:
    """Until nobody listens any more: the agent has heard the end, or is gone."""
    poll = select.poll()
    poll.register(channel, 0)  # an error is reported unasked
    poll.poll()
