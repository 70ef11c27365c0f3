"""Fuzz campaign: batches of mutated frames against each target, with honest work going on meanwhile.

After each batch every process under test is alive under the same pid, has no traceback in its log, answers an honest
request in time, and has no more descriptors than before; at the end none has grown by more than a stated bound.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from distributed_grid.client.client import Client
from distributed_grid.state_dir import StateDir
from tests.fuzz.agent_link import LyingAgent, LyingControlPlane
from tests.fuzz.memory_server import ControlMessages, DataFrames, ServerProcess
from tests.fuzz.processes import FuzzedGrid, Watched
from tests.fuzz.rest import Rest
from tests.fuzz.rpc_socket import RpcSocket
from tests.fuzz.target import Hang, Tally, Target
from tests.support.processes import is_running

HONEST_SECONDS = 15.0
MAX_GROWTH_BYTES = 96 * 1024 * 1024
MAX_MORE_FDS = 24
SETTLE_SECONDS = 30.0
BATCH_FRAMES = 5_000
WARM_UP = 0.1
SHARES = {
    "daemon socket": 0.2,
    "agent to daemon": 0.2,
    "daemon to agent": 0.15,
    "memory data": 0.35,
    "memory control": 0.05,
    "REST": 0.05,
}


class HonestWork(threading.Thread):
    """Asks, runs jobs and reads memory all the time; each answer has to come in time."""

    def __init__(self, state_dir: Path, checks: list[Callable[[], None]]) -> None:
        super().__init__(daemon=True)
        self._state_dir = StateDir(state_dir)
        self._checks = checks
        self._stopping = threading.Event()
        self.longest: dict[str, float] = {}
        self.jobs = 0
        self.problem = ""

    def run(self) -> None:
        work = [("job here", lambda: self._run_job("here")), ("job there", lambda: self._run_job("honest"))]
        work += [(getattr(check, "__qualname__", "check"), check) for check in self._checks]
        while not self._stopping.is_set():
            for name, one in work:
                try:
                    self.measure(name, one)
                except Exception as failure:
                    self.problem = f"honest work ({name}) failed: {type(failure).__name__}: {failure}"
                    return
                self._stopping.wait(0.1)

    def measure(self, name: str, work: Callable[[], None]) -> None:
        """Do one thing, and remember how long it took."""
        began = time.monotonic()
        work()
        took = time.monotonic() - began
        self.longest[name] = max(took, self.longest.get(name, 0.0))
        if took > HONEST_SECONDS:
            raise Hang(f"{name} took {took:.1f} s")

    def _run_job(self, node: str) -> None:
        self.jobs += 1
        with Client(self._state_dir, may_start=False) as client:
            job = client.call(
                "submit_job",
                request_id=f"honest-{self.jobs}",
                argv=["true"],
                amount=0.1,
                strategy="node_specific",
                require=[node],
                priority="high",
                **({"job_id": "finished"} if self.jobs == 1 else {}),
            )["job"]
            ended = client.call("wait_for_job", job_id=job["uid"], timeout_seconds=2 * HONEST_SECONDS)["job"]
            assert ended["exit_code"] == 0, ended

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * HONEST_SECONDS)


class Campaign:
    """All targets with the processes behind them; a context manager that ends what it started."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.tallies: dict[str, Tally] = {}
        self.longest: dict[str, float] = {}
        self._closing = contextlib.ExitStack()
        try:
            self._open(folder, str(seed))
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, seed: str) -> None:
        grid = FuzzedGrid(folder)
        self._closing.callback(grid.close)
        memory = ServerProcess(folder / "memory")
        self._closing.callback(memory.close)
        lying = LyingControlPlane(folder / "lying.sock", "fuzzed", seed)
        self._closing.callback(lying.close)
        socket = RpcSocket(grid.state_dir, seed)
        data = DataFrames(memory, seed)
        control = ControlMessages(memory, seed, data)
        self._closing.callback(control.close)
        rest = Rest(grid.host_dir, seed)
        rest.check()
        daemon = Watched("daemon", grid.daemon_pid(), StateDir(grid.state_dir).log)
        self.watched = [
            daemon,
            grid.start_honest_agent(),
            grid.start_fuzzed_agent("fuzzed", folder / "lying.sock"),
            Watched("memory server", memory.pid, memory.log),
        ]
        agents = [folder / name / "failure.txt" for name in ("honest", "fuzzed")]
        self._reports = [StateDir(grid.state_dir).failure_report, *agents]
        self.targets: list[Target] = [
            socket,
            LyingAgent(grid.links, seed, socket.check),
            lying,
            data,
            control,
            rest,
        ]
        self.honest = HonestWork(grid.state_dir, [socket.check, rest.check, data.check])
        self.honest.start()
        self._closing.callback(self.honest.stop)

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, frames: int, only: str = "") -> Iterator[str]:
        """Send so many frames in all; yields what was done after each batch. AssertionError where something broke."""
        targets = [target for target in self.targets if only in target.name]
        whole = sum(SHARES[target.name] for target in targets)
        goals = {target.name: int(frames * SHARES[target.name] / whole) for target in targets}
        is_warm = False
        for number in range(1_000_000):
            left = [target for target in targets if self._tally(target).frames < goals[target.name]]
            if not left:
                break
            for target in left:
                tally = self._tally(target)
                size = min(BATCH_FRAMES, goals[target.name] - tally.frames, max(500, goals[target.name] // 20))
                began = time.monotonic()
                try:
                    target.run(size, Random(f"{self.seed}/{target.name}/{number}"), tally)
                    self._check(target)
                except Exception as failure:
                    raise AssertionError(self._story(target, number, goals[target.name], failure)) from failure
                yield f"{target.name}, batch {number}: {tally.frames:,} frames, {time.monotonic() - began:.1f} s"
            if not is_warm and all(self._tally(one).frames >= WARM_UP * goals[one.name] for one in targets):
                is_warm = True
                for process in self.watched:
                    process.set_baseline()
        self._check_growth()

    def _tally(self, target: Target) -> Tally:
        return self.tallies.setdefault(target.name, Tally())

    def _story(self, target: Target, number: int, goal: int, failure: Exception) -> str:
        found = [trace for process in self.watched if (trace := process.new_tracebacks())]
        return "\n".join(
            [
                f"{target.name}, batch {number} of seed {self.seed}: {type(failure).__name__}: {failure}",
                *found,
                f"again: python -m tests.fuzz --seed {self.seed} --frames {goal} --target '{target.name}'",
            ]
        )

    def _check(self, target: Target) -> None:
        self.honest.measure(target.name, target.check)
        assert not self.honest.problem, self.honest.problem
        for process in self.watched:
            assert is_running(process.pid), f"{process.name} (pid {process.pid}) is gone"
            trace = process.new_tracebacks()
            assert not trace, f"{process.name} logged a traceback:\n{trace}"
        for report in self._reports:
            assert not report.exists(), report.read_text()
        deadline = time.monotonic() + SETTLE_SECONDS
        for process in self.watched:
            while process.fds() > process.fds_before + MAX_MORE_FDS:
                assert time.monotonic() < deadline, f"{process.name} has {process.fds()} descriptors"
                time.sleep(0.1)

    def _check_growth(self) -> None:
        for process in self.watched:
            grown = process.rss_bytes() - process.rss_before
            assert grown <= MAX_GROWTH_BYTES, f"{process.name} has grown by {grown >> 20} MiB"

    def table(self) -> str:
        """Sent messages, their outcomes, and their effect on the processes."""
        lines = [f"{'target':16} {'frames':>9} {'connections':>11} {'honest s':>8}  results"]
        for name, tally in self.tallies.items():
            results = ", ".join(f"{kind} {count:,}" for kind, count in tally.results.most_common(9))
            longest = self.honest.longest.get(name, 0.0)
            lines.append(f"{name:16} {tally.frames:9,} {tally.connections:11,} {longest:8.2f}  {results}")
        total = sum(tally.frames for tally in self.tallies.values())
        lines.append(f"{'in all':16} {total:9,}")
        lines.append("")
        lines.append(f"{'process':16} {'RSS before':>11} {'after':>9} {'fds before':>10} {'after':>6}")
        lines += [
            f"{one.name:16} {one.rss_before / 2**20:7.1f} MiB {one.rss_bytes() / 2**20:5.1f} MiB {one.fds_before:10} "
            f"{one.fds():6}"
            for one in self.watched
        ]
        honest = ", ".join(f"{name} {took:.2f} s" for name, took in self.honest.longest.items())
        lines += ["", f"honest: {self.honest.jobs} jobs; longest answers: {honest}"]
        return "\n".join(lines)


def progress(line: str) -> None:
    """Show how far it is, on a terminal in one line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
