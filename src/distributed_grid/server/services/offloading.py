"""Requests about moves: what could move, moving it, how moves fare, cancelling them, and consents.

Only the owner of a job or process, or an admin, moves it and sees its command and files; others see the move. A process
is looked at afresh before it is moved: what was found by a scan may have changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.offloading import (
    CommandAdvice,
    ConsentList,
    ConsentRow,
    IsConnected,
    MoveDetail,
    MoveList,
    MoveRow,
    ProposalList,
    ProposalRow,
    WithdrawnConsents,
)
from distributed_grid.control.agent_files import AgentQuestions
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    ConsentGiven,
    ConsentWithdrawn,
    LeaseAsked,
    MoveCancelled,
    MoveRequested,
)
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move, MoveConsent
from distributed_grid.domain.nodes import first_node
from distributed_grid.domain.processes import ProcessInfo
from distributed_grid.domain.rebalancing import (
    WATCHED_RESOURCES,
    PressureReading,
    RebalanceRules,
)
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import BadInput, Conflict, GridError, NotFound, Refused
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.reactor.decision import MoveAnswer
from distributed_grid.scheduling.offloading.processes import changes_text, first_look, one_line, process_changes
from distributed_grid.scheduling.offloading.proposals import Proposal, files_to_check, propose
from distributed_grid.scheduling.pressure.plan import pressed_nodes
from distributed_grid.scheduling.pressure.scan import PressureScan, percent, scan_with_lenders
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, USER, endpoint, get, post
from distributed_grid.server.offloading.move_requests import check_input, job_move, process_move
from distributed_grid.server.pages import HistoryList
from distributed_grid.server.services.records import find_job, find_move

FULL_CPU_MILLI = 950
"""From this level on a node's CPU is full, whatever its marks say."""
ADVISED_ASK = Amounts(cpu_milli=1000)
"""What a command is taken to need of which nothing is known."""
MAX_PID = 2**31
MAX_CHECKS = 8
"""Rounds of questions about the files that processes need on their targets."""
MAX_PLACES = 3
"""Directories of other consents that a refusal names."""
MAX_LOOKS = 5
"""So often a process is looked at some of whose children ended meanwhile."""
_MOVE_ID = re.compile(re.escape(MOVE_PREFIX) + r"[A-Za-z0-9_-]{1,64}")


def _name_move(fields: dict[str, Any]) -> None:
    """Name the move of a REST request after its Idempotency-Key."""
    fields.setdefault("move_id", f"{MOVE_PREFIX}{fields.pop('request_id')}")


class OffloadingService:
    """Answers the requests about moves. Without rules nothing is shared, so nothing moves."""

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        questions: AgentQuestions,
        monitor: Monitor,
        *,
        rules: RebalanceRules | None,
        is_connected: IsConnected,
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._questions = questions
        self._monitor = monitor
        self._sharing = rules
        self._is_connected = is_connected
        self._moves = HistoryList(grid, Move, lambda ledger: ledger.moves.values(), lambda move: move.requested_at_ms)

    # ------------------------------------------------------------------ what could move

    def set_rules(self, rules: RebalanceRules | None) -> None:
        """Go by other rules from now on."""
        self._sharing = rules

    @endpoint(READ, get("/proposals", "moves"))
    async def scan(self, op: requests.ScanOffload, caller: Caller) -> ProposalList:
        """The work of one node, or of all that are above a mark: what could run elsewhere, and why the rest cannot."""
        readings = await self._monitor.readings()
        rules = self._rules
        if op.node:
            await self._check_node(op.node)
            nodes = [op.node]
        else:
            nodes = await self._grid.read(
                lambda ledger, now: pressed_nodes(scan_with_lenders(ledger, readings, rules, now))
            )
        proposals, problems = [], []
        for node in nodes:
            try:
                processes = await self._questions.processes(node)
            except GridError as failure:
                processes = []
                problems.append(f"the processes of {node} are not known: {failure}")
            proposals += await self._propose(node, processes, readings)
        viewer = self._viewer().for_reader(caller.reader)
        return ProposalList([ProposalRow.of(viewer, proposal) for proposal in proposals], problems)

    async def _propose(
        self, node: str, processes: Sequence[ProcessInfo], readings: Sequence[PressureReading], target: str = ""
    ) -> list[Proposal]:
        """Proposals for a node; what a process needs there is looked for on its target."""
        rules = self._rules
        absent: dict[str, Collection[str]] = {}

        def proposals(ledger: Ledger, now: int) -> list[Proposal]:
            scan = scan_with_lenders(ledger, readings, rules, now)
            return propose(scan, node, processes, ledger.consents, target=target, absent=absent)

        found = await self._grid.read(proposals)
        checked: set[tuple[str, tuple[str, int]]] = set()
        for _ in range(MAX_CHECKS):  # where one target lacks something another one is proposed, which is asked, too
            asked = {place: [file for file in files if (place, file) not in checked]
                     for place, files in files_to_check(found).items()}  # fmt: skip
            if not any(asked.values()):
                break
            for place, files in asked.items():
                absent[place] = {*absent.get(place, ()), *await self._missing(node, place, files)}
                checked |= {(place, file) for file in files}
            found = await self._grid.read(proposals)
        return found

    async def _missing(self, node: str, place: str, files: Sequence[tuple[str, int]]) -> Collection[str]:
        """Those of the files that a target lacks; what is not known to be there is taken to be missing."""
        if not files or await self._is_same_machine(node, place):
            return ()
        try:
            return await self._questions.missing_files(place, files)
        except GridError:
            return [path for path, _ in files]

    async def _is_same_machine(self, one: str, other: str) -> bool:
        def is_here(ledger: Ledger, now: int) -> bool:
            return all(name in ledger.nodes and ledger.nodes[name].host == "local" for name in (one, other))

        return await self._grid.read(is_here)

    @property
    def _rules(self) -> RebalanceRules:
        if self._sharing is None:
            raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
        return self._sharing

    @endpoint(READ)
    async def advise(self, op: requests.AdviseCommand, caller: Caller) -> CommandAdvice:
        """Better place to start a command: elsewhere only if its node is pressed and another has room."""
        rules, origin = self._sharing, await self._origin(op.origin, caller)
        if rules is None or not origin:
            return _stay("nothing is shared here" if rules is None else "no node stands for this machine")
        readings = await self._monitor.readings()
        scan = await self._grid.read(lambda ledger, now: scan_with_lenders(ledger, readings, rules, now))
        why = why_pressed(scan, origin)
        if not why:
            return _stay(f"{origin} is not pressed")
        lenders = tuple(scan.lenders(origin))
        if not lenders:
            return _stay(f"{why}, and so is every other node, or none is there")
        request = Request(
            id=f"advice-{secrets.token_hex(8)}", user=caller.user, ask=ADVISED_ASK, prefer=lenders[:1], wait_ms=0
        )
        try:
            answer = await self._grid.dry_run(LeaseAsked(replace(request, anti_affinity=(origin,))))
        except GridError:
            answer = None
        node = answer.choice.node if isinstance(answer, LeaseAnswer) and answer.choice is not None else ""
        if node not in lenders:
            return _stay(f"{why}, and no other node has a core to spare")
        return CommandAdvice(elsewhere=True, target_node=node, reason=f"{why}, and {node} has room")

    async def _origin(self, named: str, caller: Caller) -> str:
        """The node on which a request was typed."""

        def find(ledger: Ledger, now: int) -> str:
            if named in ledger.nodes:
                return named
            local = (node for node in ledger.nodes.values() if node.host == "local")
            return first_node(local) if caller.is_here else ""

        return await self._grid.read(find)

    async def _check_node(self, name: str) -> None:
        def check(ledger: Ledger, now: int) -> None:
            if name not in ledger.nodes:
                raise NotFound(f"no node is called {name!r}")

        await self._grid.read(check)

    # ------------------------------------------------------------------ moving

    @endpoint(USER, post("/moves", "moves", id_field="move_id", adapt=_name_move))
    async def execute(self, op: requests.ExecuteOffload, caller: Caller) -> MoveDetail:
        """Begin to move a job or a process; the same request again is answered with how that move stands."""
        if not _MOVE_ID.fullmatch(op.move_id):
            raise BadInput(
                f"the id of a move is {MOVE_PREFIX} and 1 to 64 letters, digits, - or _, not {op.move_id[:80]!r}"
            )
        try:
            known = await find_move(self._grid, op.move_id, exact=True)
        except NotFound:
            pass
        else:
            caller.must_own(known.user, f"the move {known.id}")
            return await self._view(known)
        if op.target:
            await self._check_node(op.target)
        job = await self._job_named(op.subject)
        move = await self._move_job(op, job, caller) if job is not None else await self._move_process(op, caller)
        answer = await self._grid.handle(MoveRequested(move))
        if not isinstance(answer, MoveAnswer):
            raise Refused(f"{op.subject} could not be moved")
        return await self._view(await find_move(self._grid, answer.move.id, exact=True))

    async def _job_named(self, subject: str) -> Job | None:
        """The job of this name; None where it is a pid that no job is called."""
        try:
            job = await find_job(self._grid, subject)
        except NotFound:
            if not subject.isdecimal():
                raise NotFound(f"{subject!r} is neither a job nor a pid") from None
            return None
        return None if subject.isdecimal() and subject not in (job.id, job.uid) else job

    async def _move_job(self, op: requests.ExecuteOffload, job: Job, caller: Caller) -> Move:
        caller.must_own(job.request.user, f"the job {job.id}")
        if job.is_over:
            raise Refused(f"{job.id} has ended")
        node = await self._node_of(job)
        _check_elsewhere(job.id, node, op.target)
        found = await self._propose(node, (), await self._monitor.readings(), op.target)
        proposal = next((one for one in found if one.job == job.uid), None)
        _check_movable(proposal, job.id, op.target)
        assert proposal is not None
        return job_move(op.move_id, job, proposal, by=caller.user)

    async def _node_of(self, job: Job) -> str:
        """Where a job is, or where it was typed or wanted while it waits."""
        if job.attempt is not None:
            return job.attempt.node
        request = job.request
        named = (*request.prefer, *request.require, request.target, request.origin)
        return next((name for name in named if name), "")

    async def _move_process(self, op: requests.ExecuteOffload, caller: Caller) -> Move:
        pid = int(op.subject)
        if not 1 < pid < MAX_PID:
            raise BadInput(f"{op.subject} is not the pid of a process that could move")
        node = op.node or await self._origin(op.origin, caller)
        if not node:
            raise BadInput("say on which node the process is: -n NODE")
        await self._check_node(node)
        _check_elsewhere(op.subject, node, op.target)
        process = await self._process(node, pid, op.variables if op.consent else ())
        if op.pid_start and process.pid_start != op.pid_start:
            raise Conflict(f"{pid} on {node} is another process by now")
        caller.must_own(process.user, f"the process {pid}")
        found = await self._propose(node, [process], await self._monitor.readings(), op.target)
        proposal = next((one for one in found if one.process is not None and one.process.pid == pid), None)
        _check_movable(proposal, f"{pid} on {node}", op.target)
        assert proposal is not None
        for name, seen, now in (("shape", op.shape, proposal.shape), ("directory", op.directory, process.cwd)):
            if seen and seen != now:
                raise Conflict(f"{pid} on {node} has changed since the scan: its {name} is `{one_line(now)}`")
        check_input(process)
        consent = await self._consent(op, process, proposal)
        if not op.consent and consent.variables:
            again = await self._process(node, pid, consent.variables)
            if again.identity != process.identity:
                raise Conflict(f"{pid} on {node} is another process by now")
            if changes := changes_text(process_changes(first_look(process), again)):
                raise Conflict(f"{pid} on {node} is not moved: {changes}")
            process = again
        freeze_ms = round(1000 * op.freeze_seconds)
        return process_move(op.move_id, process, proposal, consent, freeze_ms=freeze_ms, by=caller.user)

    async def _process(self, node: str, pid: int, variables: Sequence[str]) -> ProcessInfo:
        """A process as it is now. One whose children come and go is looked at again: it may have been in between."""
        for _ in range(MAX_LOOKS):
            found = await self._questions.processes(node, pid, variables)
            if not found:
                raise NotFound(f"no process {pid} of the user of {node}'s agent runs there")
            if not found[0].unreadable:
                break
        return found[0]

    async def _consent(self, op: requests.ExecuteOffload, process: ProcessInfo, proposal: Proposal) -> MoveConsent:
        """The consent of the process's user, given now or remembered; Refused with what to type."""
        consent = MoveConsent(
            user=process.user,
            shape=proposal.shape,
            given_at_ms=0,
            variables=tuple(sorted(dict.fromkeys(op.variables))),
            cwd=process.cwd,
        )
        if op.consent:
            await self._grid.handle(ConsentGiven(consent))
            return consent
        given = await self._grid.read(lambda ledger, now: _consents_for(ledger, consent))
        known = next((one for one in given if one.key == consent.key), None)
        if known is None or (consent.variables and {*consent.variables} != {*known.variables}):
            where = f" -n {op.node}" if op.node else ""
            raise Refused(
                f"moving {op.subject} restarts `{proposal.shape}` in {one_line(process.cwd)} from the beginning on "
                f"{proposal.target}, and a restart repeats side effects: what it has sent or written by now happens "
                f"again; {_narrower(given, known)}if that may be, "
                f"type: grid offload execute {op.subject}{where} --consent [--env NAME]"
            )
        return known

    # ------------------------------------------------------------------ moves

    @endpoint(READ, get("/moves", "moves"))
    async def list(self, op: requests.ListMoves, caller: Caller) -> MoveList:
        """A page of the active moves, and with `all` then of those that have ended, the last ended first."""

        async def all_rows(moves: Sequence[Move]) -> Sequence[Move]:
            return moves

        page = await self._moves.page(op.cursor, op.limit, choose=all_rows, fits=(lambda row: True) if op.all else None)
        viewer = self._viewer().for_reader(caller.reader)
        rows = await self._grid.slices.convert(
            page.rows, lambda move: MoveRow.of(viewer, self._moves.decode(move), self._is_connected)
        )
        return MoveList(rows, more=page.end is not None, next=page.next())

    @endpoint(READ, get("/moves/{name}", "moves", name="move_id"))
    async def get(self, op: requests.GetMove, caller: Caller) -> MoveDetail:
        """One move, over or not."""
        move, viewer = await find_move(self._grid, op.move_id), self._viewer().for_reader(caller.reader)
        return MoveDetail(MoveRow.of(viewer, move, self._is_connected))

    @endpoint(USER, post("/moves/{name}/cancel", "moves", name="move_id"), keeps_config=True)
    async def cancel(self, op: requests.CancelMove, caller: Caller) -> MoveDetail:
        """Leave the original as it was; a move that is over already is left so."""
        move = await find_move(self._grid, op.move_id)
        caller.must_own(move.user, f"the move {move.id}")
        if not move.is_over:
            try:
                await self._grid.handle(MoveCancelled(move.id, caller.user))
            except NotFound:  # it ended a moment ago
                pass
            move = await find_move(self._grid, move.id, exact=True)
        return await self._view(move)

    async def _view(self, move: Move) -> MoveDetail:
        return MoveDetail(MoveRow.of(self._viewer(), move, self._is_connected))

    # ------------------------------------------------------------------ consents

    @endpoint(ADMIN, keeps_config=True)
    async def consents(self, op: requests.ListConsents, caller: Caller) -> ConsentList:
        """The command shapes whose processes may be moved."""
        viewer = self._viewer()
        found = await self._grid.read(lambda ledger, now: sorted(ledger.consents.values(), key=lambda one: one.key))
        return ConsentList([ConsentRow.of(viewer, consent) for consent in found])

    @endpoint(USER, keeps_config=True)
    async def withdraw(self, op: requests.WithdrawConsent, caller: Caller) -> WithdrawnConsents:
        """Withdraw a consent: one's own, or as an admin anybody's."""

        def holders(ledger: Ledger, now: int) -> list[str]:
            return [one.user for one in ledger.consents.values() if one.shape == op.shape]

        users = [user for user in await self._grid.read(holders) if caller.admin or user == caller.user]
        if not users:
            raise NotFound(f"no consent for {op.shape[:200]!r}; `grid offload consents` lists them")
        for user in users:
            await self._grid.handle(ConsentWithdrawn(user, op.shape))
        return WithdrawnConsents(op.shape, users)


def why_pressed(scan: PressureScan, node: str) -> str:
    """What a node is short of; empty where it is of nothing."""
    known = scan.ledger.nodes.get(node)
    if known is None or known.state is not NodeState.ALIVE:
        return ""
    for kind in WATCHED_RESOURCES:
        level = scan.reading(node).level(kind)
        if scan.is_above(node, kind) and level is not None:
            mark = percent(scan.rules.watermarks(kind).high)
            return f"{kind} of {node} is at {percent(level)}, above the mark of {mark}"
    cpu = scan.reading(node).cpu
    return f"the CPU of {node} is full ({percent(cpu)})" if cpu is not None and cpu >= FULL_CPU_MILLI else ""


def _consents_for(ledger: Ledger, asked: MoveConsent) -> Sequence[MoveConsent]:
    """The consents of a user for a command shape, in whatever directory."""
    return [one for one in ledger.consents.values() if (one.user, one.shape) == (asked.user, asked.shape)]


def _narrower(given: Sequence[MoveConsent], known: MoveConsent | None) -> str:
    """Why the consents for this command shape do not cover a process; empty where there are none."""
    if known is not None:
        return f"your consent is for the variables {', '.join(known.variables) or '(none)'} only; "
    places = sorted(one_line(one.cwd) for one in given if one.cwd)
    if places:
        more = f" and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
        return f"your consent is for {', '.join(places[:MAX_PLACES])}{more} only; "
    return "your consent was given to an earlier version, without its directory; " if given else ""


def _check_elsewhere(subject: str, node: str, target: str) -> None:
    if target == node:
        raise Refused(f"{subject} is on {node} already; choose another node with -t")


def _check_movable(proposal: Proposal | None, subject: str, target: str) -> None:
    """Refuse what cannot be moved, with every cause."""
    if proposal is None:
        raise Refused(f"{subject} is no work of its own that could be moved; see: grid offload scan")
    if proposal.movable:
        return
    causes = [obstacle.text for obstacle in proposal.obstacles]
    to = f" to {target}" if target else ""
    raise Refused(f"{subject} cannot be moved{to}: {'; '.join(causes) or 'no way is known'}", causes)


def _stay(reason: str) -> CommandAdvice:
    return CommandAdvice(elsewhere=False, target_node=None, reason=reason)
