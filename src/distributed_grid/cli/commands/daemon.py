"""`grid daemon`: start, stop and show the control plane, and its access and join tokens.

The secret of a token is made here and only its hash is sent: it is shown once and stored nowhere.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import cast

from distributed_grid.cli.command_line import Argument, Option, group
from distributed_grid.cli.output import echo, format_time, note, print_answer, printable, table
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import JsonObject
from distributed_grid.errors import BadInput, Refused, TimedOut, Unreachable
from distributed_grid.quantities import seconds_of

ACCOUNT_NOTE = (
    "jobs of this token run under the account of each node's agent and can read the files and logs of every job there; "
    "over REST it reads its own only"
)
NO_PLAIN = (
    "there is no connection without TLS: anybody on the way, and any user of this machine, could read tokens and node "
    "keys; REST clients trust certificate.pem of the state directory (curl --cacert)"
)


def _parse_ttl(value: str) -> float:
    """The seconds in a time such as 90, 15m, 2h or 30d."""
    seconds = seconds_of(value)
    if math.isnan(seconds):
        raise BadInput(f"--ttl {value!r} is no time: write seconds, or 15m, 2h, 30d")
    return seconds


@group()
def token() -> None:
    """Tokens for people who use REST. Your own is in the file `token` of the state directory."""


@token.command(
    Option("--user", required=True, help="The user of the token; jobs and leases are theirs."),
    Option("--team", default="", help="The team of the user."),
    Option(
        "--ttl",
        default="0",
        type=_parse_ttl,
        metavar="TIME",
        help="How long it is valid, such as 30d (default: until revoked).",
    ),
)
def create(session: CliSession, user: str, team: str, ttl: float) -> None:
    """Make a token; it is shown this once."""
    from distributed_grid.server.access.tokens import bearer_text, hash_of, new_secret, new_token_id

    token_id, secret = new_token_id(), new_secret()
    created = session.ask.create_token(
        token_id=token_id, secret_hash=hash_of(secret), user=user, team=team, ttl_seconds=ttl
    )
    text = bearer_text(token_id, secret)
    print_answer(session, {**cast("JsonObject", created.token), "token": text}, text)
    if not session.json:
        note(ACCOUNT_NOTE)


@token.command(name="list")
def list_(session: CliSession) -> None:
    """List the tokens, without their secrets."""
    tokens = session.query.list_tokens().tokens
    rows = [
        (
            token.token_id,
            token.user,
            token.team,
            "yes" if token.admin else None,
            format_time(token.created_at),
            format_time(token.expires_at),
            token.problem or "good",
        )
        for token in tokens
    ]
    print_answer(
        session, tokens, table(("TOKEN", "USER", "TEAM", "ADMIN", "CREATED", "EXPIRES", "STATE"), rows, empty="none")
    )


@token.command(Argument("token_id"))
def revoke(session: CliSession, token_id: str) -> None:
    """Revoke a token, from the next request on."""
    revoked = session.ask.revoke_token(token_id=token_id).token
    print_answer(session, revoked, f"revoked {revoked.token_id} of {revoked.user}")


@group("join-token")
def join_token() -> None:
    """Tokens that let a machine join as a node, once, without SSH."""


@join_token.command(
    Option("--node", default="", help="The name the node must have (default: the machine's own)."),
    Option("--ttl", default="1h", type=_parse_ttl, metavar="TIME", help="How long it can be used (default: 1h)."),
    Option("--address", multiple=True, metavar="HOST:PORT", help="Where the machine finds this one."),
    name="create",
)
def create_join(session: CliSession, node: str, ttl: float, address: tuple[str, ...]) -> None:
    """Make a join token; it is shown this once. On the machine type: grid agent --join-file FILE"""
    from distributed_grid.agent.join_client import JoinToken
    from distributed_grid.server.access.tokens import hash_of, new_secret, new_token_id

    token_id, secret = new_token_id(), new_secret()
    with session.client() as client:
        rest = client.get_daemon_info().rest
        if rest is None:
            raise Refused("the control plane does not listen; type: grid daemon start --listen HOST:PORT")
        created = client.create_join_token(token_id=token_id, secret_hash=hash_of(secret), node=node, ttl_seconds=ttl)
    addresses = address or tuple(created.addresses)
    text = JoinToken(addresses, created.fingerprint, token_id, secret).text()
    shown = {**cast("JsonObject", created.join_token), "join_token": text, "addresses": list(addresses)}
    print_answer(session, {**shown, "fingerprint": created.fingerprint or None}, text)
    if not session.json and all(where.startswith(("127.", "localhost", "[::1]")) for where in addresses):
        advice = "only this machine can reach it there; to let others join: grid daemon start --listen HOST:PORT"
        note(f"the control plane listens on {', '.join(addresses)}: {advice}")


@join_token.command(name="list")
def list_join(session: CliSession) -> None:
    """List the join tokens and the nodes that used them."""
    join_tokens = session.query.list_join_tokens().join_tokens
    rows = [
        (
            token.token_id,
            token.node_id or "any",
            token.used_by,
            format_time(token.used_at),
            format_time(token.expires_at),
            token.problem or ("used" if token.used_by else "good"),
        )
        for token in join_tokens
    ]
    print_answer(
        session, join_tokens, table(("TOKEN", "NODE", "USED BY", "USED", "EXPIRES", "STATE"), rows, empty="none")
    )


@join_token.command(Argument("token_id"), name="revoke")
def revoke_join(session: CliSession, token_id: str) -> None:
    """Revoke a join token, and disconnect the node that joined with it."""
    revoked = session.ask.revoke_join_token(token_id=token_id).join_token
    node = f", and {revoked.used_by} with it" if revoked.used_by else ""
    print_answer(session, revoked, f"revoked {revoked.token_id}{node}")


STOP_SECONDS = 30.0


@group()
def daemon() -> None:
    """Start, stop and show the control plane. Any command starts one where none runs."""


daemon.add(token)
daemon.add(join_token)


@daemon.command(
    Option("--listen", metavar="HOST:PORT", help="Where REST and joining agents are served, until it is stopped."),
    Option("--tls/--no-tls", default=None, help="Always on; --no-tls is refused."),
    Option("--force-plain", is_flag=True, help="Refused: there is no connection without TLS any more."),
)
def start(session: CliSession, listen: str | None, tls: bool | None, force_plain: bool) -> None:
    """Start the control plane and let it stay until it is stopped."""
    if tls is False or force_plain:
        raise BadInput(NO_PLAIN)
    if listen is not None:
        from distributed_grid.server.rest.listener import parse_address

        parse_address(listen)  # refused before anything is started
    try:
        with session.client(may_start=False) as client:
            info = client.keep_running(listen=listen or "")
        print_answer(session, info, f"already running, pid {info.pid}")
        return
    except Unreachable:
        pass
    with session.client() as client:
        client.start(stay=True)
        info = client.keep_running(listen=listen or "")  # where another command was quicker, its daemon stays, too
    print_answer(session, info, f"running, pid {info.pid}")


@daemon.command(
    Option("--confirm", is_flag=True, help="The clocks are right: delete by age again, here and on all nodes."),
)
def clock(session: CliSession, confirm: bool) -> None:
    """Jumps of wall clocks; after one nothing is deleted by age for six hours, unless it is confirmed."""
    answer = session.ask.confirm_clocks() if confirm else session.query.get_clocks()
    rows = [
        (clock.node_id or "control plane", _span(clock.jumped_seconds), _span(clock.waits_seconds).lstrip("+"))
        for clock in answer.clocks
    ]
    print_answer(session, answer, table(("CLOCK OF", "JUMPED BY", "DELETES AGAIN IN"), rows, empty="none"))


def _span(seconds: float | None) -> str:
    from distributed_grid.domain.clock_jumps import span_text

    return "-" if seconds is None else span_text(round(1000 * seconds))


@daemon.command(Option("--force", is_flag=True, help="Also while workers of a provider run, which cost money."))
def stop(session: CliSession, force: bool) -> None:
    """Stop the control plane; jobs continue, and the next one finds them again."""
    try:
        with session.running_client() as client:
            pid = client.get_daemon_info().pid
            left = client.stop_daemon(force=force).workers
    except Unreachable:
        print_answer(session, {"stopped": False}, "not running")
        return
    deadline = time.monotonic() + STOP_SECONDS
    while session.state_dir.is_locked() or _is_alive(pid):
        if time.monotonic() > deadline:
            raise TimedOut(f"the control plane (pid {pid}) has not stopped within {STOP_SECONDS:g} s")
        time.sleep(0.02)
    if left:
        echo(printable(f"grid: these workers go on, and cost money until they end: {', '.join(left)}"), err=True)
    print_answer(session, {"stopped": True, "pid": pid}, f"stopped, pid {pid}")


@daemon.command()
def status(session: CliSession) -> None:
    """Whether the control plane runs, and where; exits 3 where it does not."""
    with session.running_client() as client:
        info = client.get_daemon_info()
    lines = [
        f"{name.replace('_', ' ') + ':':16}{getattr(info, name)}"
        for name in ("pid", "socket", "rest", "uptime_seconds", "version")
    ]
    lines.append(f"{'name:':16}{printable(info.name)}")
    lines.append(f"{'config:':16}{info.config or 'none (this machine alone)'}")
    print_answer(session, info, "\n".join(lines + [f"warning: {warning}" for warning in info.warnings]))


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
