"""`python -m distributed_grid.agent --dir D`: the process of a node; people type `grid agent` or `grid cluster start`.

The directory D (0700) is all it has:

    agent.lock     held for life: one agent for a directory
    agent.pid      who it is: pid, start time, boot
    agent.log      what it has to say
    link.json      {"node", "socket"}: the Unix socket on which the control plane is; new with every SSH connection
    joined.json    instead of it, after joining with a token: address, certificate, node key
    epoch.json     the highest epoch seen of a control plane
    jobs/          its attempts
    content/       what it was sent of working directories
"""

from __future__ import annotations

import argparse
import sys

from distributed_grid.errors import GridError


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop, or with --end stop everything that is left; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="grid-agent", description="The process of a node.")
    parser.add_argument("--dir", required=True, help="where this agent keeps everything")
    parser.add_argument("--end", action="store_true", help="stop every job that is left here, then exit")
    parser.add_argument("--declare-gpus", type=int, default=0, help="pretend to have so many GPUs (for labs)")
    parser.add_argument("--join", metavar="TOKEN", help="join a grid with this token")
    parser.add_argument("--address", help="HOST:PORT of the control plane, where the token's is not to be used")
    parser.add_argument("--name", help="the name of this node when joining (default: the host name)")
    options = parser.parse_args(arguments)
    from distributed_grid.agent import process

    try:
        return process.end(options.dir) if options.end else process.serve(options)
    except GridError as failure:
        print(f"grid agent: {failure}", file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
