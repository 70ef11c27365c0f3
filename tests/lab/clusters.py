"""A grid whose nodes are the hosts of a lab: a control plane outside, agents started by real SSH."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.support.shell import Shell

AGENT = "distributed_grid.agent --dir"
OURS = ("distributed_grid", "run-of-a-job")


class Cluster(Shell):
    """A control plane outside the lab, with the lab's hosts as its nodes; `top` are keys of the cluster file."""

    def __init__(self, lab: Lab, folder: Path, *, top: dict[str, Any] | None = None, **nodes: dict[str, Any]) -> None:
        (folder / "here").mkdir()
        super().__init__(folder / "state", folder / "here")
        self.lab = lab
        self.file = folder / "cluster.yaml"
        keys = {name.replace("_", "-"): given for name, given in nodes.items()}
        self.file.write_text(lab.config(nodes=keys, **(top or {})))
        self.env["GRID_CONFIG"] = str(self.file)

    def results(self, *words: str, check: int = 0) -> dict[str, dict[str, Any]]:
        """Result of a command for each node."""
        done = self("cluster", *words, "--json", check=check, timeout=120)
        return {row["node_id"]: row for row in json.loads(done.stdout)}

    def node(self, name: str) -> dict[str, Any]:
        """What `grid cluster status` says of a node, without the start of a process where a control plane runs."""
        found = self.query("manage_cluster", verb="status", nodes=[name])
        (row,) = found["nodes"] if found else self.json("cluster", "status", name)
        assert isinstance(row, dict)
        return row

    def lends_nothing_because(self, name: str, word: str) -> bool:
        """True if the status of a node gives a reason with this word for what it does not lend."""
        rows = [row for row in self.observe("status")["nodes"] if row["node_id"] == name]
        return any(word in reason for row in rows for reason in row["keeps"])

    def is_alive(self, name: str) -> bool:
        row = self.node(name)
        return (row["state"], row["link"]) == ("alive", "up") and row["seconds_since_heard"] < 5

    def purge_nodes(self) -> None:
        """Leave nothing of ours on any host."""
        self.lab.mend()
        used = [host.name for host in self.lab if remains(host) != ([], [])]
        if used:
            done = self("cluster", "stop", "--force", "--purge", "--discard-results", *used, timeout=120)
            print(done.stdout, done.stderr, sep="\n")  # shown where something has remained

    def close(self) -> None:
        self.purge_nodes()
        super().close()

    def clear_leftovers(self) -> dict[str, tuple[list[str], list[str]]]:
        """Our processes and files that are still on hosts; ended and removed, so that one test's are not the next's."""
        return {host.name: found for host in self.lab if (found := clear(host)) != ([], [])}


def remains(host: Host) -> tuple[list[str], list[str]]:
    """Our processes and our files on a host."""
    ours = ["(", "-path", f"{host.home}/*grid*", "-o", "-path", "/tmp/*grid*", ")"]
    files = host.run(["find", host.home, "/tmp", "-mindepth", "1", *ours], user="root").stdout.split()
    return [line for _, line in host.processes() if any(word in line for word in OURS)], files


def clear(host: Host) -> tuple[list[str], list[str]]:
    """What remains on a host; afterwards it is gone."""
    found = remains(host)
    for pid, line in host.processes():
        if any(word in line for word in OURS):
            with contextlib.suppress(ProcessLookupError):
                host.kill(pid)
    if found[1]:
        host.run(["rm", "-rf", "--", *found[1]], user="root")
    return found


def agent_of(host: Host) -> int:
    """The pid of the agent on a host; 0 where there is none."""
    found = host.find(AGENT)
    assert len(found) <= 1
    return found[0] if found else 0
