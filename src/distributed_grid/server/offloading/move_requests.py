"""Moves made from proposals: the reservation on the target, and the command to run there."""

from __future__ import annotations

from distributed_grid.domain.jobs import Command, Job
from distributed_grid.domain.leases import Request
from distributed_grid.domain.moves import Move, MoveConsent, MovedProcess, Way
from distributed_grid.domain.processes import ProcessInfo, StandardStream, StreamKind
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.errors import Refused
from distributed_grid.scheduling.offloading.processes import first_look
from distributed_grid.scheduling.offloading.proposals import Proposal

MAX_STREAM_CHARS = 4096
READ_FROM_FILE = ("/bin/sh", "-c", 'exec "$@" < "$0"')
"""Followed by a file and a command: runs it with that file as its standard input."""


def job_move(move_id: str, job: Job, proposal: Proposal, *, by: str) -> Move:
    assert proposal.way is not None
    request = Request(
        id=move_id,
        user=GRID_USER,
        ask=job.request.ask,
        priority=job.request.priority,
        require=(proposal.target,),
        wait_ms=0,
        target=proposal.node,
        limits_memory=job.request.limits_memory,
    )
    return Move(
        id=move_id,
        user=job.request.user,
        source=proposal.node,
        target=proposal.target,
        way=proposal.way,
        request=request,
        requested_at_ms=0,
        reason=_reason(by),
        job=job.uid,
        job_id=job.id,
        command=job.command,
    )


def process_move(
    move_id: str, process: ProcessInfo, proposal: Proposal, consent: MoveConsent, *, freeze_ms: int, by: str
) -> Move:
    """The move of a process: the same command in its directory, with the variables that its user has named."""
    request = Request(
        id=move_id, user=GRID_USER, ask=proposal.ask, require=(proposal.target,), wait_ms=0, target=proposal.node
    )  # the original may grow: its use so far sets no limit
    return Move(
        id=move_id,
        user=process.user,
        source=proposal.node,
        target=proposal.target,
        way=Way.PROCESS_RESTART,
        request=request,
        requested_at_ms=0,
        reason=_reason(by),
        process=MovedProcess(
            process.identity,
            process.cwd,
            tuple(
                stream if len(stream.path) <= MAX_STREAM_CHARS else StandardStream(StreamKind.OTHER)
                for stream in process.streams[:3]
            ),
            proposal.shape,
            first_look(process),
        ),
        command=Command(
            command_line(process),
            tuple(sorted(process.environment)),
            given=tuple(sorted(consent.variables)),
        ),
        freeze_ms=freeze_ms,
    )


def check_input(process: ProcessInfo) -> None:
    """Refuse a process whose standard input a job would not have: it would be empty elsewhere."""
    given = process.streams[0] if process.streams else StandardStream()
    if given.kind not in (StreamKind.NULL, StreamKind.CLOSED) and not _input_file(process):
        named = f" ({given.path})" if given.path else ""
        raise Refused(
            f"{process.pid} reads its standard input from a {given.kind}{named}, which a job does not have; a file in "
            "its working directory is possible"
        )


def _input_file(process: ProcessInfo) -> str:
    """The file in its working directory that a process reads its standard input from; empty where it does not."""
    given = process.streams[0] if process.streams else StandardStream()
    inside = process.cwd.rstrip("/") + "/"
    if given.kind is not StreamKind.FILE or not given.path.startswith(inside):
        return ""
    return given.path.removeprefix(inside)


def command_line(process: ProcessInfo) -> tuple[str, ...]:
    """Command that replaces a process, with the same file as its standard input."""
    given = _input_file(process)
    return (*READ_FROM_FILE, given, *process.argv) if given else process.argv


def _reason(by: str) -> str:
    return f"{by} asked for it"
