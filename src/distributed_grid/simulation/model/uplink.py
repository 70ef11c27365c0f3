"""A simulated agent's end of the link: finds the control plane, and begins anew whenever the link breaks.

Rule 1: a control plane that says nothing for too long is not there, whatever the connection says.
Rule 2: without a link, or before it is welcomed, what is said is dropped: everything that matters is told again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from distributed_grid.simulation.model.network import SimulatedLink
from distributed_grid.wire import FromAgent, ToAgent, Welcome

if TYPE_CHECKING:
    from distributed_grid.simulation.model.agent import SimulatedAgent

SILENCE_MS = 10_000
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 300, 5_000


class Exchange(Protocol):
    """How an agent gets a link: None while there is no way."""

    def dial(self, node: str, uplink: SimulatedUplink) -> SimulatedLink | None: ...


class SimulatedUplink:
    """Keeps one agent connected for as long as it lives."""

    def __init__(self, agent: SimulatedAgent, exchange: Exchange) -> None:
        self.is_up = False
        self.told_at = 0
        self._agent = agent
        self._agenda = agent.agenda
        self._exchange = exchange
        self._link: SimulatedLink | None = None
        self._pause_ms = FIRST_PAUSE_MS

    def dial(self) -> None:
        """Look for the control plane, and greet it."""
        if not self._agent.alive or self._link is not None:
            return
        link = self._link = self._exchange.dial(self._agent.name, self)
        if link is None:
            self._dial_later()
            return
        self.told_at = self._agenda.now
        link.say(self._agent.hello())
        self._agenda.after(SILENCE_MS, lambda: self._mind_silence(link))

    def _dial_later(self) -> None:
        self._agenda.after(round(self._pause_ms * self._agent.random.uniform(0.7, 1.3)), self.dial)
        self._pause_ms = min(round(1.5 * self._pause_ms), LONGEST_PAUSE_MS)

    def _mind_silence(self, link: SimulatedLink) -> None:
        if not self._agent.alive or self._link is not link:
            return
        silent = self._agenda.now - self.told_at
        if silent < SILENCE_MS:
            self._agenda.after(SILENCE_MS - silent, lambda: self._mind_silence(link))
            return
        link.hang_up()
        self.cut_off(link)

    def say(self, message: FromAgent) -> None:
        if self._link is not None and self.is_up:
            self._link.say(message)

    def told(self, message: ToAgent, via: SimulatedLink) -> None:
        """Pass on what the control plane says; what comes on an older link is void."""
        if not self._agent.alive or via is not self._link:
            return
        self.told_at = self._agenda.now
        if isinstance(message, Welcome):
            self.is_up = True
            self._pause_ms = FIRST_PAUSE_MS
        self._agent.told(message)

    def cut_off(self, via: SimulatedLink) -> None:
        """The link is gone; the next one is looked for at once."""
        if self._agent.alive and via is self._link:
            self._link, self.is_up = None, False
            self._dial_later()

    def hang_up(self, *, silently: bool) -> None:
        if self._link is not None:
            self._link.hang_up(silently=silently)
