"""Sessions of agents at the control plane: their reports become events, effects become their orders.

Nothing here depends on an event loop: the daemon drives it with asyncio, the simulator in virtual time. An effect for a
node whose agent is not connected waits: it is derived again from the ledger when the agent greets. An order without a
report is sent again with the agent's heartbeats, every so often; so is the stop of an attempt that the agent has and
the ledger has not.

Liveness does not wait for durability. A greeting of a known node and every heartbeat are answered at once (`answer`),
regardless of the store: that renews holds. All other messages (`received`) wait for the store, in an inbox for each
agent. Once a node is declared lost, no heartbeat renews its hold: its connection is closed, and its agent greets anew.

Attempts that a node does not start are ended here (`StartDeadlines`): a live node that starts nothing gets nothing
more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid import __version__
from distributed_grid.control.agent_messages import (
    Report,
    event_of,
    event_of_move,
    heartbeat_reply,
    order_of,
    orders_to,
    unknown_moves,
)
from distributed_grid.domain.events import (
    AgentRejected,
    AttemptsGone,
    AttemptsListed,
    EpochReported,
    Event,
    HeartbeatReceived,
    NodeDeclared,
    NodeHeard,
    StartsExpired,
    WorkerEndAnnounced,
)
from distributed_grid.domain.jobs import Attempt, Ending
from distributed_grid.domain.leases import first_fence, is_plausible_epoch
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import START_MS, Node, NodeObservation
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import AttemptEffect, PauseAttempt, StartAttempt, attempt_effects, overdue
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from distributed_grid.wire import (
    HEARTBEAT_MS,
    MAX_ATTEMPTS,
    MAX_CONNECTIONS_PER_PEER,
    MAX_STARTING,
    PROTOCOL,
    AcknowledgeMarks,
    AcknowledgeReport,
    AgentHello,
    AgentSide,
    AttemptEndedReport,
    AttemptsPage,
    AttemptStartedReport,
    FromAgent,
    Heartbeat,
    MoveOrder,
    MoveReport,
    OwnerRules,
    RejectAgent,
    StopAttemptOrder,
    Welcome,
)

UNWANTED_GRACE_MS = 5_000
MAX_WAITING_REPORTS = 1_000
RESEND_MS = 5_000  # without a report an order is sent again, and to each agent not more often
MAX_RESENT = 200  # orders at once; the others have their turn the next time
log = logging.getLogger(__name__)
T = TypeVar("T")
Greeting = AgentHello | AttemptsPage
SessionMessage = AgentHello | AttemptsPage | Heartbeat | Report | MoveReport


class LedgerOwner(Protocol):
    """Owner of the ledger: decides events and makes them durable."""

    @property
    def ledger(self) -> Ledger: ...

    def now_ms(self) -> int:
        """The grid's time."""

    def observe(self, event: HeartbeatReceived) -> None:
        """Take a heartbeat in at once; nothing of it is stored."""

    async def handle(self, event: Event) -> Any:
        """Return when it is durable. Raises the refusal."""

    async def handle_all(self, events: Iterable[Event]) -> None:
        """The same for several at once; raises one of their refusals."""

    async def handle_with_retry(self, event: Event) -> None:
        """Return when it is durable, however long that takes. Raises a refusal that is final."""

    async def read(self, question: Callable[[Ledger, int], T]) -> T:
        """The answer of the ledger, once it is durable."""


class NodeRegistry:
    """Facts about nodes that the ledger does not have: owner rules, and the settings of the config."""

    max_output_bytes = 0
    """Bytes of stdout, and of stderr, that a node keeps of an attempt; 0: all."""
    max_files_bytes = 0
    """Bytes that an attempt may have in its directories on a node; 0: no limit."""
    max_connections_per_peer = MAX_CONNECTIONS_PER_PEER
    """Connections of one address to the memory server of a node."""

    def described(self, node: Node, capacity: Capacity) -> Node:
        """The node with the capacity that counts."""
        return node

    def owner_rules(self, name: str) -> OwnerRules | None:
        """Owner rules of a node; None: its agent does not give way."""
        return None

    def newcomer(self, name: str) -> Node | None:
        """A node that was admitted and that the ledger does not have yet; None for a foreign one."""
        return None

    def is_running(self, attempt: Attempt) -> bool:
        """True if a process of an attempt is seen on this machine, though its agent has no trace of it."""
        return False

    def memory_certificate(self, node: str) -> tuple[bytes, bytes]:
        """Certificate of a node's memory server and its key; empty if the network is trusted."""
        return b"", b""


class LentMemoryOrders(Protocol):
    """Orders about the memory that a node lends, when its agent (re)appears."""

    async def unknown(self, node: str) -> None:
        """Forget the address of a new agent's memory server until it reports it."""

    def catch_up(self, node: str) -> None:
        """Send all pending orders about blocks to this node."""

    def resend(self, node: str) -> None:
        """Send the orders again that were not reported done, and to free copies that no block has."""


class StartDeadline(Struct):
    """Deadline of the start of an ordered attempt: by the control plane's clock, and by the boot clock of the agent,
    which is never later. Both only grow, and no order ever names a later time."""

    until_ms: int
    until_boot_ms: int = 0


class StartDeadlines:
    """Deadlines of all ordered attempts without a reported start. Volatile, as holds are: after a restart of the
    control plane each gets its whole time again with the next order."""

    def __init__(self) -> None:
        self._of_node: dict[str, dict[str, StartDeadline]] = {}

    def order(self, node: Node | None, seen: NodeObservation | None, lease_id: str, now: int) -> int:
        """Time for the start of an attempt, counted from the heartbeat that its order names; 0 and less: too late. It
        begins with the first order; a later order does not extend it."""
        start_ms = node.start_ms if node is not None else START_MS
        name = node.name if node is not None else ""
        deadline = self._of_node.setdefault(name, {}).setdefault(lease_id, StartDeadline(now + start_ms))
        at_ms, beat = (seen.at_ms, seen.beat) if seen is not None else (now, 0)
        start_by_ms = deadline.until_ms - at_ms
        if start_by_ms > 0:
            deadline.until_boot_ms = max(deadline.until_boot_ms, beat + start_by_ms)
        return start_by_ms

    def extend(self, node: Node, message: Heartbeat, now: int) -> None:
        """A heartbeat has arrived: an attempt that it names may have started, or may yet start."""
        deadlines = self._of_node.get(node.name)
        if not deadlines:
            return
        named = deadlines if len(message.starting) >= MAX_STARTING else message.starting
        for lease_id in named:
            deadline = deadlines.get(lease_id)
            if deadline is not None:
                deadline.until_ms = max(deadline.until_ms, now + node.start_ms)
                deadline.until_boot_ms = max(deadline.until_boot_ms, message.beat + node.start_ms)

    def expired(self, ledger: Ledger, name: str, now: int) -> tuple[str, ...]:
        """Attempts that the node has not started and cannot start any more.

        The agent has sent a heartbeat after the deadline on its own clock without naming the attempt: it does not have
        it, and refuses an order that arrives later. If its heartbeats have no clock, an attempt that it may have
        started ended with the hold: only the answer to a heartbeat that names it could have renewed that.
        """
        deadlines, node, seen = self._of_node.get(name), ledger.nodes.get(name), ledger.observations.get(name)
        if not deadlines or node is None or seen is None:
            return ()
        for lease_id in [started for started in deadlines if not _is_unstarted(ledger, started, name)]:
            del deadlines[lease_id]
        late = []
        for lease_id, deadline in deadlines.items():
            over_ms = now - deadline.until_ms - HOLD_GRACE_MS
            if over_ms >= 0 and (seen.beat >= deadline.until_boot_ms or (node.hold_ms and over_ms >= node.hold_ms)):
                late.append(lease_id)
        return tuple(late[:MAX_RESENT])


def _is_unstarted(ledger: Ledger, lease_id: str, node: str) -> bool:
    """True if neither the start nor the end of an attempt on a node was reported."""
    lease = ledger.leases.get(lease_id)
    job = ledger.jobs.get(lease.job) if lease is not None else None
    attempt = job.attempt if job is not None else None
    return attempt is not None and (attempt.lease_id, attempt.node) == (lease_id, node) and not attempt.pid


class AgentSessions:
    """The agent of each node, and the messages about attempts; `agents` get orders."""

    def __init__(
        self,
        grid: LedgerOwner,
        registry: NodeRegistry,
        agents: dict[str, AgentSide],
        memory: LentMemoryOrders | None = None,
    ) -> None:
        self.on_move_report: Callable[[MoveReport], None] | None = None
        self._grid = grid
        self._registry = registry
        self._agents = agents
        self._memory = memory
        self._greeted: dict[tuple[AgentSide, str], AgentHello] = {}
        self._unwanted: dict[AgentSide, dict[str, int]] = {}  # attempts to be stopped, with the fences of the orders
        self._starts_in_hand: set[tuple[AgentSide, str]] = set()  # reported starts that are being taken in
        self._ordered: dict[str, set[str]] = {}  # by node: the leases whose attempts were ever ordered there
        self._since_ms = grid.now_ms()
        self._resent: dict[str, tuple[int, int]] = {}  # by node: when, and how many orders so far
        self._starts = StartDeadlines()
        self.versions: dict[str, tuple[str, str]] = {}
        """Versions of the package and of Python of the last agent of each node."""

    def answer(self, message: AgentHello | Heartbeat, via: AgentSide) -> None:
        """Answer messages that need no store: the greeting of a known node, and a heartbeat, which renews holds."""
        if isinstance(message, Heartbeat):
            if self._is_served_by(message.node, via):
                if self._is_lost(message.node):
                    # without an answer its hold stays over; a greeting that is being taken in is waited for
                    if (via, message.node) not in self._greeted:
                        log.warning("%s was declared lost: its agent is to greet anew", message.node)
                        via.close("this node was declared lost")
                    return
                jump = message.clock_jump
                seen = HeartbeatReceived(
                    name=message.node,
                    usage=message.usage,
                    beat=message.beat,
                    generation=message.generation,
                    yields=message.yields,
                    repeats=message.capacity is None,
                    clock_jump_ms=jump.by_ms if jump is not None else 0,
                    clock_waits_ms=jump.waits_ms if jump is not None else 0,
                )
                self._grid.observe(seen)
                node, now = self._grid.ledger.nodes.get(message.node), self._grid.now_ms()
                if node is not None:
                    self._starts.extend(node, message, now)
                via.send(heartbeat_reply(self._grid.ledger, message, now))
            return
        ledger = self._grid.ledger
        node = ledger.nodes.get(message.node)
        if node is not None and message.epoch <= epoch_on(ledger, message.node):
            self._send_welcome(message, node, epoch_on(ledger, message.node), via)

    def _is_lost(self, name: str) -> bool:
        seen = self._grid.ledger.observations.get(name)
        return seen is not None and seen.lost

    async def received(self, message: SessionMessage, via: AgentSide) -> None:
        """Take in a message of an agent, after `answer`. Raises the refusal."""
        if isinstance(message, Heartbeat):
            await self._act_on(message, via)
        elif isinstance(message, AgentHello):
            # Orders follow with the first heartbeat: they count from it.
            node, epoch = await self._grid.read(
                lambda ledger, now: (ledger.nodes.get(message.node), ledger.counters["epoch"])
            )
            node = node or self._registry.newcomer(message.node)
            if node is None:
                via.send(RejectAgent(f"no node is called {message.node} in this grid"))
                return
            if node.is_pull:
                via.send(RejectAgent(f"{message.node} is registered as a pull worker, which has no agent"))
                return
            if not is_plausible_epoch(message.epoch, epoch):
                reason = f"it has seen epoch {message.epoch} of a control plane, and this one is only at {epoch}"
                reason += ": its epoch.json is damaged or another grid's; remove that file and start the agent again"
                await self._reject(reason, via)
                return
            if message.capacity is not None:
                await self._grid.handle_with_retry(
                    NodeDeclared(self._registry.described(node, message.capacity.value()))
                )
            if message.epoch > epoch:  # restored from a backup: fences begin above those that this agent has seen
                await self._grid.handle_with_retry(EpochReported(message.node, message.epoch))
            epoch = await self._grid.read(lambda ledger, now: epoch_on(ledger, message.node))
            if self._memory is not None:
                await self._memory.unknown(message.node)
            if (via, message.node) not in self._greeted:
                self._send_welcome(message, node, epoch, via)
            if not message.more:
                await self._compare_listed(message)
        elif isinstance(message, AttemptsPage):
            hello = self._greeted.get((via, message.node))
            if hello is None or not hello.more:
                return
            hello = replace(hello, attempts=hello.attempts + message.attempts, more=message.more)
            self._greeted[via, message.node] = hello
            if len(hello.attempts) > MAX_ATTEMPTS:
                del self._greeted[via, message.node]
                await self._reject(f"it lists more than {MAX_ATTEMPTS} attempts", via)
            elif not hello.more:
                await self._compare_listed(hello)
        elif isinstance(message, MoveReport):
            event = event_of_move(message, self._grid.ledger, via.nodes)
            try:
                if event is not None:
                    await self._grid.handle_with_retry(event)
            except GridError as refusal:
                log.warning("a report of %s about %s was refused: %s", ", ".join(via.nodes), message.move_id, refusal)
            via.send(AcknowledgeReport(message.seq))
            if self.on_move_report is not None:
                self.on_move_report(message)
        else:
            # Reports are taken in together, in the agent's order: a short attempt has ended in the ledger before its
            # start is compared with it.
            attempt = (via, message.lease_id)
            if isinstance(message, AttemptStartedReport):
                self._starts_in_hand.add(attempt)
            elif isinstance(message, AttemptEndedReport):
                self._starts_in_hand.discard(attempt)
            try:
                await self._grid.handle_with_retry(event_of(message, via.nodes))
                via.send(AcknowledgeReport(message.seq))
                await self._compare(message, via)
            finally:
                if isinstance(message, AttemptStartedReport):
                    self._starts_in_hand.discard(attempt)

    def order_moves(self, orders: Iterable[MoveOrder]) -> None:
        """Send orders about moves to the agents of their nodes; those of agents that are away are derived again."""
        for order in orders:
            agent = self._agents.get(order.node)
            if agent is not None:
                agent.send(order)

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended; its node is doubted when it stays silent."""
        for name in via.nodes:
            if self._agents.get(name) is via:
                del self._agents[name]
            self._greeted.pop((via, name), None)
        self._unwanted.pop(via, None)

    def perform(self, effect: AttemptEffect) -> None:
        """Send the order of an effect to its agent, if that is connected."""
        agent, attempt, ledger = self._agents.get(effect.node), effect.job.attempt, self._grid.ledger
        if agent is None:
            return
        node, seen = ledger.nodes.get(effect.node), ledger.observations.get(effect.node)
        if attempt is not None and seen is not None and any(row.lease_id == attempt.lease_id for row in seen.missing):
            return  # another agent than this node's may run the attempt: then this one gets no orders about it
        start_by_ms = 0
        # A stop of an attempt without a reported start counts, too: the last control plane may have ordered its start.
        if attempt is not None and not attempt.pid and not isinstance(effect, PauseAttempt):
            start_by_ms = self._starts.order(node, seen, attempt.lease_id, self._grid.now_ms())
        if isinstance(effect, StartAttempt):
            if start_by_ms <= 0:  # it is ended soon, or its agent has it
                return
            self._live_orders(effect.node).add(effect.lease.id)
        agent.send(order_of(ledger, effect, max(start_by_ms, 0)))

    def _live_orders(self, node: str) -> set[str]:
        """Leases whose attempts were ordered on a node, without most of the ended ones."""
        ordered = self._ordered.setdefault(node, set())
        if len(ordered) > 2 * len(self._grid.ledger.leases) + 1000:
            ordered.intersection_update(self._grid.ledger.leases)
        return ordered

    def _is_served_by(self, node: str, via: AgentSide) -> bool:
        return (via, node) in self._greeted or self._agents.get(node) is via

    async def _act_on(self, message: Heartbeat, via: AgentSide) -> None:
        """Take in a heartbeat. A part that cannot be made durable is dropped: the next one comes soon."""
        greeted = self._greeted.get((via, message.node))
        if not self._is_served_by(message.node, via) or (greeted is not None and greeted.more):
            return  # not ours, or its greeting is not complete
        if self._is_lost(message.node):
            return
        seen = self._grid.ledger.observations.get(message.node)
        if seen is None or seen.usage is None:  # it was said before its greeting could be answered
            self.answer(message, via)
        try:
            node = self._grid.ledger.nodes.get(message.node)
            if message.capacity is not None and node is not None:
                described = self._registry.described(node, message.capacity.value())
                if described.capacity != node.capacity:
                    await self._grid.handle(NodeDeclared(replace(node, capacity=described.capacity)))
            if message.end is not None and message.node in self._grid.ledger.workers:
                end = message.end  # before the reports behind it: resources that they free must not be used there
                await self._grid.handle(
                    WorkerEndAnnounced(message.node, end.why, end.ends_in_ms, withdrawn=end.withdrawn)
                )
            await self._grid.handle(NodeHeard(message.node))
            if message.marks:
                await self._grid.handle_all(event_of(mark, via.nodes) for mark in message.marks)
                via.send(AcknowledgeMarks(message.beat))
            if message.outgrown:
                await self._grid.handle_all(event_of(held, via.nodes) for held in message.outgrown)
        except GridError as failure:
            if not failure.retryable:
                raise
            return
        hello = self._greeted.get((via, message.node))
        if hello is not None:  # the first one on this connection: orders count from it
            del self._greeted[via, message.node]
            self._agents[message.node] = via
            compared, now = await self._grid.read(lambda ledger, now: (compare_attempts(ledger, hello), now))
            self._resent[hello.node] = (now, 0)
            for lease_id in compared.unwanted:
                log.info("%s still has %s, which has ended: stopping it", hello.node, lease_id)
                self._stop_unwanted(lease_id, compared.fence, via)
            for effect in compared.missing:
                self.perform(effect)
            if hello.moves or self._grid.ledger.moves_at.get(hello.node):
                unknown, pending = await self._grid.read(
                    lambda ledger, now: (unknown_moves(ledger, hello, via.nodes), orders_to(ledger, hello.node))
                )
                self.order_moves([*unknown, *pending])
            if self._memory is not None:
                self._memory.catch_up(message.node)
        else:
            await self._resend_overdue(message.node, via)
            late = self._starts.expired(self._grid.ledger, message.node, self._grid.now_ms())
            if late and self._agents.get(message.node) is via:
                log.warning("%s did not start %s in time", message.node, ", ".join(late[:10]))
                await self._grid.handle_with_retry(StartsExpired(message.node, late))
        # Attempts seen on this machine without a trace at its agent are given up once they are seen no more.
        seen = self._grid.ledger.observations.get(message.node)
        if seen is None or all(attempt.until_ms for attempt in seen.missing):
            return
        missing = {attempt.lease_id for attempt in seen.missing if not attempt.until_ms}
        attempts = [job.attempt for job in self._grid.ledger.jobs_of(message.node) if job.attempt is not None]
        running = {
            attempt.lease_id
            for attempt in attempts
            if attempt.lease_id in missing and self._registry.is_running(attempt)
        }
        if missing - running:
            await self._grid.handle_with_retry(AttemptsGone(message.node, tuple(sorted(missing - running))))

    async def _compare_listed(self, hello: AgentHello) -> None:
        """Compare the attempts of an agent, all listed, with the ledger's."""
        unlisted = await self._grid.read(lambda ledger, now: unlisted_attempts(ledger, hello))
        running = tuple(attempt.lease_id for attempt in unlisted if self._registry.is_running(attempt))
        ordered = tuple(sorted(self._live_orders(hello.node)))
        listed = AttemptsListed(
            node=hello.node,
            attempts=hello.attempts,
            boot=hello.boot,
            machine=hello.machine,
            running=running,
            ordered=ordered,
            ordered_since_ms=self._since_ms,
        )
        await self._grid.handle_with_retry(listed)

    async def _reject(self, reason: str, via: AgentSide) -> None:
        await self.record_rejection(reason, via)  # before its connection, and the messages on it, end
        via.send(RejectAgent(reason))

    async def record_rejection(self, reason: str, via: AgentSide) -> None:
        """Record the rejection of an agent, as the reason why its node is not alive."""
        log.warning("the agent of %s is rejected: %s", ", ".join(via.nodes), reason)
        try:
            await self._grid.handle_all(AgentRejected(name, reason) for name in via.nodes)
        except GridError as failure:  # the agent connects again
            log.warning("the rejection was not recorded: %s", failure)

    def _send_welcome(self, hello: AgentHello, node: Node, epoch: int, via: AgentSide) -> None:
        """Let this agent serve its node. Another one is not answered from now on: its attempts end with its hold."""
        self._agents.pop(hello.node, None)
        for other, name in [greeted for greeted in self._greeted if greeted[1] == hello.node]:
            del self._greeted[other, name]
        self._greeted[via, hello.node] = hello
        self.versions[hello.node] = (hello.version, hello.python)
        via.send(self._make_welcome(node, epoch, via))

    def _make_welcome(self, node: Node, epoch: int, via: AgentSide) -> Welcome:
        # the owner of its machine is the same for all its nodes
        rules = next(filter(None, map(self._registry.owner_rules, via.nodes)), None)
        return Welcome(
            protocol=PROTOCOL,
            version=__version__,
            epoch=epoch,
            hold_ms=node.hold_ms,
            heartbeat_ms=HEARTBEAT_MS,
            owner=rules,
            max_output_bytes=self._registry.max_output_bytes,
            max_files_bytes=self._registry.max_files_bytes,
        )

    def send_owner_rules(self) -> None:
        """Send every connected agent its current rules; known ones change nothing."""
        for via in dict.fromkeys(self._agents.values()):
            node = self._grid.ledger.nodes.get(via.nodes[0])
            if node is not None:
                via.send(self._make_welcome(node, epoch_on(self._grid.ledger, node.name), via))

    def _stop_unwanted(self, lease_id: str, fence: int, via: AgentSide) -> None:
        """Order the stop of an attempt that the ledger does not have, again and again until its end is reported."""
        unwanted = self._unwanted.setdefault(via, {})
        if len(unwanted) < MAX_ATTEMPTS:
            unwanted[lease_id] = fence
        reason = "nobody waits for it any more"
        via.send(StopAttemptOrder(lease_id, fence, Ending.CANCELLED, reason, UNWANTED_GRACE_MS))

    async def _compare(self, message: Report, via: AgentSide) -> None:
        """Compare a reported attempt with the ledger: an ended one is not unwanted any more, and a started one may have
        been given up meanwhile."""
        if isinstance(message, AttemptEndedReport):
            self._unwanted.get(via, {}).pop(message.lease_id, None)
        if not isinstance(message, AttemptStartedReport) or not _is_unwanted(self._grid.ledger, message, via):
            return
        is_unwanted = await self._grid.read(lambda ledger, now: _is_unwanted(ledger, message, via))  # and it is durable
        if is_unwanted and (via, message.lease_id) in self._starts_in_hand:  # else the agent has reported its end, too
            log.info("%s began on %s after it was given up: stopping it", message.lease_id, ", ".join(via.nodes))
            self._stop_unwanted(message.lease_id, message.fence, via)

    async def _resend_overdue(self, node: str, via: AgentSide) -> None:
        """Send orders again that the agent has not reported done, every so often and not too many."""
        seen = self._grid.ledger.observations.get(node)
        last, sent = self._resent.get(node, (0, 0))
        if seen is None or seen.at_ms - last < RESEND_MS or self._agents.get(node) is not via:
            return
        self._resent[node] = (seen.at_ms, sent)
        if overdue(self._grid.ledger, node, seen.at_ms - RESEND_MS):
            effects = await self._grid.read(lambda ledger, now: overdue(ledger, node, now - RESEND_MS))
            first = sent % max(len(effects), 1)
            for effect in (effects[first:] + effects[:first])[:MAX_RESENT]:
                self.perform(effect)
            self._resent[node] = (seen.at_ms, sent + MAX_RESENT)
        for lease_id, fence in list(self._unwanted.get(via, {}).items())[:MAX_RESENT]:
            self._stop_unwanted(lease_id, fence, via)
        if self._grid.ledger.moves_at.get(node):
            self.order_moves(await self._grid.read(lambda ledger, now: orders_to(ledger, node)))
        if self._memory is not None:
            self._memory.resend(node)


def unlisted_attempts(ledger: Ledger, hello: AgentHello) -> list[Attempt]:
    """Attempts on a node of this machine, whose processes can be seen, that its agent has not listed."""
    node, listed = ledger.nodes.get(hello.node), set(hello.attempts)
    attempts = (job.attempt for job in ledger.jobs_of(hello.node) if node is not None and not node.hold_ms)
    return [attempt for attempt in attempts if attempt is not None and attempt.lease_id not in listed]


class AgentInbox:
    """Messages of one agent that wait for the ledger, in order and bounded.

    Of heartbeats only the last one of each node waits. Beyond `MAX_WAITING_REPORTS` messages further ones are dropped:
    the connection is closed once the waiting ones are in the ledger, and the agent sends the others again.
    """

    def __init__(self) -> None:
        self._waiting: list[FromAgent] = []
        self._last_heartbeats: dict[str, Heartbeat] = {}
        self.has_overflowed = False

    def put(self, message: FromAgent) -> bool:
        """False if the inbox is full."""
        if isinstance(message, Heartbeat):
            last = self._last_heartbeats.get(message.node)
            if last is None:
                self._waiting.append(message)
            elif message.capacity is None and last.capacity is not None:
                message = replace(message, capacity=last.capacity)
            self._last_heartbeats[message.node] = message
            return True
        if len(self._waiting) >= MAX_WAITING_REPORTS:
            self.has_overflowed = True
        if not self.has_overflowed:
            self._waiting.append(message)
        return not self.has_overflowed

    def take_waiting(self) -> list[FromAgent]:
        """Messages that may be handled together: all waiting ones, or a page of a greeting alone, since the messages
        with it count after it."""
        waiting = self._waiting
        greetings = [index for index, message in enumerate(waiting) if isinstance(message, Greeting)]
        count = len(waiting) if not greetings else max(greetings[0], 1)
        taken, self._waiting = waiting[:count], waiting[count:]
        return [
            self._last_heartbeats.pop(message.node) if isinstance(message, Heartbeat) else message for message in taken
        ]


class AttemptComparison(Struct):
    missing: list[AttemptEffect]
    unwanted: list[str]
    fence: int


def compare_attempts(ledger: Ledger, hello: AgentHello) -> AttemptComparison:
    """Compare the attempts that an agent has listed with the effects of the ledger for its node."""
    missing = attempt_effects(ledger, node=hello.node)
    unwanted = [lease_id for lease_id in hello.attempts if lease_id not in ledger.leases]
    newer = max(epoch_on(ledger, hello.node), hello.epoch) + 1  # than the control plane that started it
    return AttemptComparison(missing, unwanted, first_fence(newer))


def _is_unwanted(ledger: Ledger, message: AttemptStartedReport, via: AgentSide) -> bool:
    """True if a started attempt is not a lease of its node any more."""
    lease = ledger.leases.get(message.lease_id)
    return lease is None or lease.node not in via.nodes


def epoch_on(ledger: Ledger, name: str) -> int:
    """The epoch that counts on a node: the grid's, or a later one of its own."""
    node = ledger.nodes.get(name)
    return max(ledger.counters.get("epoch", 0), node.epoch if node is not None else 0)
