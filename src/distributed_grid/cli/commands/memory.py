"""`grid memory`: bytes in the memory of other nodes, from the shell."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.cli.command_line import Argument, Option, group
from distributed_grid.cli.output import (
    echo,
    format_size,
    format_span,
    format_time,
    parse_seconds,
    parse_size,
    print_answer,
    printable,
    table,
    unique_prefixes,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.conversation import JsonObject, required
from distributed_grid.client.memory.directory import BlockDirectoryClient, agent_directory, length_of, preference_note
from distributed_grid.errors import Ambiguous

if TYPE_CHECKING:
    from distributed_grid.api.answers.memory import BlockRow, MemoryStats

F = TypeVar("F", bound=Callable[..., Any])
DAY_SECONDS = 86_400.0


ALLOCATION_OPTIONS = (
    Option("--node", default="", metavar="NODE", help="The node that should lend it; else another one may."),
    Option("--copies", type=int, default=1, show_default=True, help="Number of nodes with a copy: one may be lost."),
    Option(
        "--ttl",
        type=parse_seconds,
        default=DAY_SECONDS,
        metavar="SECONDS",
        help="When it ends by itself: no program renews what the shell makes (default: one day, 86400).",
    ),
)
"""The options of commands that allocate a block."""


@group()
def memory() -> None:
    """Keep bytes in the memory of other nodes. A block is named by its key, its id, or any unique prefix of that."""


@memory.command(
    Argument("size", metavar="SIZE", type=parse_size),
    *ALLOCATION_OPTIONS,
    Option("--key", default="", metavar="KEY", help="A name for it; what went by that name before is freed."),
)
def allocate(session: CliSession, size: int, node: str, copies: int, ttl: float, key: str) -> None:
    """Allocate a block of SIZE: 5GB, 512MB, 1.5GiB, 4096 (bytes). It is all zero."""
    with directory_of(session) as directory:
        block = directory.allocate_block(
            request_id=uuid.uuid4().hex,
            size=size,
            preferred_node=node,
            copies=copies,
            ttl_seconds=ttl,
            name=key,
        ).block
    _print_created(session, block, node)


@memory.command(Argument("names", metavar="ID|KEY...", nargs=-1, required=True))
def deallocate(session: CliSession, names: tuple[str, ...]) -> None:
    """Free blocks; their bytes are gone. Where one is not found, none is freed."""
    with directory_of(session, any_config=True) as directory:
        blocks = directory.every_block()
        meant = {block.block_id: block for block in (find_block(blocks, name) for name in names)}
        freed = [directory.free_block(block_id=block_id).block for block_id in meant]
    print_answer(
        session,
        freed,
        "\n".join(printable(f"block {block.block_id}{_name_suffix(block)}: freed") for block in freed),
    )


@memory.command(Argument("key", metavar="KEY"), Argument("file", metavar="FILE"), *ALLOCATION_OPTIONS)
def store(session: CliSession, /, key: str, file: str, **options: Any) -> None:
    """Keep the content of FILE (- is the standard input) under KEY.

    KEY has its old content until all of the new one is there. Interrupted, it leaves nothing behind.
    """
    from distributed_grid.cli.memory_transfer import store_file

    with directory_of(session) as directory:
        block = store_file(directory, key, file, node=options["node"], copies=options["copies"], ttl=options["ttl"])
    _print_created(session, block, options["node"])


@memory.command(
    Argument("name", metavar="KEY|ID"),
    Option("-o", "--output", default="", metavar="FILE", help="Where to write it (default, and -: standard output)."),
)
def retrieve(session: CliSession, name: str, output: str) -> None:
    """Write what is kept under KEY, or in the block ID, to a file or to the standard output.

    FILE is replaced when all of it is there. Interrupted, it is left as it was.
    """
    from distributed_grid.cli.memory_transfer import check_output, retrieve_file, retrieve_to_stdout

    to_file = check_output(output, json=session.json)
    with directory_of(session, query_only=True) as directory:
        if not to_file:
            retrieve_to_stdout(directory, name)
            return
        block, size = retrieve_file(directory, name, output)
    shown = {**cast("JsonObject", block), "path": output, "bytes": size}
    print_answer(session, shown, printable(f"wrote {output}: {format_size(size)} of block {block.block_id}"))


@memory.command(name="list")
def list_(session: CliSession) -> None:
    """The blocks, their nodes, and when they expire."""
    with directory_of(session, query_only=True) as directory:
        blocks = directory.every_block()
    print_answer(session, blocks, list_text(blocks, datetime.now(UTC)))


@memory.command()
def stats(session: CliSession) -> None:
    """How much of the nodes' memory blocks hold, and what nodes still lend."""
    with directory_of(session, query_only=True) as directory:
        answer = directory.get_memory_stats()
    print_answer(session, answer, stats_text(answer))


def directory_of(
    session: CliSession, *, query_only: bool = False, any_config: bool = False
) -> contextlib.closing[BlockDirectoryClient]:
    """The block directory: through the agent of a job or of this machine, else the control plane."""
    local = agent_directory(session.state_dir, has_config=session.named_config is not None)
    return contextlib.closing(
        local or BlockDirectoryClient(lambda: session.client(query_only=query_only, any_config=any_config))
    )


def find_block(blocks: list[BlockRow], name: str) -> BlockRow:
    """The block with this name, this id, or the only one whose id begins so."""
    for field in ("name", "block_id"):
        if name and (named := [block for block in blocks if getattr(block, field) == name]):
            return named[0]
    fitting = [block for block in blocks if fits(block.block_id, name)]
    if len(fitting) > 1:
        ids = sorted(block.block_id for block in fitting)
        raise Ambiguous(f"{name!r} fits several: {', '.join(ids[:5])}", ids)
    if not fitting:
        raise not_found("block", name)
    return fitting[0]


def _print_created(session: CliSession, block: BlockRow, preferred: str) -> None:
    """Show a new block, and say where another node lends than the preferred one."""
    note = preference_note(block, preferred)
    if note:
        echo(printable(f"grid: {note}"), err=True)
    print_answer(session, block, created_text(block))


def created_text(block: BlockRow) -> str:
    size, until = format_size(length_of(block)), format_time(block.expires_at)
    where = f"{size} on {_locations(block)}{_name_suffix(block)}, until {until}"
    return f"block {block.block_id}\n{printable(where)}"


def list_text(blocks: list[BlockRow], now: datetime) -> str:
    short = unique_prefixes(block.block_id for block in blocks)
    rows = [
        (
            short[block.block_id],
            block.name,
            format_size(length_of(block))
            + (f" (holds {format_size(block.size)})" if length_of(block) > block.size else ""),
            _locations(block),
            block.copies,
            block.state + (f": {block.detail}" if block.state == "lost" else ""),
            format_span((datetime.fromisoformat(required(block.expires_at)) - now).total_seconds()),
        )
        for block in blocks
    ]
    return table(("ID", "KEY", "SIZE", "NODES", "COPIES", "STATE", "EXPIRES IN"), rows, empty="no blocks")


def stats_text(stats: MemoryStats) -> str:
    """Memory held in all, and node by node."""
    count = stats.blocks
    parts = [f"{count} block{'' if count == 1 else 's'}, {format_size(stats.bytes)}"]
    if stats.bytes_on_disk:
        parts.append(f"{format_size(stats.bytes_on_disk)} on disk")
    parts += [f"{number} {state}" for number, state in ((stats.moving, "moving"), (stats.lost, "lost")) if number]
    rows = [
        (
            node.node,
            node.blocks,
            format_size(node.bytes),
            format_size(node.free_bytes),
            node.address if node.serving else "not used yet",
        )
        for node in stats.nodes
    ]
    shown = table(("NODE", "BLOCKS", "HELD", "STILL LENDS", "MEMORY SERVER"), rows, empty="no nodes")
    return f"{', '.join(parts)}\n\n{shown}"


def _locations(block: BlockRow) -> str:
    return ", ".join([*block.nodes, *(["disk"] if block.on_disk else [])]) or "-"


def _name_suffix(block: BlockRow) -> str:
    return f" as {block.name}" if block.name else ""
