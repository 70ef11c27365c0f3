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


def explanation_lines(found: Explanation) -> Iterator[str]:
    if found.kind == "move":
        yield from _move_lines(required(found.move), found.events)
        return
    job = present(found.job)
    yield printable(_summary(found))
    if found.refusal is not None:
        yield _row("refused", f"{format_time(found.refusal.at)}: {found.refusal.reason}")
        return
    if found.kind == "node":
        yield from _node(found)
        return
    asked = present(found.asked) or "what its boost holds"
    yield _row("asked", f"{asked}, {found.priority}, by {found.user} at {format_time(present(found.requested_at))}")
    if job is not None and job.sizing is not None:
        yield _row("memory", format_sizing(job.sizing))
    if job is not None and found.end is None and job.expected_seconds is not None:
        yield _row("takes", f"about {format_span(job.expected_seconds, '.3g')}, by earlier runs")
    if found.waiting is not None:
        yield from _waiting(found.waiting)
    if found.machine_end is not None:
        yield from _rows("machine", machine_end_lines(found.machine_end))
    if found.stopping:
        yield _row("stopping", found.stopping)
    if (offloading := found.offloading) is not None:
        reason = present(offloading.reason)
        moved_or_left = [f"{format_time(present(offloading.at))}: {reason}"] if reason else []
        degraded = [f"{offloading.node_id} is degraded: {offloading.degraded}"] if offloading.degraded else []
        yield from _rows("offloading", [*moved_or_left, *degraded])
    for place in found.placements:
        last = found.end is not None and place is found.placements[-1] and place.made_room_for is None
        name = "place" if len(found.placements) == 1 else f"attempt {place.number}"
        since = place.started_at or place.assigned_at
        until = f" to {format_time(place.ended_at)}" if place.ended_at else ""
        yield _row(name, f"{place.node_id}, {'' if until else 'since '}{format_time(since)}{until}")
        decision = place.decision
        if decision is not None:
            yield from _rows("why there", decision.reasoning)
            yield _row("confidence", f"{100 * decision.confidence:.1f} %")
            second = decision.alternatives
            wide = max((len(one.node_id) for one in second), default=0)
            yield from _rows("next best", (f"{one.node_id:{wide}}  {one.why}" for one in second))
            compared = decision.scores if len(decision.scores) > 1 else []
            wide = max((len(one.node_id) for one in compared), default=0)
            measure = _SCORED.get(decision.strategy, "room")
            scores = []
            for one in compared:
                first = f"{one.criterion}; " if one.criterion else ""
                room, priority = plain_number(one.room), plain_number(one.priority)
                scores.append(f"{one.node_id:{wide}}  {first}{measure} {room} + priority {priority}")
            yield from _rows("scores", scores)
        if place.outcome and not last:
            yield _row("then", _how_it_ended(place))
    moves = (
        f"{move.move_id}, {move.source_node} to {move.target_node}, {move.end or move.state}" + _because(move.problem)
        for move in present(found.moves) or ()
    )
    yield from _rows("moves", moves)
    if found.end is not None:
        yield _row("ended", f"{format_time(found.end.at)}: {found.end.detail or _word(found.end.reason)}")


def _node(found: Explanation) -> Iterator[str]:
    """Command that starts a node, resources it gave back unused, and the latest automatic offloading there."""
    offloading, events = required(found.offloading), found.events
    if found.state == "stopped":
        yield _row("start it", f"grid cluster start {found.id}")
    yield from _rows("borrowing", map(format_unused_borrowing, required(found.unused_borrowing)))
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


def _summary(found: Explanation) -> str:
    if found.kind == "node":
        return f"{found.id} is {found.state}"
    name, state = present(found.job_id) or found.id if found.kind == "request" else found.id, found.state
    if found.refusal is not None:
        return f"{name} was refused"
    if found.end is not None:
        how = format_outcome(required(found.job)) if found.kind == "job" else _word(found.end.reason)
        return f"{name} is over: {how}"
    where = found.placements[-1].node_id if found.placements else ""
    if found.waiting is not None and found.waiting.for_:
        return f"{name} will be on {where}, when those that make room for it are gone"
    if found.waiting is not None:
        return f"{name} waits" + ("" if not found.placements else ", to run again")
    doing = {"assigned": "is about to run", "running": "runs", "paused": "is paused", "stopping": "is being stopped"}
    return f"{name} {doing.get(state, 'is held')} on {where}"


def _waiting(waiting: WaitingRow) -> Iterator[str]:
    since = f"since {format_time(waiting.since)}, {format_span(waiting.waited_seconds, '.3g', least=1)}"
    until = f"until {format_time(waiting.gives_up_at)}" if waiting.gives_up_at else "without a limit"
    yield _row("waits", since if waiting.for_ else f"{since}, {until}")
    if waiting.for_:
        yield from _rows("after", (_neighbour(one) for one in waiting.for_))
        return
    yield _row("in queue", f"{waiting.position} of {waiting.of}")
    more = required(waiting.position) - 1 - len(waiting.ahead)
    ahead = [_neighbour(one) for one in waiting.ahead] + ([f"and {more} more"] if more > 0 else [])
    yield from _rows("ahead", ahead)
    starts = format_time(waiting.estimated_start) if waiting.estimated_start else "not known"
    yield _row("starts", f"{starts}: {waiting.start_reason}")
    names = [reason.node_id or "" for reason in waiting.reasons]
    wide = max(map(len, names), default=0)
    lines = (f"{name:{wide}}  {one.why}".strip() for name, one in zip(names, waiting.reasons, strict=True))
    yield from _rows("why not now", lines)


def machine_end_lines(end: MachineEndRow) -> Iterator[str]:
    """The announced end of its machine, which was not known at its placement."""
    if end.at is None:
        yield f"may be taken away at any time: {end.reason}"
        return
    yield f"ends at {format_time(end.at)}: {end.reason}"
    yield f"it is stopped at {format_time(end.stops_at)}, unless it is over before"


def _neighbour(one: QueuedRequest) -> str:
    name = one.job_id or one.allocation_id
    return f"{name}, {one.user}, {one.priority}, {one.asked}"


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
    who = place.made_room_for
    name = who.job_id or who.allocation_id or ""
    by = f" ({name} of {who.user})" if who.user else ""
    return f"{_word(place.outcome)}: {place.detail or who.reason}{by}"


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
