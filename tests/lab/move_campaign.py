"""`python -m tests.lab.move_campaign [--moves N] [--seed N]`: processes are moved between real hosts, and at a random
moment of each move somebody is killed or a cable is cut.

Every run of the program writes a heartbeat every few hundredths of a second, so what was alive when is on record:

- never two: no two runs overlap in time;
- never none: while its node lives, the original stands still for no longer than its freeze lease;
- never lost: exactly one run comes to the end, and its result is in the working directory of the original.

All lab hosts have the clock of this machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.clusters import Cluster, agent_of
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.support.shell import wait_until

FREEZE_SECONDS = 3.0
HOLD_SECONDS = 8
SLACK_SECONDS = 2.0
"""What a loaded machine may add to a time that is measured from outside."""
LINK_KBIT = 16_000
STATES = ("proposed", "reserved", "shipped", "frozen", "decided", "dead", "running")
BEATS, BEAT_SECONDS = 250, 0.04
PROGRAM = """
import os, pathlib, sys, time
beats, pause = int(sys.argv[1]), float(sys.argv[2])
node = os.environ.get("GRID_NODE", "original")
mine = f"beats.{node}.{time.time_ns()}"
for number in range(beats):
    with open(mine, "a") as file: file.write(f"{time.time_ns()}\\n")
    pathlib.Path("changing.new").write_bytes(os.urandom(200_000))
    os.replace("changing.new", "changing")
    time.sleep(pause)
pathlib.Path("result").write_text(f"{mine}\\n")
"""


class Run(NamedTuple):
    """One run of the program: where, and the moments (seconds) of its heartbeats."""

    node: str
    name: str
    beats: tuple[float, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.beats) == BEATS


class MoveCampaign:
    """Moves and faults of one lab."""

    def __init__(self, lab: Lab, cluster: Cluster, seed: int) -> None:
        self._lab, self._cluster = lab, cluster
        self._random = random.Random(seed)
        self.seen: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[str] = Counter()

    def run(self, number: int) -> list[str]:
        """One move with a fault; the broken promise in words."""
        names = [host.name for host in self._lab]
        source_name, target_name = self._random.sample(names, 2)
        source, target = self._lab.host(source_name), self._lab.host(target_name)
        folder = f"{source.home}/work{number}"
        self._start(source, folder)
        pid = wait_until(lambda: _pid_of(source, folder), 30)
        self._lab.slow(source, LINK_KBIT)  # so that the states last long enough to be hit
        words = ("-n", source_name, "-t", target_name, "--consent", "--no-wait", "--freeze", str(FREEZE_SECONDS))
        done = self._cluster("offload", "execute", str(pid), *words, "--json")
        if done.returncode:
            return [f"move {number} was refused: {done.stderr.strip()}"]
        (move,) = self._cluster.query("list_moves")["moves"] or [None]
        fault = self._random.choice(FAULTS)
        state = self._reach(move["move_id"], self._random.choice(STATES)) if move is not None else "ended"
        heal = fault.strike(self, source, target)
        self.seen[fault.name, state] += 1
        time.sleep(self._random.uniform(0.2, 4))
        heal()
        self._lab.slow(source, None)
        return self._settled(number, source, folder, fault.name, state)

    def _reach(self, move_id: str, wanted: str) -> str:
        """Wait until a move is in this state, or in a later one, and then a little; the state that it was seen in."""
        until = time.monotonic() + 10
        state = ""
        while time.monotonic() < until and not state:
            row = self._row(move_id)
            seen = row.get("end") or row.get("state") or "ended"
            if seen not in STATES or STATES.index(seen) >= STATES.index(wanted):
                state = seen
        time.sleep(self._random.uniform(0, 0.05))
        return state

    def _start(self, source: Host, folder: str) -> None:
        source.run(["mkdir", folder])
        source.run(["tee", f"{folder}/program.py"], input=PROGRAM)
        source.run(["sh", "-c", f"head -c 3000000 /dev/urandom > {folder}/data"])
        start = f"cd {folder} && exec setsid -f python3 program.py {BEATS} {BEAT_SECONDS} > log 2>&1 < /dev/null"
        source.run(["sh", "-c", start])

    def _row(self, move_id: str) -> dict[str, Any]:
        found = self._cluster.query("get_move", move_id=move_id)
        return dict(found["move"]) if found else {}

    def _settled(self, number: int, source: Host, folder: str, fault: str, state: str) -> list[str]:
        """Wait until the work is done and nothing moves, then look at what is on record."""
        what = f"move {number} ({fault} while {state})"

        def over() -> bool:
            return not self._cluster.observe("offload", "status") and source.outside(f"{folder}/result").exists()

        try:
            wait_until(over, 120, pause=0.5)
        except AssertionError:
            moves = self._cluster.json("offload", "status", "--all")
            last = {key: moves[0][key] for key in ("move_id", "state", "waits_for", "problem", "end")} if moves else {}
            return [f"{what} is not over after 120 s: {last}"]
        row = self._cluster.json("offload", "status", "--all")[0]
        self.ends[row["end"]] += 1
        return [f"{what}: {problem}" for problem in problems_of(_runs(source, folder))]

    # ------------------------------------------------------------------ faults

    def kill_control_plane(self, source: Host, target: Host) -> Callable[[], None]:
        self._cluster.kill_daemon()
        return lambda: self._revive()

    def kill_agent(self, host: Host) -> Callable[[], None]:
        _kill_all(host, [agent_of(host)])
        return lambda: self._revive()

    def kill_guards(self, source: Host) -> Callable[[], None]:
        _kill_all(source, source.find("guard_process"))
        return lambda: None

    def cut(self, host: Host) -> Callable[[], None]:
        self._lab.cut(host)

        def heal() -> None:
            self._lab.heal(host)
            self._revive()

        return heal

    def cancel(self, source: Host, target: Host) -> Callable[[], None]:
        for move in (self._cluster.query("list_moves") or {"moves": []})["moves"]:
            self._cluster("offload", "cancel", move["move_id"])
        return lambda: None

    def _revive(self) -> None:
        """Start what is not there any more, and wait until every node is heard."""
        self._cluster("cluster", "start", timeout=120)
        wait_until(lambda: all(self._cluster.is_alive(host.name) for host in self._lab), 90, pause=0.5)


class Fault(NamedTuple):
    """Something that goes wrong; `strike` returns how it is undone."""

    name: str
    strike: Callable[[MoveCampaign, Host, Host], Callable[[], None]]


FAULTS = (
    Fault("control plane killed", MoveCampaign.kill_control_plane),
    Fault("source's agent killed", lambda campaign, source, target: campaign.kill_agent(source)),
    Fault("target's agent killed", lambda campaign, source, target: campaign.kill_agent(target)),
    Fault("guards killed", lambda campaign, source, target: campaign.kill_guards(source)),
    Fault("source cut off", lambda campaign, source, target: campaign.cut(source)),
    Fault("target cut off", lambda campaign, source, target: campaign.cut(target)),
    Fault("cancelled", MoveCampaign.cancel),
)


def problems_of(runs: list[Run]) -> list[str]:
    """Which laws these runs of one program have broken, in words."""
    found = []
    ordered = sorted((run for run in runs if run.beats), key=lambda run: run.beats[0])
    for one, other in pairwise(ordered):
        if other.beats[0] <= one.beats[-1]:
            both = one.beats[-1] - other.beats[0]
            found.append(f"two at once: {one.name} and {other.name} for {both:.2f} s")
    whole = [run.name for run in ordered if run.is_whole]
    if len(whole) != 1:
        found.append(f"{len(whole)} runs came to the end: {[(run.name, len(run.beats)) for run in ordered]}")
    for run in ordered:
        pauses = [later - sooner for sooner, later in pairwise(run.beats)]
        if run.node == "original" and max(pauses, default=0) > FREEZE_SECONDS + SLACK_SECONDS:
            found.append(f"{run.name} stood still for {max(pauses):.2f} s")
    return found


def _runs(source: Host, folder: str) -> list[Run]:
    runs = []
    for file in source.outside(folder).glob("beats.*"):
        beats = tuple(int(line) / 1e9 for line in file.read_text().split())
        runs.append(Run(file.name.split(".")[1], file.name, beats))
    return runs


def _pid_of(host: Host, folder: str) -> int:
    found = [pid for pid in host.find(" program.py ") if host.outside(f"/proc/{pid}/cwd").readlink() == Path(folder)]
    return found[0] if found else 0


def _kill_all(host: Host, pids: list[int]) -> None:
    for pid in pids:
        if pid:
            host.run(["/bin/kill", "-9", str(pid)], user="root", check=False)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.move_campaign", description=__doc__)
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moves-") as name, Lab() as lab:
        cluster = Cluster(lab, Path(name), top={"hold_seconds": HOLD_SECONDS})
        try:
            cluster("cluster", "start", check=0, timeout=120)
            wait_until(lambda: all(cluster.is_alive(host.name) for host in lab), 60)
            campaign = MoveCampaign(lab, cluster, options.seed)
            for number in range(options.moves):
                problems = campaign.run(number)
                broken += problems
                print(f"{number + 1}/{options.moves}", *problems, sep="\n  ", flush=True)
        finally:
            cluster.close()
    for (fault, state), count in sorted(campaign.seen.items()):
        print(f"{fault:24} {state:12} {count}")
    print("ends:", dict(campaign.ends), "seed", options.seed)
    print(f"{options.moves} moves, {len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
