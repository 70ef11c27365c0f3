"""Simulated network between agents and the control plane: it delays, stalls, breaks, repeats and loses messages.

- A link is a stream. What is lost on it stays lost with everything after it, until the link breaks.
- While a direction is blocked its messages wait; when it opens again they arrive late, even on a link that one side has
  given up meanwhile, or they never do.
- A scrambled route keeps the order of what concerns one lease, and no heartbeat overtakes anything. Everything else may
  overtake. A repeated message comes a second time later on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from distributed_grid.replay.event_queue import EventQueue
from distributed_grid.wire import AgentHello, FromAgent, Heartbeat, ToAgent, Welcome

SILENCE_MS = 10_000
FIRST_PAUSE_MS, MAX_PAUSE_MS = 300, 5_000
BREAK_MS = 15_000
"""A link on which something was lost breaks within this time."""
UP, DOWN = 0, 1
MIN_DELAY_MS, MAX_DELAY_MS = 1, 20
Message = FromAgent | ToAgent | None
"""None is the end of the link."""


class ControlEnd(Protocol):
    """Where agents' messages arrive."""

    def received(self, message: FromAgent, via: SimulatedLink) -> None: ...
    def gone(self, via: SimulatedLink) -> None: ...


class AgentEnd(Protocol):
    """Where the control plane's messages arrive."""

    def received(self, message: ToAgent, via: SimulatedLink) -> None: ...
    def disconnected(self, via: SimulatedLink) -> None: ...


class Route:
    """State of the route to one node, the same for all its links."""

    def __init__(self) -> None:
        self.min_delay_ms = MIN_DELAY_MS
        self.max_delay_ms = MAX_DELAY_MS
        self.blocked = [0, 0]
        self.lose = 0.0
        self.repeat = 0.0
        self.scrambled = False

    @property
    def is_open(self) -> bool:
        """Whether a connection can be made: that takes both directions."""
        return not any(self.blocked)


class SimulatedLink:
    """One connection of an agent, with what is on its way in both directions."""

    def __init__(self, node: str, route: Route, agent: AgentEnd, control: ControlEnd, network: Network) -> None:
        self.node = node
        self._route = route
        self._agent = agent
        self._control = control
        self._network = network
        self._up_at_agent = self._up_at_control = True
        self._lanes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._waiting: tuple[list[Message], list[Message]] = ([], [])
        self._stalled = [False, False]

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node,)

    @property
    def is_over(self) -> bool:
        """Whether nobody can send on it any more."""
        return not (self._up_at_agent or self._up_at_control)

    def send_up(self, message: FromAgent) -> None:
        """From the agent to the control plane."""
        if self._up_at_agent:
            self._post(UP, message)

    def send(self, message: ToAgent) -> None:
        """From the control plane to the agent."""
        if self._up_at_control:
            self._post(DOWN, message)

    def hang_up(self, *, silently: bool = False) -> None:
        """The agent ends it; the control plane hears of that when the news gets through, if there is any."""
        if self._up_at_agent:
            self._up_at_agent = False
            if not silently:
                self._post(UP, None)

    def drop(self, *, silently: bool) -> None:
        """The control plane is gone; without a word when its machine went with it."""
        if self._up_at_control:
            self._up_at_control = False
            if not silently:
                self._post(DOWN, None)

    def close(self, why: str) -> None:
        """The control plane ends it."""
        if self._up_at_control:
            self.drop(silently=False)
            self._control.gone(self)

    def _break(self) -> None:
        for direction in (UP, DOWN):
            self._stalled[direction] = False
            self._post(direction, None)

    def _post(self, direction: int, message: Message) -> None:
        route, random = self._route, self._network.random
        if self._stalled[direction]:
            return
        if route.blocked[direction]:
            self._waiting[direction].append(message)
            return
        if route.lose and message is not None and random.random() < route.lose:
            self._stalled[direction] = True
            self._network.queue.after(random.randrange(BREAK_MS), self._break)
            return
        self._carry(direction, message, self._arrival(direction, message))
        if route.repeat and random.random() < route.repeat and not isinstance(message, AgentHello | Welcome | None):
            self._carry(direction, message, self._network.queue.now + random.randint(1, 4 * route.max_delay_ms))

    def _arrival(self, direction: int, message: Message) -> int:
        """When a message arrives: after its delay, and after what it must not overtake."""
        route, lanes = self._route, self._lanes[direction]
        when = self._network.queue.now + self._network.random.randint(route.min_delay_ms, route.max_delay_ms)
        if not route.scrambled or isinstance(message, Heartbeat | AgentHello | Welcome | None):
            when = max(when, max(lanes.values(), default=0))
            lanes.clear()
            lanes[""] = when
            return when
        lane = getattr(message, "lease_id", "-")
        lanes[lane] = when = max(when, lanes.get(lane, 0), lanes.get("", 0))
        return when

    def _carry(self, direction: int, message: Message, when: int) -> None:
        self._network.queue.at(when, lambda: self._arrive(direction, message))

    def _arrive(self, direction: int, message: Message) -> None:
        if direction == UP and self._up_at_control:
            if message is None:
                self._up_at_control = False
                self._control.gone(self)
            else:
                self._control.received(message, self)  # type: ignore[arg-type]  # only agents send upwards
        elif direction == DOWN and self._up_at_agent:
            if message is None:
                self._up_at_agent = False
                self._agent.disconnected(self)
            else:
                self._agent.received(message, self)  # type: ignore[arg-type]  # only the control plane sends downwards

    def unblocked(self, direction: int) -> None:
        """The direction is open again: what waited arrives now, or (where its sender has gone) perhaps never."""
        waiting = self._waiting[direction][:]
        self._waiting[direction].clear()
        sender_left = not (self._up_at_agent if direction == UP else self._up_at_control)
        if sender_left and self._network.random.random() < 0.5:
            return
        for message in waiting:
            self._post(direction, message)


class Network:
    """All routes and the links on them."""

    def __init__(self, queue: EventQueue, random: Random, nodes: tuple[str, ...]) -> None:
        self.queue = queue
        self.random = random
        self.routes = {node: Route() for node in nodes}
        self._links: dict[str, list[SimulatedLink]] = {node: [] for node in nodes}

    def connect(self, node: str, agent: AgentEnd, control: ControlEnd) -> SimulatedLink:
        """A new link; whoever asks has made sure that the route is open."""
        self._links[node] = [link for link in self._links[node] if not link.is_over]
        link = SimulatedLink(node, self.routes[node], agent, control, self)
        self._links[node].append(link)
        return link

    def drop_all(self, *, silently: bool) -> None:
        """The control plane's end of every link is gone."""
        for links in self._links.values():
            for link in links:
                link.drop(silently=silently)

    def cut(self, node: str) -> None:
        """The control plane ends every link of a node."""
        for link in self._links[node]:
            link.close("")

    def block(self, node: str, direction: int) -> None:
        self.routes[node].blocked[direction] += 1

    def unblock(self, node: str, direction: int) -> None:
        """Undo one `block`; the last one lets what waited go on."""
        route = self.routes[node]
        route.blocked[direction] -= 1
        if not route.blocked[direction]:
            for link in self._links[node][:]:
                link.unblocked(direction)


class Dialer(Protocol):
    """How an agent gets a link: None while there is no way."""

    def dial(self, node: str, uplink: SimulatedUplink) -> SimulatedLink | None: ...


class LinkedAgent(Protocol):
    """The agent behind an uplink."""

    name: str
    alive: bool
    queue: EventQueue
    random: Random

    def postpones(self, call: Callable[[], None]) -> bool:
        """Whether its process is stopped; then this is called when it goes on."""

    def greeting(self) -> Sequence[FromAgent]: ...
    def said(self, message: FromAgent) -> FromAgent:
        """The false answer of a lying agent."""

    def received(self, message: ToAgent) -> None: ...


class SimulatedUplink:
    """Keeps one agent connected for as long as it lives.

    A control plane that says nothing for too long is not there, whatever the connection says. Without a link, or before
    the welcome, messages are dropped: everything that matters is sent again.
    """

    def __init__(self, agent: LinkedAgent, dialer: Dialer) -> None:
        self.is_up = False
        self._agent = agent
        self._queue = agent.queue
        self._dialer = dialer
        self._link: SimulatedLink | None = None
        self._pause_ms = FIRST_PAUSE_MS
        self._received_at = 0

    @property
    def silent_ms(self) -> int:
        """How long ago the control plane said something on this link."""
        return self._queue.now - self._received_at

    def dial(self) -> None:
        """Look for the control plane, and greet it."""
        if not self._agent.alive or self._link is not None or self._agent.postpones(self.dial):
            return
        link = self._link = self._dialer.dial(self._agent.name, self)
        if link is None:
            self._dial_later()
            return
        self._received_at = self._queue.now
        for message in self._agent.greeting():
            link.send_up(self._agent.said(message))
        self._queue.after(SILENCE_MS, lambda: self._check_silence(link))

    def _dial_later(self) -> None:
        self._queue.after(round(self._pause_ms * self._agent.random.uniform(0.7, 1.3)), self.dial)
        self._pause_ms = min(round(1.5 * self._pause_ms), MAX_PAUSE_MS)

    def _check_silence(self, link: SimulatedLink) -> None:
        if not self._agent.alive or self._link is not link:
            return
        if self._agent.postpones(lambda: self._check_silence(link)):
            return
        if self.silent_ms < SILENCE_MS:
            self._queue.after(SILENCE_MS - self.silent_ms, lambda: self._check_silence(link))
            return
        link.hang_up()
        self.disconnected(link)

    def send(self, message: FromAgent) -> None:
        if self._link is not None and self.is_up and not self._agent.postpones(lambda: self.send(message)):
            self._link.send_up(self._agent.said(message))

    def received(self, message: ToAgent, via: SimulatedLink) -> None:
        """Pass on what the control plane says; what comes on an older link is void."""
        if not self._agent.alive or via is not self._link:
            return
        if self._agent.postpones(lambda: self.received(message, via)):
            return
        self._received_at = self._queue.now
        if isinstance(message, Welcome):
            self.is_up = True
            self._pause_ms = FIRST_PAUSE_MS
        self._agent.received(message)

    def disconnected(self, via: SimulatedLink) -> None:
        """The link is gone; the next one is dialled soon."""
        if self._agent.postpones(lambda: self.disconnected(via)):
            return
        if self._agent.alive and via is self._link:
            self._link, self.is_up = None, False
            self._dial_later()

    def hang_up(self, *, silently: bool) -> None:
        if self._link is not None:
            self._link.hang_up(silently=silently)
