"""Command line of the agent: `python -m distributed_grid.agent --dir D`; people type `grid agent`.

The directory D (0700) holds all its state:

    agent.lock     held while it runs: one agent for a directory
    agent.pid      its pid, start time and boot id
    agent.log      its log
    link.json      {"node", "socket"}: the control plane's Unix socket; new with every SSH connection
    joined.json    instead of it, after joining with a token: address, certificate, node key
    epoch.json     the highest epoch seen of a control plane
    jobs/          its attempts
    content/       fetched files of working directories
"""

from __future__ import annotations

import argparse
import sys

from distributed_grid.errors import GridError


def main(arguments: list[str] | None = None) -> int:
    """Run the agent, or with --end stop every job that is left; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="grid-agent", description="The process of a node.")
    parser.add_argument("--dir", required=True, help="the directory of this agent's state")
    parser.add_argument("--end", action="store_true", help="stop every job that is left here, then exit")
    parser.add_argument("--declare-gpus", type=int, default=0, help="pretend to have so many GPUs (for labs)")
    parser.add_argument("--join", metavar="TOKEN", help="join a grid with this token")
    parser.add_argument("--address", help="HOST:PORT of the control plane, where the token's is not to be used")
    parser.add_argument("--name", help="the name of this node when joining (default: the host name)")
    options = parser.parse_args(arguments)
    from distributed_grid.agent import agent_process

    try:
        return agent_process.stop_jobs(options.dir) if options.end else agent_process.serve(options)
    except GridError as failure:
        print(f"grid agent: {failure}", file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
