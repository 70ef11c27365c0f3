"""`grid explain`: why a job or lease waits, is where it is, or was stopped, and when it will start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from distributed_grid.cli.command_line import Argument, command
from distributed_grid.cli.output import (
    format_outcome,
    format_sizing,
    format_span,
    format_time,
    format_unused_borrowing,
    print_answer,
    printable,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import present, required
from distributed_grid.number_text import plain_number

if TYPE_CHECKING:
    from distributed_grid.api.answers.explanation import (
        DegradedRow,
        Explanation,
        MachineEndRow,
        PlacementRow,
        QueuedRequest,
        WaitingRow,
    )
    from distributed_grid.api.answers.offloading import MoveRow
    from distributed_grid.api.answers.reports import EventRecord

WIDTH = 14


@command(Argument("id_", metavar="ID"))
def explain(session: CliSession, id_: str) -> None:
    """Why a job or a lease waits, why it is where it is, why it was stopped, and when it will start.

    ID is a job, a lease, a move or a request, also one that was refused; any unique prefix will do. Of a node it tells
    what automatic offloading does there, and why.
    """
    answer = session.query.explain(id=id_)
    print_answer(session, answer, "\n".join(explanation_lines(answer)))


def explanation_lines(answer: Explanation) -> Iterator[str]:
    if answer.kind == "move":
        yield from _move_lines(required(answer.move), answer.events)
        return
    job = present(answer.job)
    yield printable(_summary(answer))
    if answer.refusal is not None:
        yield _row("refused", f"{format_time(answer.refusal.at)}: {answer.refusal.reason}")
        return
    if answer.kind == "node":
        yield from _node(answer)
        return
    asked = present(answer.asked) or "what its boost holds"
    yield _row("asked", f"{asked}, {answer.priority}, by {answer.user} at {format_time(present(answer.requested_at))}")
    if job is not None and job.sizing is not None:
        yield _row("memory", format_sizing(job.sizing))
    if job is not None and answer.end is None and job.expected_seconds is not None:
        yield _row("takes", f"about {format_span(job.expected_seconds, '.3g')}, by earlier runs")
    if answer.waiting is not None:
        yield from _waiting(answer.waiting)
    if answer.machine_end is not None:
        yield from _rows("machine", machine_end_lines(answer.machine_end))
    if answer.stopping:
        yield _row("stopping", answer.stopping)
    if (offloading := answer.offloading) is not None:
        reason = present(offloading.reason)
        moved_or_left = [f"{format_time(present(offloading.at))}: {reason}"] if reason else []
        degraded = [f"{offloading.node_id} is degraded: {offloading.degraded}"] if offloading.degraded else []
        yield from _rows("offloading", [*moved_or_left, *degraded])
    for place in answer.placements:
        last = answer.end is not None and place is answer.placements[-1] and place.made_room_for is None
        name = "place" if len(answer.placements) == 1 else f"attempt {place.number}"
        since = place.started_at or place.assigned_at
        until = f" to {format_time(place.ended_at)}" if place.ended_at else ""
        yield _row(name, f"{place.node_id}, {'' if until else 'since '}{format_time(since)}{until}")
        decision = place.decision
        if decision is not None:
            yield from _rows("why there", decision.reasoning)
            yield _row("confidence", f"{100 * decision.confidence:.1f} %")
            second = decision.alternatives
            wide = max((len(node.node_id) for node in second), default=0)
            yield from _rows("next best", (f"{node.node_id:{wide}}  {node.why}" for node in second))
            compared = decision.scores if len(decision.scores) > 1 else []
            wide = max((len(score.node_id) for score in compared), default=0)
            measure = _SCORED.get(decision.strategy, "room")
            scores = []
            for score in compared:
                first = f"{score.criterion}; " if score.criterion else ""
                room, priority = plain_number(score.room), plain_number(score.priority)
                scores.append(f"{score.node_id:{wide}}  {first}{measure} {room} + priority {priority}")
            yield from _rows("scores", scores)
        if place.outcome and not last:
            yield _row("then", _how_it_ended(place))
    moves = (
        f"{move.move_id}, {move.source_node} to {move.target_node}, {move.end or move.state}" + _because(move.problem)
        for move in present(answer.moves) or ()
    )
    yield from _rows("moves", moves)
    if answer.end is not None:
        yield _row("ended", f"{format_time(answer.end.at)}: {answer.end.detail or _word(answer.end.reason)}")


def _node(answer: Explanation) -> Iterator[str]:
    """Command that starts a node, resources it gave back unused, and the latest automatic offloading there."""
    offloading, events = required(answer.offloading), answer.events
    if answer.state == "stopped":
        yield _row("start it", f"grid cluster start {answer.id}")
    yield from _rows("borrowing", map(format_unused_borrowing, required(answer.unused_borrowing)))
    if (degraded := cast("DegradedRow | None", offloading.degraded)) is not None:
        yield _row("degraded", f"since {format_time(degraded.since)}: {degraded.why}")
    if (look := present(offloading.look)) is None:
        yield _row("offloading", "nothing moves by itself here: automatic offloading has not looked at it")
    else:
        yield _row("offloading", f"{format_time(look.at)}: {look.reason}")
        yield from _rows("jobs", (f"{job.job_id}: {job.reason}" for job in look.jobs))
    lines = (f"{format_time(event.time)} {event.type} {event.subject}: {event.reason}" for event in events)
    yield from _rows("events", lines)


def _move_lines(move: MoveRow, events: Iterable[EventRecord]) -> Iterator[str]:
    what = f"job {move.job_id}" if move.pid is None else f"process {move.pid}"
    how = move.end or move.state
    yield printable(f"{move.move_id} is {how}: {what} leaves {move.source_node} for {move.target_node}")
    yield _row("asked", f"{move.reason}, at {format_time(move.requested_at)}")
    for event in events:
        if event.type in ("move-advanced", "move-ended"):
            name = event.data["state"] if event.type == "move-advanced" else "ended"
            yield _row(name, f"{format_time(event.time)}{_because(event.reason)}")
    if move.waits_for:
        yield _row("waits for", move.waits_for)


def _summary(answer: Explanation) -> str:
    if answer.kind == "node":
        return f"{answer.id} is {answer.state}"
    name, state = present(answer.job_id) or answer.id if answer.kind == "request" else answer.id, answer.state
    if answer.refusal is not None:
        return f"{name} was refused"
    if answer.end is not None:
        how = format_outcome(required(answer.job)) if answer.kind == "job" else _word(answer.end.reason)
        return f"{name} is over: {how}"
    where = answer.placements[-1].node_id if answer.placements else ""
    if answer.waiting is not None and answer.waiting.for_:
        return f"{name} will be on {where}, when those that make room for it are gone"
    if answer.waiting is not None:
        return f"{name} waits" + ("" if not answer.placements else ", to run again")
    doing = {"assigned": "is about to run", "running": "runs", "paused": "is paused", "stopping": "is being stopped"}
    return f"{name} {doing.get(state, 'is held')} on {where}"


def _waiting(waiting: WaitingRow) -> Iterator[str]:
    since = f"since {format_time(waiting.since)}, {format_span(waiting.waited_seconds, '.3g', least=1)}"
    until = f"until {format_time(waiting.gives_up_at)}" if waiting.gives_up_at else "without a limit"
    yield _row("waits", since if waiting.for_ else f"{since}, {until}")
    if waiting.for_:
        yield from _rows("after", (_neighbour(request) for request in waiting.for_))
        return
    yield _row("in queue", f"{waiting.position} of {waiting.of}")
    more = required(waiting.position) - 1 - len(waiting.ahead)
    ahead = [_neighbour(request) for request in waiting.ahead] + ([f"and {more} more"] if more > 0 else [])
    yield from _rows("ahead", ahead)
    starts = format_time(waiting.estimated_start) if waiting.estimated_start else "not known"
    yield _row("starts", f"{starts}: {waiting.start_reason}")
    names = [reason.node_id or "" for reason in waiting.reasons]
    wide = max(map(len, names), default=0)
    lines = (f"{name:{wide}}  {request.why}".strip() for name, request in zip(names, waiting.reasons, strict=True))
    yield from _rows("why not now", lines)


def machine_end_lines(end: MachineEndRow) -> Iterator[str]:
    """The announced end of its machine, which was not known at its placement."""
    if end.at is None:
        yield f"may be taken away at any time: {end.reason}"
        return
    yield f"ends at {format_time(end.at)}: {end.reason}"
    yield f"it is stopped at {format_time(end.stops_at)}, unless it is over before"


def _neighbour(request: QueuedRequest) -> str:
    name = request.job_id or request.allocation_id
    return f"{name}, {request.user}, {request.priority}, {request.asked}"


_SCORED = {
    "best_fit": "left over",
    "cost_optimized": "left over",
    "fragmentation_aware": "GPUs lost",
    "fittest": "fitness",
}
"""Second score of a strategy, below its criterion, where that is not the room left; the less, the better."""


def _how_it_ended(place: PlacementRow) -> str:
    if place.made_room_for is None:
        is_attempt = isinstance(place.fence, int)  # of a job
        return f"{format_outcome(place) if is_attempt else _word(place.outcome)}{_because(place.detail)}"
    preemptor = place.made_room_for
    name = preemptor.job_id or preemptor.allocation_id or ""
    by = f" ({name} of {preemptor.user})" if preemptor.user else ""
    return f"{_word(place.outcome)}: {place.detail or preemptor.reason}{by}"


def _because(detail: str | None) -> str:
    return f": {detail}" if detail else ""


def _word(reason: str | None) -> str:
    return (reason or "over").replace("_", " ")


def _rows(name: str, lines: Iterable[str]) -> Iterator[str]:
    """Several lines under one heading."""
    for line in lines:
        yield _row(name, line)
        name = ""


def _row(name: str, text: str) -> str:
    return f"  {name:{WIDTH}}{printable(text)}".rstrip()
