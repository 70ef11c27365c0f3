"""Boot script and tags of a rented machine: the agent comes there, joins with the token, and ends the machine with it.

The script is the user-data of an instance: cloud-init or the start-up script of the cloud runs it as root. It needs a
shell and Python 3.11 or later on the image, nothing else: the agent comes from the control plane, unless the image has
`grid` of the same version.

- Whatever fails, and when the agent ends, the machine is powered off: one that cannot work must not cost money. A
  second process, the watchdog, sees to it where the script itself is killed, where the agent has not joined in time,
  and where it hangs: where it has been without the control plane longer than it may.
- The watchdog also asks for itself, as root: a TLS handshake with the pinned certificate is a proof that no job can
  make. Without one for that time the machine is powered off, whatever a job does to the files of the agent. If the
  watchdog itself is killed, a planned shutdown comes, which it keeps putting off.
- The one thing in it that is worth anything is the join token: it works once, for the name of this worker, until the
  launch deadline has passed. It is in no command line, no environment and no file besides the script.
- The agent, and so every job, runs as a user of its own where one can be made; its program belongs to root.

Tags of a machine: worker, grid and order. They are part of the call that makes it, and prove whose it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid import __version__
from distributed_grid.adapters.clouds.agent_download import read_token
from distributed_grid.errors import Conflict
from distributed_grid.ports import JOIN_VARIABLE, InstanceState, WorkerInstance, WorkerOrder


class MachineTags(Struct, frozen=True):
    """Keys of the tags, with the separator that a cloud allows in them."""

    worker: str
    grid: str
    order: str

    def of(self, order: WorkerOrder) -> dict[str, str]:
        return {self.worker: order.worker_id, self.grid: order.grid_id, self.order: order.digest}

    def match(self, tags: Mapping[str, str], worker_id: str, grid_id: str) -> bool:
        return tags.get(self.worker) == worker_id and tags.get(self.grid) == grid_id

    def instance(self, tags: Mapping[str, str], instance: str, state: InstanceState, **facts: Any) -> WorkerInstance:
        """The worker of a machine with these tags; empty names if it has none."""
        return WorkerInstance(tags.get(self.worker, ""), tags.get(self.grid, ""), instance, state, **facts)

    def check_order(self, tags: Mapping[str, str], order: WorkerOrder, machine: str) -> None:
        """Raise `Conflict` for a machine that another order, or nobody of this grid, has made under this name."""
        if not self.match(tags, order.worker_id, order.grid_id):
            raise Conflict(f"there is {machine} that is not this grid's")
        if tags.get(self.order) != order.digest:
            raise Conflict(f"there is {machine} that was ordered otherwise")


DOTTED_TAGS = MachineTags("distributed-grid.worker", "distributed-grid.grid", "distributed-grid.order")
DASHED_TAGS = MachineTags("distributed-grid-worker", "distributed-grid-grid", "distributed-grid-order")


HOME = "/var/lib/distributed-grid"
USER = "grid-worker"
DEADLINE_VARIABLE = "GRID_WORKER_JOIN_SECONDS"
"""In the environment of an order: after how long a machine whose agent has not joined is powered off."""
DEADLINE_SECONDS = "1200"
EXIT_VARIABLE = "GRID_WORKER_EXIT_SECONDS"
EXIT_MARGIN_SECONDS = 120
"""For how long after the agent should have ended for want of a control plane the machine is left alone."""
END_MINUTES = 30
"""After that time, the shutdown that a living watchdog puts off."""
MAX_ADDRESSES = 4
"""Of those in the token, and the one that the agent has joined at."""
HEARD_FILE = "heard"
"""In the directory of the agent: its time changes whenever the control plane was heard."""
MAX_BYTES = 16 * 1024
"""As much user-data an instance of EC2 takes."""

_SCRIPT = r"""#!/bin/sh
# Boots a worker of a grid: gets the agent, joins, and powers the machine off when the agent ends.
umask 077
{settings}
program=$home/agent-program

say() {{ echo "distributed-grid: $*"; }}
command -v shutdown > /dev/null || PATH=$PATH:/usr/sbin:/sbin
off='shutdown -P now || poweroff -f || systemctl poweroff --force --force'
end() {{
    trap - EXIT
    say "powering off: $why"
    eval "$off"
    [ -z "$watchdog" ] || kill -- "-$watchdog" 2> /dev/null || kill "$watchdog" 2> /dev/null
    exit 1
}}
why="the boot script was ended" watchdog=
trap end EXIT
trap 'exit 1' HUP INT TERM
fail() {{ why=$1; exit 1; }}

# Ends the machine where this script cannot: it was killed, the agent has not joined in time or hangs (n), or the
# control plane is gone (m), whatever files say: jobs reach them. It compares only times that it has counted itself.
check='{check}'
watch='n=0 m=0 c=0 r=0 heard= most=$3
lives() {{
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        command -v $python > /dev/null || continue
        $python -I -c "$5" "$6" "$2/joined.json" $7
        return
    done
}}
put_off() {{
    r=0
    [ -z "$8" ] || {{ shutdown -c; shutdown -P "+$8"; }}
}}
put_off "$@"
while kill -0 "$1" 2> /dev/null; do
    [ ! -e "$2/joined.json" ] || most=$4
    [ -z "$most" ] || {{ [ "$n" -lt "$most" ] && [ "$m" -lt "$most" ]; }} || break
    sleep 5
    n=$((n + 5)) m=$((m + 5)) c=$((c + 5)) r=$((r + 5)) last=$heard
    heard=$(stat -c %y "$2/{heard}") && [ "$heard" != "$last" ] && n=0
    command -v stat || n=0
    if [ -n "$most" ] && [ "$c" -gt $((most / 12)) ]; then
        c=0
        if lives "$@"; then
            m=0
            [ "$r" -lt 300 ] || put_off "$@"
        fi
    fi
done
'$off
detached=$(command -v setsid)
$detached sh -c "$watch" grid-watchdog $$ "$home/agent" "$deadline" "$silence" "$check" "$fingerprint" "$addresses" \
    "$end_minutes" < /dev/null > /dev/null 2>&1 &
watchdog=$!

mkdir -p "$home/agent" "$home/home" && chmod 755 "$home" && cd "$home" || fail "$home cannot be made"
HOME=$home/home
export HOME PATH

as_user=
if [ "$(id -u)" = 0 ] && command -v setpriv > /dev/null && command -v useradd > /dev/null; then
    id {user} > /dev/null 2>&1 || useradd --system --user-group --no-create-home --home-dir "$HOME" {user}
    if id {user} > /dev/null 2>&1 && chown -R {user}:{user} agent home; then
        as_user="setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all --no-new-privs"
    fi
fi
[ -n "$as_user" ] || say "warning: jobs run as $(id -un), because no user {user} could be made"

if [ "$(grid --version 2> /dev/null)" = {version} ]; then
    agent="grid agent"
else
    check="import sys, ssl, zipfile; sys.exit(sys.version_info < (3, 11))"
    for python in python3 python3.14 python3.13 python3.12 python3.11 none; do
        [ $python = none ] && fail "there is no Python 3.11 or later on this image"
        $as_user sh -c "exec $python -c '$check'" 2> /dev/null && break
    done
    if [ ! -x "$program/bin/python" ]; then
        cat > agent_download.py << 'END_OF_PROGRAM' || fail "$home cannot be written to"
{download}
END_OF_PROGRAM
        said=$(printf '%s\n' "$token" | $python -I agent_download.py "$program" "$deadline" 2>&1) ||
            fail "$(printf '%s\n' "$said" | tail -n 1)"
    fi
    agent="$program/bin/python -P -m distributed_grid.agent"
fi

say "starting the agent of $name"
cd "$HOME" || fail "$HOME cannot be used"
printf '%s\n' "$token" | $as_user $agent --dir "$home/agent" --join-file - --name "$name"
code=$?
why="the agent ended with exit code $code"
exit $code
"""


def boot_script(order: WorkerOrder, home: str = HOME, *, margin_seconds: int = EXIT_MARGIN_SECONDS) -> str:
    """A shell script that is the same whenever the identical order is made again."""
    environ = dict(order.environ)
    exit_seconds = float(environ.get(EXIT_VARIABLE, 0))
    values = {
        "home": home,
        "name": order.worker_id,
        "token": environ.pop(JOIN_VARIABLE, ""),
        "deadline": environ.pop(DEADLINE_VARIABLE, DEADLINE_SECONDS),
        "silence": str(ceil(exit_seconds) + margin_seconds) if exit_seconds else "",
    }
    try:
        addresses, fingerprint, _, _ = read_token(values["token"])
    except ValueError:
        addresses, fingerprint = [], ""
    safe = [address for address in addresses if re.fullmatch(r"[][A-Za-z0-9.:_-]+", address)]
    values["addresses"], values["fingerprint"] = " ".join(safe[:MAX_ADDRESSES]), str(fingerprint)
    silence = max(float(values["deadline"]), float(values["silence"] or 0))
    values["end_minutes"] = str(ceil(silence / 60) + END_MINUTES) if values["silence"] else ""
    settings = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    settings += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environ.items())]
    script = _SCRIPT.format(
        settings="\n".join(settings),
        user=USER,
        heard=HEARD_FILE,
        version=shlex.quote(f"grid {__version__}"),
        download=_source("agent_download.py"),
        check=check_program(),
    )
    assert len(script.encode()) <= MAX_BYTES
    return script


def check_program() -> str:
    program = _source("control_plane_check.py")
    assert "'" not in program, "it is an argument in single quotes"
    return program


def _source(name: str) -> str:
    """Program of this folder without its module docstring and comments, to save space in the script."""
    text = Path(__file__).with_name(name).read_text().split('"""', 2)[2].strip()
    return re.sub(r"  # [^\"\n]*$", "", text, flags=re.MULTILINE)
