"""`grid agent`: the process of a node, for machines that are not reached by SSH."""

from __future__ import annotations

import click

from distributed_grid.cli.global_options import CliSession, GridCommand


@click.command(cls=GridCommand)
@click.option("--dir", "directory", metavar="DIR", help="Where it keeps everything (default: agent in the state dir).")
@click.option(
    "--join", "token", metavar="TOKEN", help="Join a grid with this token of `grid daemon join-token create`."
)
@click.option("--address", metavar="HOST:PORT", help="Where the control plane is, if not where the token says.")
@click.option("--name", help="The name of this node when joining (default: the host name).")
@click.option(
    "--declare-gpus", type=click.IntRange(0, 1024), default=0, help="Pretend to have so many GPUs (for labs)."
)
@click.option("--end", is_flag=True, help="Stop every job that is left there, then exit.")
@click.pass_obj
def agent(
    session: CliSession, directory: str | None, token: str | None, address: str | None, name: str | None,
    declare_gpus: int, end: bool,
) -> int:  # fmt: skip
    """Serve as a node until stopped; what runs goes on, and the next agent finds it again.

    Over SSH nobody types this: `grid cluster start` does it. On other machines, join with a token once; after that
    `grid agent` alone is enough.
    """
    from distributed_grid.agent.__main__ import main

    words = ["--dir", directory or str(session.places.state_dir / "agent")]
    words += ["--declare-gpus", str(declare_gpus)] if declare_gpus else []
    for option, value in (("--join", token), ("--address", address), ("--name", name)):
        words += [option, value] if value else []
    return main([*words, "--end"] if end else words)
