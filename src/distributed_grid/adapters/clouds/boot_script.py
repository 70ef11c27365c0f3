"""Boot script of a rented machine: brings the agent there, joins with the token, and ends the machine with the agent.

The script is the user-data of an instance. The one thing in it that is worth anything is the join token: it works once,
for the name of this worker, until the launch deadline has passed.
"""

from __future__ import annotations

import shlex

from distributed_grid.ports import WorkerOrder

HOME = "/var/lib/distributed-grid"
JOIN_VARIABLE = "GRID_JOIN_TOKEN"


def boot_script(order: WorkerOrder) -> str:
    """A shell script that is the same whenever the identical order is made again."""
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(order.environ.items()) if name != JOIN_VARIABLE
    ]
    token = shlex.quote(order.environ.get(JOIN_VARIABLE, ""))
    return "\n".join(
        [
            "#!/bin/sh",
            "umask 077",
            f"HOME={HOME}; export HOME",
            "trap 'shutdown -P now' EXIT",
            f"mkdir -p {HOME} && cd {HOME} || exit 1",
            *exports,
            f"printf %s {token} > join-token",
            f"grid agent --dir {HOME}/agent --join-file join-token --name {shlex.quote(order.worker_id)}",
            "",
        ]
    )
