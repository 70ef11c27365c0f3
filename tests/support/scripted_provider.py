"""A provider that follows a script of faults: answers lost before and after the effect, machines that are listed late,
no capacity, throttling, terminations that fail or take long.

`ScriptedCloud` is the cloud itself, with a clock that is handed to it. `ScriptedProvider` is the same behind a file, as
a daemon plugs it in by entry point: the file is what a person would see in the cloud's console. Its faults may also
kill the process that calls it. With `agent: true` a machine is a real `grid agent`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

GIB = 1024**3
OFFERS = (
    WorkerOffer("small-a", "cpu", WorkerResources(2000, 4 * GIB), 100_000, "zone-a"),
    WorkerOffer("small-b", "cpu", WorkerResources(2000, 4 * GIB), 120_000, "zone-b"),
    WorkerOffer("gpu-a", "gpu", WorkerResources(4000, 16 * GIB, 1), 900_000, "zone-a"),
)


class ScriptedCloud:
    """Machines, and what goes wrong with the calls about them. `faults` names them by method, the next one first:
    `lose_before`, `lose_after`, `throttle`, `no_capacity[:SCOPE]`, `refuse`, `fail`, `die_before`, `die_after`."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        visible_after: float = 0.0,
        stops_in: float = 0.0,
        forgets: bool = False,
    ) -> None:
        self.clock = clock
        self.forgets = forgets
        self.visible_after = visible_after
        self.stops_in = stops_in
        self.machines: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, list[str]] = {}
        self.calls: list[str] = []

    def existing(self) -> list[dict[str, Any]]:
        """The machines that cost money now."""
        now = self.clock()
        return [one for one in self.machines.values() if one["ends_at"] is None or one["ends_at"] > now]

    def create(self, order: WorkerOrder) -> WorkerInstance:
        with self._faults("create", order.worker_id):
            self._forget()
            found = self.machines.get(order.worker_id)
            if found is None:
                now = self.clock()
                found = self.machines[order.worker_id] = {
                    "worker_id": order.worker_id,
                    "grid_id": order.grid_id,
                    "instance": f"i-{len(self.calls)}",
                    "made_at": now,
                    "ends_at": None,
                    "price_micro": order.offer.price_micro,
                    "order": _content(order),
                }
                self.on_created(order, found)
            if found.get("order", _content(order)) != _content(order):
                raise Refused(f"{order.worker_id} was ordered otherwise")
        return self._view(found)

    def list(self, grid_id: str) -> list[WorkerInstance]:
        with self._faults("list", ""):
            now = self.clock()
            views = [
                self._view(one)
                for one in self.machines.values()
                if one["grid_id"] == grid_id and now - one["made_at"] >= self.visible_after
            ]
        return [one for one in views if one.state != "gone"]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        with self._faults("describe", worker_id):
            self._forget()
            found = self.machines.get(worker_id)
        if found is None or found["grid_id"] != grid_id or self.clock() - found["made_at"] < self.visible_after:
            return None
        return self._view(found)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        with self._faults("terminate", worker_id):
            found = self.machines.get(worker_id)
            if found is not None and found["grid_id"] == grid_id and found["ends_at"] is None:
                found["ends_at"] = self.clock() + self.stops_in
                self.on_terminated(found)

    def _forget(self) -> None:
        """Where this provider `forgets`, nothing is known of what is gone, as with containers that are removed."""
        if self.forgets:
            kept = [one["worker_id"] for one in self.existing()]
            self.machines = {name: one for name, one in self.machines.items() if name in kept}

    def on_created(self, order: WorkerOrder, machine: dict[str, Any]) -> None:
        """A machine was made."""

    def on_terminated(self, machine: dict[str, Any]) -> None:
        """A machine was ended."""

    def _view(self, machine: Mapping[str, Any]) -> WorkerInstance:
        now = self.clock()
        state: Any = "running"
        if machine["ends_at"] is not None:
            state = "gone" if machine["ends_at"] <= now else "stopping"
        return WorkerInstance(
            machine["worker_id"], machine["grid_id"], machine["instance"], state, now - machine["made_at"]
        )

    @contextlib.contextmanager
    def _faults(self, method: str, worker_id: str) -> Iterator[None]:
        """The next fault of this method: some happen before its effect, some after."""
        waiting = self.faults.get(method) or []
        fault, _, scope = (waiting.pop(0) if waiting else "").partition(":")
        self.calls.append(f"{method} {worker_id} {fault}".strip())
        self.before_effect(fault)
        if fault == "lose_before":
            raise Unreachable(f"{method}: the connection was lost")
        if fault == "throttle":
            raise Throttled(f"{method}: too many requests")
        if fault == "no_capacity":
            raise NoCapacity(f"{method}: no capacity", scope)
        if fault in ("refuse", "fail"):
            raise Refused(f"{method}: not allowed") if fault == "refuse" else RuntimeError(f"{method}: it broke")
        yield
        self.after_effect(fault)
        if fault == "lose_after":
            raise Unreachable(f"{method}: the connection was lost")

    def before_effect(self, fault: str) -> None:
        """Where a fault acts before the effect."""

    def after_effect(self, fault: str) -> None:
        """Where a fault acts after the effect."""


def _content(order: WorkerOrder) -> list[Any]:
    """What makes an order the same again."""
    has = order.resources
    return [order.grid_id, order.offer.id, has.cpu_milli, has.memory_bytes, has.gpu_count]


class _FileCloud(ScriptedCloud):
    """The same with its state in a file; one call at a time."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(
            time.time,
            visible_after=float(settings.get("visible_after", 0)),
            stops_in=float(settings.get("stops_in", 0)),
        )
        self.path = path
        self._has_agents = bool(settings.get("agent"))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Read the file, and write it where something changed."""
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._load()
            try:
                yield
            finally:
                self._save()

    def _load(self) -> None:
        found = json.loads(self.path.read_text() or "{}")
        self.machines = found.get("machines", {})
        self.faults = found.get("faults", {})
        self.calls = found.get("calls", [])

    def _save(self) -> None:
        text = json.dumps({"machines": self.machines, "faults": self.faults, "calls": self.calls})
        self.path.write_text(text)

    def before_effect(self, fault: str) -> None:
        if fault == "die_before":
            self._save()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            self._save()
            time.sleep(5)

    def after_effect(self, fault: str) -> None:
        if fault == "die_after":
            self._save()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_created(self, order: WorkerOrder, machine: dict[str, Any]) -> None:
        machine["environ"] = sorted(order.environ)
        if not self._has_agents:
            return
        folder = self.path.parent / f"{self.path.stem}-{order.worker_id}"
        process = subprocess.Popen(
            [sys.executable, "-m", "distributed_grid.agent", "--dir", str(folder)],
            env={"PATH": os.environ["PATH"], "HOME": str(self.path.parent), **order.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        machine["pid"], machine["folder"] = process.pid, str(folder)

    def on_terminated(self, machine: dict[str, Any]) -> None:
        end_machine(machine)


def end_machine(machine: Mapping[str, Any]) -> None:
    """End the agent of a machine and everything that it started."""
    folder = machine.get("folder")
    if folder is None:
        return
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(folder.encode()) for word in words) and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


class ScriptedProvider(CloudProviderBase):
    """The cloud in a file, as a provider; its settings are `state_file`, `visible_after`, `stops_in`, `agent`,
    `elsewhere` and `prices`."""

    name = "scripted"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._cloud = _FileCloud(Path(settings["state_file"]), settings)
        self.is_on_this_host = not settings.get("elsewhere", False)
        self._has_prices = bool(settings.get("prices", True))
        self._check_says = str(settings.get("check_says", ""))

    def create(self, order: WorkerOrder) -> WorkerInstance:
        with self._cloud.opened():
            return self._cloud.create(order)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        with self._cloud.opened():
            return self._cloud.list(grid_id)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        with self._cloud.opened():
            return self._cloud.describe(worker_id, grid_id)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        with self._cloud.opened():
            self._cloud.terminate(worker_id, grid_id)

    def offers(self) -> Sequence[WorkerOffer]:
        if self._has_prices:
            return OFFERS
        return [WorkerOffer(one.id, one.worker_type, one.resources, None, one.zone) for one in OFFERS]

    def check(self) -> Sequence[str]:
        if self._check_says:
            raise Refused(self._check_says)
        return super().check()


class CloudFile:
    """The console of a scripted cloud, for tests: what there is, and what is to go wrong next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read(self) -> dict[str, Any]:
        with open(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            found: dict[str, Any] = json.loads(file.read() or "{}")
        return found

    def existing(self) -> dict[str, dict[str, Any]]:
        """The machines that cost money now, by worker."""
        machines = self.read().get("machines", {})
        now = time.time()
        return {name: one for name, one in machines.items() if one["ends_at"] is None or one["ends_at"] > now}

    def calls(self, method: str) -> list[str]:
        return [call for call in self.read().get("calls", []) if call.startswith(method)]

    def script(self, **faults: list[str]) -> None:
        """What goes wrong with the next calls of each method."""
        with open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = json.loads(file.read() or "{}")
            found["faults"] = faults
            self.path.write_text(json.dumps(found))

    def add(self, machine: dict[str, Any]) -> None:
        """Have a machine there that nobody asked for."""
        with open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = json.loads(file.read() or "{}")
            found.setdefault("machines", {})[machine["worker_id"]] = machine
            self.path.write_text(json.dumps(found))

    def close(self) -> None:
        """End every machine."""
        for machine in self.read().get("machines", {}).values():
            end_machine(machine)


def plug_in(folder: Path) -> str:
    """Have the scripted provider installed in a folder, as a package would be; the folder is for PYTHONPATH."""
    info = folder / "scripted_cloud-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-cloud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[distributed_grid.providers]\nscripted = tests.support.scripted_provider:ScriptedProvider\n"
    )
    return str(folder)
