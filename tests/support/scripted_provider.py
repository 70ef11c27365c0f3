"""The scripted cloud behind a file, as a daemon plugs it in by entry point: the file is what a person would see in the
cloud's console. Its faults may also kill the process that calls it. With `agent: true` a machine is a real
`grid agent`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distributed_grid.errors import Refused
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder
from tests.support.clouds.scripted import OFFERS, ScriptedCloud

log = logging.getLogger(__name__)


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
        self._settings = settings
        self._environ: Mapping[str, str] = settings.get("environ", {})

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
        self.rows = found.get("machines", {})
        self.faults.waiting = found.get("faults", {})
        self.faults.calls = found.get("calls", [])

    def _save(self) -> None:
        text = json.dumps({"machines": self.rows, "faults": self.faults.waiting, "calls": self.faults.calls})
        self.path.write_text(text)

    def before_effect(self, fault: str) -> None:
        if fault == "die_before":
            self._save()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            self._save()
            time.sleep(5)
        if fault.startswith("tell"):
            log.error("it has %s", self._settings)
            kind = Refused if fault == "tell_refused" else RuntimeError
            try:
                raise ValueError(str(self._settings))
            except ValueError as failure:
                log.exception("it broke")
                raise kind(f"it broke with {self._settings}") from failure

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
            env={"PATH": os.environ["PATH"], "HOME": str(self.path.parent), **order.environ, **self._environ},
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
    """The cloud in a file, as a provider; its settings are `state_file`, `visible_after`, `stops_in`, `agent` with
    what it finds in its `environ`, `elsewhere`, `prices` and `lifetime`. `notices` is where its machines read of their
    end. Its faults `tell` and `tell_refused` log all its settings, and raise an error that has them."""

    name = "scripted"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._cloud = _FileCloud(Path(settings["state_file"]), settings)
        self.is_on_this_host = not settings.get("elsewhere", False)
        self._has_prices = bool(settings.get("prices", True))
        self._lifetime = float(settings.get("lifetime", 0))
        self._check_says = str(settings.get("check_says", ""))
        type(self).notice_source = str(settings.get("notices", ""))

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
        found = [replace(one, lifetime_seconds=self._lifetime) for one in OFFERS]
        return found if self._has_prices else [replace(one, price_micro=None) for one in found]

    def check(self) -> Sequence[str]:
        if self._check_says:
            raise Refused(self._check_says)
        return super().check()


class CloudFile:
    """The console of a scripted cloud, for tests: its machines, and the next failures."""

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
