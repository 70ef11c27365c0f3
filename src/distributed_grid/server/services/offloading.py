"""Requests about moves: proposals, their execution, state and cancellation, and consents.

Only the owner of a job or process, or an admin, moves it and sees its command and files; others see the move. A process
is looked at afresh before it is moved: what was found by a scan may have changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import Struct
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
from distributed_grid.server.pages import HistoryList, select_page
from distributed_grid.server.services.records import find_ended_move, find_move, find_other_job, known_job

FULL_CPU_MILLI = 950
"""From this level on a node's CPU is full, whatever its marks say."""
ADVISED_ASK = Amounts(cpu_milli=1000)
"""Assumed needs of a command without a history."""
MAX_PID = 2**31
MAX_CHECKS = 8
"""Rounds of questions about the files that processes need on their targets."""
MAX_PLACES = 3
"""Directories of other consents that a refusal names."""
MAX_LOOKS = 5
"""Looks at a process whose children end meanwhile."""
_MOVE_ID = re.compile(re.escape(MOVE_PREFIX) + r"[A-Za-z0-9_-]{1,64}")


def _name_move(fields: dict[str, Any]) -> None:
    """Name the move of a REST request after its Idempotency-Key."""
    fields.setdefault("move_id", f"{MOVE_PREFIX}{fields.pop('request_id')}")


class SubjectOfMove(Struct, frozen=True):
    """The job or the process that a request names, and the move with its id, if there is one already."""

    move: Move | None
    job: Job | None
    other_jobs: Sequence[Job]  # living ones, of which one may have the name as a prefix
    node: str  # of a process
    unknown_nodes: Sequence[str]


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
        """The work of one node, or of all that are above a mark: targets of the movable part, obstacles of the rest."""

        def nodes_of(ledger: Ledger, now: int) -> Sequence[str]:
            if not op.node:
                return pressed_nodes(self._scan(ledger, now))
            _check_node(ledger, op.node)
            return [op.node]

        proposals, problems = [], []
        for node in await self._grid.read(nodes_of):
            try:
                processes = await self._questions.processes(node)
            except GridError as failure:
                processes = []
                problems.append(f"the processes of {node} are not known: {failure}")
            found, _ = await self._propose(node, processes, is_shown=True)
            proposals += found
        viewer = self._viewer().for_reader(caller.reader)
        return ProposalList([ProposalRow.of(viewer, proposal) for proposal in proposals], problems)

    def _scan(self, ledger: Ledger, now: int) -> PressureScan:
        return scan_with_lenders(ledger, self._monitor.readings_now(ledger, now), self._rules, now)

    async def _propose(
        self, node: str, processes: Sequence[ProcessInfo], target: str = "", *, is_shown: bool = False
    ) -> tuple[list[Proposal], Sequence[MoveConsent]]:
        """Proposals for a node, with the consents that there are; the targets of processes are asked for the files that
        these need. Confidence is that after the answers only where it `is_shown`."""
        absent: dict[str, Collection[str]] = {}

        def read(ledger: Ledger, now: int) -> tuple[list[Proposal], Sequence[MoveConsent], set[str]]:
            proposals = propose(self._scan(ledger, now), node, processes, ledger.consents, target=target, absent=absent)
            local = {name for name, known in ledger.nodes.items() if known.host == "local"}
            return proposals, tuple(ledger.consents.values()), local

        proposals, consents, local = await self._grid.read(read)
        checked: set[tuple[str, tuple[str, int]]] = set()
        for _ in range(MAX_CHECKS):  # where one target lacks something another one is proposed, which is asked, too
            asked = {place: [file for file in files if (place, file) not in checked]
                     for place, files in files_to_check(proposals).items()}  # fmt: skip
            if not any(asked.values()):
                break
            lacks = False
            for place, files in asked.items():
                missing = await self._missing(place, files) if files and not {node, place} <= local else ()
                absent[place] = {*absent.get(place, ()), *missing}
                checked |= {(place, file) for file in files}
                lacks = lacks or bool(missing)
            if lacks or is_shown:
                proposals, consents, local = await self._grid.read(read)
        return proposals, consents

    async def _missing(self, place: str, files: Sequence[tuple[str, int]]) -> Collection[str]:
        """Those of the files that a target lacks; a file that is not known to be there is taken to be missing."""
        try:
            return await self._questions.missing_files(place, files)
        except GridError:
            return [path for path, _ in files]

    @property
    def _rules(self) -> RebalanceRules:
        if self._sharing is None:
            raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
        return self._sharing

    @endpoint(READ)
    async def advise(self, op: requests.AdviseCommand, caller: Caller) -> CommandAdvice:
        """Better place to start a command: elsewhere only if its node is pressed and another has room."""
        if self._sharing is None:
            return _stay("nothing is shared here")
        origin, scan = await self._grid.read(
            lambda ledger, now: (_origin(ledger, op.origin, caller), self._scan(ledger, now))
        )
        if not origin:
            return _stay("no node stands for this machine")
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

    # ------------------------------------------------------------------ moving

    @endpoint(USER, post("/moves", "moves", id_field="move_id", adapt=_name_move))
    async def execute(self, op: requests.ExecuteOffload, caller: Caller) -> MoveDetail:
        """Begin to move a job or a process; the same request again is answered with how that move stands."""
        if not _MOVE_ID.fullmatch(op.move_id):
            raise BadInput(
                f"the id of a move is {MOVE_PREFIX} and 1 to 64 letters, digits, - or _, not {op.move_id[:80]!r}"
            )

        def look_up(ledger: Ledger, now: int) -> SubjectOfMove:
            job, others = known_job(self._grid, ledger, op.subject)
            node = op.node or _origin(ledger, op.origin, caller)
            unknown = [name for name in (op.target, node) if name and name not in ledger.nodes]
            return SubjectOfMove(ledger.moves.get(op.move_id), job, others, node, unknown)

        # This read and that of the proposals are the only waits before the first commit: the reactor checks the rest.
        subject = await self._grid.read(look_up)
        known = subject.move or await find_ended_move(self._grid, op.move_id)
        if known is not None:
            caller.must_own(known.user, f"the move {known.id}")
            return await self._view(known)
        if op.target in subject.unknown_nodes:
            raise NotFound(f"no node is called {op.target!r}")
        job, is_pid = subject.job, op.subject.isdecimal()
        if job is None:
            try:
                job = await find_other_job(self._grid, op.subject, subject.other_jobs, exact=is_pid)
            except NotFound:
                if not is_pid:
                    raise NotFound(f"{op.subject!r} is neither a job nor a pid") from None
        if job is not None:
            move = await self._move_job(op, job, caller)
        else:
            move = await self._move_process(op, subject, caller)
        answer = await self._grid.handle(MoveRequested(move))
        if not isinstance(answer, MoveAnswer):
            raise Refused(f"{op.subject} could not be moved")
        return await self._view(await find_move(self._grid, answer.move.id, exact=True))

    async def _move_job(self, op: requests.ExecuteOffload, job: Job, caller: Caller) -> Move:
        caller.must_own(job.request.user, f"the job {job.id}")
        if job.is_over:
            raise Refused(f"{job.id} has ended")
        request = job.request
        wanted = (*request.prefer, *request.require, request.target, request.origin)
        node = job.attempt.node if job.attempt is not None else next(filter(None, wanted), "")
        _check_elsewhere(job.id, node, op.target)
        proposals, _ = await self._propose(node, (), op.target)
        proposal = _movable(next((each for each in proposals if each.job == job.uid), None), job.id, op.target)
        return job_move(op.move_id, job, proposal, by=caller.user)

    async def _move_process(self, op: requests.ExecuteOffload, subject: SubjectOfMove, caller: Caller) -> Move:
        pid, node = int(op.subject), subject.node
        if not 1 < pid < MAX_PID:
            raise BadInput(f"{op.subject} is not the pid of a process that could move")
        if not node:
            raise BadInput("say on which node the process is: -n NODE")
        if node in subject.unknown_nodes:
            raise NotFound(f"no node is called {node!r}")
        _check_elsewhere(op.subject, node, op.target)
        process = await self._process(node, pid, op.variables if op.consent else ())
        if op.pid_start and process.pid_start != op.pid_start:
            raise Conflict(f"{pid} on {node} is another process by now")
        caller.must_own(process.user, f"the process {pid}")
        proposals, consents = await self._propose(node, [process], op.target)
        own = (each for each in proposals if each.process is not None and each.process.pid == pid)
        proposal = _movable(next(own, None), f"{pid} on {node}", op.target)
        for name, seen, now in (("shape", op.shape, proposal.shape), ("directory", op.directory, process.cwd)):
            if seen and seen != now:
                raise Conflict(f"{pid} on {node} has changed since the scan: its {name} is `{one_line(now)}`")
        check_input(process)
        consent = await self._consent(op, process, proposal, consents)
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

    async def _consent(
        self,
        op: requests.ExecuteOffload,
        process: ProcessInfo,
        proposal: Proposal,
        consents: Sequence[MoveConsent],
    ) -> MoveConsent:
        """The consent of the process's user, given now or remembered; Refused with the command that gives it."""
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
        given = [each for each in consents if (each.user, each.shape) == (consent.user, consent.shape)]
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
        """A page of the command shapes whose processes may be moved."""
        consents = await self._grid.read(lambda ledger, now: tuple(ledger.consents.values()))
        page = await select_page(
            self._grid.slices,
            consents,
            lambda consent: (0, consent.key),
            name="consents",
            cursor=op.cursor,
            limit=op.limit,
        )
        viewer = self._viewer()
        rows = [ConsentRow.of(viewer, consent) for consent in page.rows]
        return ConsentList(rows, more=page.end is not None, next=page.next())

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
    """The resource that a node is short of, with its level; empty where there is none."""
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


def _movable(proposal: Proposal | None, subject: str, target: str) -> Proposal:
    """A proposal of work that can be moved; Refused with every cause where it cannot."""
    if proposal is None:
        raise Refused(f"{subject} is no work of its own that could be moved; see: grid offload scan")
    if not proposal.movable:
        causes = [obstacle.text for obstacle in proposal.obstacles]
        to = f" to {target}" if target else ""
        raise Refused(f"{subject} cannot be moved{to}: {'; '.join(causes) or 'no way is known'}", causes)
    return proposal


def _origin(ledger: Ledger, named: str, caller: Caller) -> str:
    """The node on which a request was typed."""
    if named in ledger.nodes:
        return named
    return first_node(node for node in ledger.nodes.values() if node.host == "local") if caller.is_here else ""


def _check_node(ledger: Ledger, name: str) -> None:
    if name not in ledger.nodes:
        raise NotFound(f"no node is called {name!r}")


def _stay(reason: str) -> CommandAdvice:
    return CommandAdvice(elsewhere=False, target_node=None, reason=reason)
