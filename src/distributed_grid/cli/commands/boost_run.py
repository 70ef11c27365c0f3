"""`grid boost run`: a command that uses a boost, on the node that lends it."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import click

from distributed_grid.cli.commands.run import Follower, fetch_back, here, ship_along, variables_of
from distributed_grid.cli.global_options import CliSession, GridCommand
from distributed_grid.cli.output import answer
from distributed_grid.client.environment import caller_environment, make_sure_of_text
from distributed_grid.errors import GridError


@click.command("run", cls=GridCommand, context_settings={"allow_interspersed_args": False})
@click.option("-j", "--job-id", default="", help="A name of your own for the job.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait: print the job's id and return.")
@click.option("-e", "--env", multiple=True, metavar="K[=V]", help="A variable for the command.")
@click.option("--isolated", is_flag=True, help="Run in an empty private directory instead of the current one.")
@click.option("--workdir", metavar="DIR", help="What is shipped to another node, or none (default: this directory).")
@click.option("--fetch", multiple=True, metavar="GLOB", help="Bring these files back afterwards, such as 'out/**'.")
@click.argument("boost_id", metavar="ID")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(session: CliSession, /, **options: Any) -> int:
    """Run COMMAND with what the boost ID holds, on the node that lends it; `--` may come before COMMAND.

    Where the boost is reserved in Ray, the tasks and actors of a Ray program use it, too, without a change to the
    program. Everything else is as with run-shared: output is shown as it comes, Ctrl-C cancels, and the exit code is
    the command's. When the boost is over the command is stopped.
    """
    words = list(options["command"])
    words = words[1:] if words[0] == "--" else words
    make_sure_of_text(*words, options["job_id"])
    env = variables_of(options["env"])
    submission: dict[str, Any] = {
        "request_id": uuid.uuid4().hex,
        "boost_id": options["boost_id"],
        "argv": words,
        "job_id": options["job_id"],
        "env": caller_environment(env),
        "given": list(env),
        "cwd": "" if options["isolated"] else here(),
    }
    try:
        with session.client() as client:
            found = client.call("get_boost", boost_id=options["boost_id"])["boost"]
            submission["require"] = [found["source_node"]]
            ship_along(session, client.greet(), options, submission)
            del submission["require"]
            job = client.call("run_in_boost", **submission)["job"]
        if options["detach"]:
            answer(session, job, job["job_id"])
            return 0
        code = Follower(session, job["uid"]).run()
        if options["fetch"]:
            fetch_back(session, job["uid"], options)
        return code
    except KeyboardInterrupt:  # before the follower looks after it
        with contextlib.suppress(GridError), session.client(may_start=False) as client:
            client.call("cancel_job", job_id=submission["request_id"])
        return 130
