"""Command line of the agent: `python -m distributed_grid.agent --dir D`; people type `grid agent`.

The directory D (0700) holds all its state:

    agent.lock     held while it runs: one agent for a directory
    agent.pid      its pid, start time and boot id
    agent.log      its log
    failure.txt    the error that has ended the last one
    link.json      {"node", "socket"}: the control plane's Unix socket; new with every SSH connection
    joined.json    instead of it, after joining with a token: address, certificate, node key
    heard          whose time changes while there is a control plane, on a machine of a provider
    epoch.json     the highest epoch seen of a control plane
    age.json       the age clock: what deletions by age compare with
    jobs/          its attempts
    content/       fetched files of working directories
    moves/         processes that are moved away from here (`offloading/move_journal.py`)
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from distributed_grid.agent.files.job_dir import HOST_LOCK, LIVE
from distributed_grid.errors import BadInput, GridError
from distributed_grid.posix.private_files import try_lock

JOIN_VARIABLE = "GRID_JOIN_TOKEN"
MAX_TOKEN_BYTES = 65536


def main(arguments: list[str] | None = None) -> int:
    """Run the agent, or with --end stop every job that is left; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="grid-agent", description="The process of a node.")
    parser.add_argument("--dir", required=True, help="the directory of this agent's state")
    parser.add_argument("--end", action="store_true", help="stop every job that is left here, then exit")
    parser.add_argument("--declare-gpus", type=int, default=0, help="pretend to have so many GPUs (for labs)")
    parser.add_argument("--join", metavar="TOKEN", help="join a grid with this token")
    parser.add_argument("--join-file", metavar="FILE", help="the same, with the token in a file; - is standard input")
    parser.add_argument("--join-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help="HOST:PORT of the control plane, where the token's is not to be used")
    parser.add_argument("--name", help="the name of this node when joining (default: the host name)")
    options = parser.parse_args(arguments)
    try:
        if options.join or JOIN_VARIABLE in os.environ:
            _restart_without_token(options)
        options.join = _read_token(options)
        if options.end and not has_leftovers(options.dir):
            return 0
        from distributed_grid.agent import agent_process

        return agent_process.stop_jobs(options.dir) if options.end else agent_process.serve(options)
    except GridError as failure:
        print(f"grid agent: {failure}", file=sys.stderr)
        return failure.exit_code


def _restart_without_token(options: argparse.Namespace) -> NoReturn:
    """Go on in this process as one whose command line and environment, which others may see, have no join token.

    One in the environment is for the first time only: it may stay there for good, and is good once.
    """
    command = [sys.executable, "-m", "distributed_grid.agent", "--dir", options.dir]
    command += ["--declare-gpus", str(options.declare_gpus)] if options.declare_gpus else []
    command += ["--end"] if options.end else []
    for option, value in (("--join-file", options.join_file), ("--address", options.address), ("--name", options.name)):
        command += [option, value] if value else []
    environ = dict(os.environ)
    first = environ.pop(JOIN_VARIABLE, "")
    has_joined = os.path.exists(os.path.join(options.dir, "joined.json"))
    token = options.join or ("" if has_joined or options.join_file else first)
    if token:
        descriptor = os.memfd_create("join-token", 0)
        os.write(descriptor, token.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        command += ["--join-fd", str(descriptor)]
    os.execve(sys.executable, command, environ)


def _read_token(options: argparse.Namespace) -> str:
    """The join token where one was given; read once, and then nowhere but in memory."""
    source = options.join_fd if options.join_fd is not None else options.join_file
    if source is None:
        return ""
    try:
        with open(0 if source == "-" else source, closefd=source != "-") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as failure:
        raise BadInput(f"the join token cannot be read from {source}: {failure}") from failure
    if not token:
        raise BadInput(f"there is no join token in {source}")
    return token


def has_leftovers(directory: str) -> bool:
    """True if an attempt, a memory server or an agent may be left in a directory; also if that is unknown.

    Imports little: every node that is stopped asks it, and most have nothing left.
    """
    folder = os.path.abspath(os.path.expanduser(directory))
    try:
        if os.stat(folder).st_uid != os.geteuid() or os.listdir(f"{folder}/jobs/{LIVE}"):
            return True
        if os.path.lexists(f"{folder}/memory/server.lock"):
            return True
        return any(map(_is_locked, (f"{folder}/agent.lock", f"{folder}/jobs/{HOST_LOCK}")))
    except OSError:
        return True


def _is_locked(path: str) -> bool:
    """True if some process has a file locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
