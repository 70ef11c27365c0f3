"""`grid offload`: find work that had better run elsewhere, move it, and see what became of it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distributed_grid.cli.command_line import Argument, FloatRange, Option, group
from distributed_grid.cli.offload_output import (
    auto_lines,
    cancel_text,
    move_lines,
    move_text,
    moves_table,
    progress_text,
    scan_parts,
    subject_of,
    watch_offload,
)
from distributed_grid.cli.output import ProgressLine, echo, format_time, print_answer, printable, table
from distributed_grid.cli.request_options import ship_option
from distributed_grid.cli.session import CliSession
from distributed_grid.client.client import Client
from distributed_grid.client.job_payload import caller_node
from distributed_grid.client.pages import every_page
from distributed_grid.errors import BadInput, Conflict, Refused

if TYPE_CHECKING:
    from distributed_grid.api.answers.offloading import MoveRow

POLL_SECONDS = 0.2
FAILED_ENDS = ("failed", "cancelled")
OLD_CONSENT = "none: not valid any more"
NAMES_VARIABLE = "GRID_OFFLOAD_COMMANDS"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
RESERVED_NAMES = frozenset(
    (
        *("if", "then", "elif", "else", "fi", "for", "in", "do", "done", "while", "until", "case", "esac", "select"),
        *("function", "time", "coproc", "repeat", "foreach", "end", "nocorrect", "noglob", "typeset", "declare"),
        *("command", "builtin", "exec", "eval", "source", "unset", "export", "local", "return", "exit", "set", "trap"),
        *("cd", "alias", "unalias", "test", "true", "false", "env", "grid"),
    )
)
"""Words of the shell, and what the functions themselves need: as functions they would break it."""


Action = Literal["enable", "disable", "reset"]


class SeenProcess(NamedTuple):
    """A process as a scan has shown it: only that one may be moved."""

    pid_start: int = 0
    directory: str = ""
    shape: str = ""


NOT_SEEN = SeenProcess()


@group()
def offload() -> None:
    """Find work that had better run elsewhere, and move it: never twice, never lost."""


@offload.command(
    Option("-n", "--node", default="", metavar="NODE", help="Of this node (default: of all that are above a mark)."),
    Option("-a", "--all", "all_", is_flag=True, help="Also every process that cannot be moved, with the reason."),
)
def scan(session: CliSession, node: str, all_: bool) -> None:
    """Processes and jobs that could run elsewhere: why, by which way, where to and how sure; and why others cannot."""
    answer = session.query.scan_offload(node=node)
    print_answer(session, answer, "\n\n".join(scan_parts(answer, node, everything=all_)))


@offload.command(
    Argument("subject", metavar="[PID|JOB]", required=False),
    Option("--all-recommended", is_flag=True, help="Everything that a scan advises to move."),
    Option("-n", "--node", default="", metavar="NODE", help="Where the process is (default: this machine's node)."),
    Option("-t", "--target", default="", metavar="NODE", help="Where to (default: the best node)."),
    Option(
        "--consent",
        is_flag=True,
        help="Allow to restart processes of this shape in this directory; remembered.",
    ),
    Option("-e", "--env", multiple=True, metavar="NAME", help="A variable of the process that travels with --consent."),
    Option(
        "--freeze",
        type=FloatRange(0.5, 60),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="A process stands still for at most so long.",
    ),
    Option("--no-wait", is_flag=True, help="Print the id of the move and return."),
)
def execute(session: CliSession, /, **options: Any) -> int:
    """Move a process or a job to another node, and follow the move until the work runs there.

    A restart begins from the beginning: everything sent or written before happens again. Ctrl-C leaves the move going;
    `grid offload cancel` ends it while the original can still continue.
    """
    if bool(options["subject"]) == options["all_recommended"]:
        raise BadInput("name a pid or a job, or use --all-recommended")
    if options["env"] and not options["consent"]:
        raise BadInput("variables travel only with your consent: add --consent to --env")
    rows: list[MoveRow] = []
    refused = False
    with session.client() as client:
        if options["all_recommended"]:
            chosen = []
            for proposal in client.scan_offload(node=options["node"]).proposals:
                if not (proposal.recommended and proposal.movable):
                    continue
                if proposal.needs_consent and not options["consent"]:
                    echo(
                        printable(f"grid: {subject_of(proposal)} is left: it needs your consent (--consent)"), err=True
                    )
                    continue
                process = proposal.process or {}
                seen = SeenProcess(process.get("pid_start", 0), process.get("cwd", ""), proposal.shape or "")
                chosen.append((subject_of(proposal), proposal.node_id, seen))
            for subject, node, seen in chosen:
                try:
                    rows.append(_execute(client, options, subject, node, seen))
                except (Refused, Conflict) as refusal:  # the others can be moved all the same
                    refused = True
                    echo(printable(f"grid: {subject}: {refusal}"), err=True)
        else:
            rows = [_execute(client, options, options["subject"], options["node"])]
        if not options["no_wait"]:
            rows = [follow_move(client, row, quiet=session.json) for row in rows]
    text = "\n".join(row.move_id if options["no_wait"] else move_text(row) for row in rows)
    shown = rows if options["all_recommended"] else rows[0]
    print_answer(session, shown, text or "nothing is advised to move")
    return 1 if refused or any(row.end in FAILED_ENDS for row in rows) else 0


def _execute(client: Client, options: dict[str, Any], subject: str, node: str, seen: SeenProcess = NOT_SEEN) -> MoveRow:
    move_id = f"move-{os.urandom(6).hex()}"
    try:
        answer = client.execute_offload(
            move_id=move_id,
            subject=subject,
            node=node,
            target=options["target"],
            consent=options["consent"],
            variables=list(options["env"]),
            freeze_seconds=options["freeze"],
            origin=caller_node(),
            pid_start=seen.pid_start,
            directory=seen.directory,
            shape=seen.shape,
        )
    except KeyboardInterrupt:
        echo(f"grid: {move_id} may have begun; see `grid offload status {move_id}`", err=True)
        raise
    return answer.move


def follow_move(client: Client, row: MoveRow, *, quiet: bool) -> MoveRow:
    """Show a move's progress until the work runs on the other node or the move has ended; its last state."""
    line, shown, is_named = ProgressLine(), "", False
    try:
        while row.end is None and row.state != "running":
            text = progress_text(row)
            line.draw(lambda: progress_text(row))  # noqa: B023, drawn at once
            if text != shown and not line.is_shown and not quiet:
                echo(text, err=True)
            shown = text
            time.sleep(POLL_SECONDS)
            row = client.get_move(move_id=row.move_id).move
            if row.left_out_files and not is_named:
                is_named = True
                line.clear()
                echo(printable(f"grid: not shipped with it: {', '.join(row.left_out_files)}"), err=True)
    except KeyboardInterrupt:
        line.clear()
        move_id = row.move_id
        echo(f"grid: {move_id} goes on; see `grid offload status {move_id}`, end it with `grid offload cancel "
             f"{move_id}`", err=True)  # fmt: skip
        raise
    finally:
        line.clear()
    return row


@offload.command(
    Argument("move_id", metavar="[MOVE]", required=False),
    Option("-a", "--all", "all_", is_flag=True, help="Also those that have ended."),
)
def status(session: CliSession, move_id: str | None, all_: bool) -> None:
    """The active moves, or everything about one, by its id or any unique prefix."""
    if move_id:
        row = session.query.get_move(move_id=move_id).move
        print_answer(session, row, "\n".join(move_lines(row)))
        return
    pages = every_page(session.query.list_moves, all=all_)
    moves = [move for page in pages for move in page.moves]
    print_answer(session, moves, moves_table(moves))


@offload.command(Argument("move_ids", metavar="MOVE", nargs=-1, required=True))
def cancel(session: CliSession, move_ids: tuple[str, ...]) -> None:
    """Cancel moves; the original continues as it was. Refused once it has been ended: then cancel its job."""
    with session.client(any_config=True) as client:
        rows = [client.cancel_move(move_id=move_id).move for move_id in move_ids]
    print_answer(session, rows, "\n".join(map(cancel_text, rows)))


@offload.command(Option("--withdraw", default="", metavar="SHAPE", help="Do not allow this one any more."))
def consents(session: CliSession, withdraw: str) -> None:
    """The command shapes and directories whose processes you have allowed to be restarted elsewhere."""
    if withdraw:
        session.ask.withdraw_consent(shape=withdraw)
        print_answer(session, {"withdrawn": withdraw}, printable(f"processes of {withdraw} are not moved any more"))
        return
    consents = [consent for page in every_page(session.query.list_consents) for consent in page.consents]
    rows = [
        (
            *(consent.shape, printable(consent.directory or OLD_CONSENT), ", ".join(consent.variables), consent.user),
            format_time(consent.given_at),
        )
        for consent in consents
    ]
    empty = "no consents; grid offload execute PID --consent gives one"
    headings = ("COMMAND SHAPE", "DIRECTORY", "VARIABLES", "USER", "GIVEN")
    print_answer(session, consents, table(headings, rows, empty=empty))


@offload.command(
    Option("--enable", is_flag=True, help="Move jobs by itself, whatever the config says."),
    Option("--disable", is_flag=True, help="Move nothing by itself, whatever the config says."),
    Option("--reset", is_flag=True, help="As the config says again."),
    Option("--status", is_flag=True, help="Only show how it stands (the default)."),
)
def auto(session: CliSession, enable: bool, disable: bool, reset: bool, status: bool) -> None:
    """Automatic offloading: whether jobs leave a pressed node by themselves.

    It moves jobs that mark checkpoints or are declared restartable, and never a process of another kind.
    """
    actions: tuple[tuple[Action, bool], ...] = (("enable", enable), ("disable", disable), ("reset", reset))
    chosen = [name for name, given in actions if given]
    if len(chosen) + status > 1:
        raise BadInput("use one of --enable, --disable, --reset and --status")
    if chosen:
        auto_offload = session.ask.set_auto_offload(action=chosen[0]).auto_offload
    else:
        auto_offload = session.query.get_auto_offload().auto_offload
    print_answer(session, auto_offload, "\n".join(auto_lines(auto_offload)))


@offload.command(
    Option(
        "--interval",
        type=FloatRange(0.2, 3600),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Between two looks.",
    ),
    Option("-n", "--node", default="", metavar="NODE", help="Proposals of this node (default: of all above a mark)."),
)
def watch(session: CliSession, interval: float, node: str) -> None:
    """Pressure, proposals and moves as they change, until Ctrl-C; without a terminal, a line for each change."""
    watch_offload(session, interval, node)


@offload.command(
    Option("--no-input", is_flag=True, help="It reads no input: a terminal or pipe does not keep it here."),
    Option("-e", "--env", multiple=True, metavar="K[=V]", help="A variable for it; without =V your own value."),
    ship_option,
    Option("--fetch", multiple=True, metavar="GLOB", help="What may come back (default: every file that it changed)."),
    Option("--overwrite", is_flag=True, help="Let returned files replace local ones that were edited meanwhile."),
    Argument("command", nargs=-1, required=True),
    interspersed=False,
)
def wrap(session: CliSession, /, **options: Any) -> int:
    """Start COMMAND on the best node, which is this one unless it is pressed.

    It starts here where no control plane answers within 200 ms, this node is not pressed, its input is a pipe, a file
    or a terminal, or this is inside a job. Else it runs as `grid run-shared` would run it: its output is shown as it
    comes, the files that it changes come back, its exit code is that of this command. Everything from the first word of
    COMMAND on belongs to the command.
    """
    from distributed_grid.cli.wrapped_command import run_wrapped

    return run_wrapped(session, options)


@offload.command(
    Option("--no-input", is_flag=True, help="They read no input: see `grid offload wrap --no-input`."),
    Argument("names", metavar="[NAME]...", nargs=-1),
)
def shell_hook(session: CliSession, no_input: bool, names: tuple[str, ...]) -> None:
    """Print shell functions (bash, zsh) that start the named commands by `grid offload wrap`.

    Use it as `eval "$(grid offload shell-hook make ffmpeg)"`; without names those in $GRID_OFFLOAD_COMMANDS are meant.
    `command NAME` starts one here, as before.
    """

    chosen = names or tuple(os.environ.get(NAMES_VARIABLE, "").split())
    if not chosen:
        raise BadInput(f"name the commands, such as: grid offload shell-hook make ffmpeg; or set {NAMES_VARIABLE}")
    script = hook_script(chosen, own_path(), no_input=no_input, state_dir=session.state_dir_option)
    print_answer(session, {"script": script}, script.rstrip("\n"))


def hook_script(names: Sequence[str], program: str, *, no_input: bool = False, state_dir: str | None = None) -> str:
    """The functions, for `eval` in bash or zsh, that run the `grid` at this path; BadInput for a name that cannot be.

    Where grid has been removed since, a function starts its command as before.
    """
    import shlex

    for name in names:
        if not _NAME.fullmatch(name) or name in RESERVED_NAMES:
            raise BadInput(f"{name!r} cannot be wrapped by a shell function; use: grid offload wrap COMMAND")
    program = shlex.quote(program)
    setting = f"GRID_STATE_DIR={shlex.quote(os.path.abspath(state_dir))} " if state_dir else ""
    option = " --no-input" if no_input else ""
    functions = (
        f"function {name} {{\n"
        f'  if [ -x {program} ]; then {setting}{program} offload wrap{option} -- {name} "$@"\n'
        f'  else command {name} "$@"; fi\n'
        "}\n"
        for name in dict.fromkeys(names)
    )
    return "".join(functions)


def own_path() -> str:
    """Where this program is, whatever the PATH of the shell will be."""
    import shutil

    path = sys.argv[0] if os.path.dirname(sys.argv[0]) else shutil.which(sys.argv[0]) or sys.argv[0]
    return os.path.abspath(path)
