"""Workers in containers of the Docker engine on this machine.

A container is one worker: it runs `grid agent` and nothing else, and ends when the agent ends. It is never started
again, and `terminate` removes it. Whose it is, and by which order it was made, is in its labels, which are part of the
call that creates it. Its limits come out of this machine: all worker containers together never get more than it has.

The join token is not in the environment, which `docker inspect` shows, but in a file in the container that only the
agent's user can read. The file is written between creating and starting; a container that was only created is started
by the identical order.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from distributed_grid.adapters.clouds.docker_engine import Container, DockerEngine, connected
from distributed_grid.config.providers import DockerLocalSettings, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import Conflict, NoCapacity, Refused, Unreachable
from distributed_grid.number_text import counted, rounded
from distributed_grid.ports import JOIN_VARIABLE, CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

WORKER_LABEL = "distributed-grid.worker"
GRID_LABEL = "distributed-grid.grid"
ORDER_LABEL = "distributed-grid.order"
CPU_LABEL = "distributed-grid.cpu-milli"
MEMORY_LABEL = "distributed-grid.memory-bytes"
HOME = "/var/lib/distributed-grid"
TOKEN_FILE = f"{HOME}/join-token"
TIMEOUT_SECONDS = 20.0
MIN_CPU_MILLI, MIN_MEMORY_BYTES = 10, 64 << 20
"""With less than this the engine refuses a container, or the agent does not start."""
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
_STATES: Mapping[str, Literal["starting", "running", "stopping"]] = {
    "created": "starting",
    "restarting": "starting",
    "running": "running",
    "paused": "running",
}


class DockerLocalProvider(CloudProviderBase):
    """Starts and removes worker containers, with the settings of `providers.docker_local` or a mapping of its keys.

    The agent in them runs as the user and group of this process, unless others are given.
    """

    name = "docker_local"
    is_consistent = True

    def __init__(
        self,
        settings: DockerLocalSettings | Mapping[str, Any],
        *,
        user: tuple[int, int] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        nvidia_devices: Path = NVIDIA_DEVICES,
    ) -> None:
        self._settings = provider_settings(self.name, DockerLocalSettings, settings)
        self.is_on_this_host = self._settings.network == "host"
        self._user = user or (os.getuid(), os.getgid())
        self._timeout_seconds = timeout_seconds
        self._nvidia_devices = nvidia_devices
        self._creating = threading.Lock()

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Create and start the container, with no more than the machine has; `detail` says where that is less.

        A missing image or network is refused before anything is created; nothing is ever pulled.
        """
        with self._engine() as engine:
            found = engine.inspect(order.worker_id)
            warnings: Sequence[str] = ()
            if found is None:
                with self._creating:  # two at a time would both take the last of the machine
                    limits, warnings = self._limits(engine, order)
                    found = self._create(engine, order, limits)
            if not _is_ours(found, order.worker_id, order.grid_id):
                raise Conflict(f"there is a container {order.worker_id} that is not this grid's")
            if found.labels.get(ORDER_LABEL) != order.digest:
                raise Conflict(f"there is a container {order.worker_id} that was ordered otherwise")
            if found.status == "created":
                engine.put_files(found.id, _home_files(self._user, order.environ.get(JOIN_VARIABLE, "")))
                engine.start(found.id)
                found = engine.inspect(order.worker_id) or found
        return _instance(found, warnings)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The containers of this grid; one that has ended is `stopping` until it is removed."""
        with self._engine() as engine:
            return [_instance(one) for one in engine.containers(WORKER_LABEL, f"{GRID_LABEL}={grid_id}")]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The container, with its last words where it has ended; None once it is removed."""
        with self._engine() as engine:
            found = engine.inspect(worker_id)
        return _instance(found) if found is not None and _is_ours(found, worker_id, grid_id) else None

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Kill and remove the container with its volumes."""
        with self._engine() as engine:
            found = engine.inspect(worker_id)
            if found is not None and _is_ours(found, worker_id, grid_id):
                engine.remove(found.id)

    def offers(self) -> Sequence[WorkerOffer]:
        """One for each type of worker: `cpu`, and `gpu` where the engine has NVIDIA's runtime and there are GPUs."""
        with self._engine() as engine:
            machine, has_nvidia = engine.machine(), engine.has_runtime("nvidia")
        cpu_milli = min(self._settings.cpu_limit_milli or machine.cpu_milli, machine.cpu_milli)
        memory_bytes = min(self._settings.memory_limit_bytes or machine.memory_bytes, machine.memory_bytes)
        found = [self._offer("cpu", WorkerResources(cpu_milli, memory_bytes))]
        if has_nvidia and self._nvidia_devices.is_dir() and (gpus := len(os.listdir(self._nvidia_devices))):
            found.append(self._offer("gpu", WorkerResources(cpu_milli, memory_bytes, gpus)))
        return found

    def check(self) -> Sequence[str]:
        """That the engine answers, and has the image and the network."""
        with self._engine() as engine:
            machine = engine.machine()
            self._check_engine(engine)
        return [
            f"the engine answers, image {self._settings.image} is there; the machine has {_cores(machine.cpu_milli)}"
        ]

    def _check_engine(self, engine: DockerEngine) -> None:
        """Raise `Refused` where the engine lacks what every container needs."""
        image = self._settings.image
        if engine.image_id(image) is None:
            named = "" if image == DockerLocalSettings().image else f' IMAGE_ARGS="--image {image}"'
            raise Refused(f"image {image} is not there: make worker-image{named}")
        if not engine.has_network(self._settings.network):
            raise Refused(f"the Docker engine has no network {self._settings.network}")

    def _engine(self) -> AbstractContextManager[DockerEngine]:
        return connected(self._settings.endpoint_url, self._timeout_seconds)

    def _offer(self, worker_type: str, resources: WorkerResources) -> WorkerOffer:
        """An offer with its price; a container on one's own machine costs nothing unless the config says so."""
        price = self._settings.price_per_hour.get(worker_type, 0.0)
        price_micro = round(price * 1_000_000)
        return WorkerOffer(f"docker-{worker_type}", worker_type, resources, price_micro, on_this_machine=True)

    def _limits(self, engine: DockerEngine, order: WorkerOrder) -> tuple[WorkerResources, Sequence[str]]:
        """What the container may use, and a warning for everything of which the machine has less than is wanted."""
        machine = engine.machine()
        asked_milli = max(order.resources.cpu_milli or order.offer.resources.cpu_milli, MIN_CPU_MILLI)
        asked_bytes = max(order.resources.memory_bytes or order.offer.resources.memory_bytes, MIN_MEMORY_BYTES)
        cpu_milli, memory_bytes = min(asked_milli, machine.cpu_milli), min(asked_bytes, machine.memory_bytes)
        limits = WorkerResources(cpu_milli, memory_bytes, order.resources.gpu_count)
        warnings = []
        # The offer is what the config says, cut to the machine: ordering all of it is ordering what the config says.
        if cpu_milli == machine.cpu_milli < (wanted := max(asked_milli, self._settings.cpu_limit_milli or 0)):
            warnings.append(f"{_cores(cpu_milli)} instead of {_cores(wanted)}: this machine has no more")
        if memory_bytes == machine.memory_bytes < (wanted := max(asked_bytes, self._settings.memory_limit_bytes or 0)):
            warnings.append(f"{_gb(memory_bytes)} instead of {_gb(wanted)}: this machine has no more")
        _check_room(engine.containers(WORKER_LABEL), machine, limits)
        return limits, warnings

    def _create(self, engine: DockerEngine, order: WorkerOrder, limits: WorkerResources) -> Container:
        """The container, created unless another call was quicker."""
        self._check_engine(engine)
        engine.create(
            order.worker_id,
            self._settings.image,
            limits=limits,
            network=self._settings.network,
            hostname=order.worker_id[:63],
            entrypoint=["grid", "agent", "--dir", f"{HOME}/agent", "--join-file", TOKEN_FILE],
            command=["--name", order.worker_id],
            user="{}:{}".format(*self._user),
            working_dir=HOME,
            environment={"HOME": HOME, **{key: value for key, value in order.environ.items() if key != JOIN_VARIABLE}},
            labels=_labels(order, limits),
        )
        found = engine.inspect(order.worker_id)
        if found is None:
            raise Unreachable(f"container {order.worker_id} was removed as soon as it was created")
        return found


def _check_room(containers: Sequence[Container], machine: WorkerResources, limits: WorkerResources) -> None:
    """Raise `NoCapacity` where the worker containers of all grids on this machine leave too little."""
    alive = [one.labels for one in containers if not one.is_ended]
    cpu_milli = machine.cpu_milli - sum(_number(labels, CPU_LABEL) for labels in alive)
    memory_bytes = machine.memory_bytes - sum(_number(labels, MEMORY_LABEL) for labels in alive)
    if limits.cpu_milli > cpu_milli or limits.memory_bytes > memory_bytes:
        left = f"{_cores(max(cpu_milli, 0))} and {_gb(max(memory_bytes, 0))}"
        asked = f"{_cores(limits.cpu_milli)} and {_gb(limits.memory_bytes)}"
        raise NoCapacity(f"{len(alive)} worker containers leave {left} of this machine; asked: {asked}")


def _labels(order: WorkerOrder, limits: WorkerResources) -> dict[str, str]:
    return {
        WORKER_LABEL: order.worker_id,
        GRID_LABEL: order.grid_id,
        ORDER_LABEL: order.digest,
        CPU_LABEL: str(limits.cpu_milli),
        MEMORY_LABEL: str(limits.memory_bytes),
    }


def _is_ours(found: Container, worker_id: str, grid_id: str) -> bool:
    return found.labels.get(WORKER_LABEL) == worker_id and found.labels.get(GRID_LABEL) == grid_id


def _home_files(user: tuple[int, int], token: str) -> bytes:
    """The agent's home with the join token in it, as a tar."""
    content = token.encode()
    home, file = tarfile.TarInfo(HOME.lstrip("/")), tarfile.TarInfo(TOKEN_FILE.lstrip("/"))
    home.type, home.mode = tarfile.DIRTYPE, 0o700
    file.size, file.mode = len(content), 0o600
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in (home, file):
            entry.uid, entry.gid = user
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _instance(found: Container, warnings: Sequence[str] = ()) -> WorkerInstance:
    detail = "; ".join([*warnings, *([found.end] if found.end else [])])
    age = max(0.0, time.time() - found.created_at)
    state = _STATES.get(found.status, "stopping")
    worker_id, grid_id = found.labels[WORKER_LABEL], found.labels.get(GRID_LABEL, "")
    return WorkerInstance(worker_id, grid_id, found.id[:12], state, age, detail)


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else 0


def _cores(cpu_milli: int) -> str:
    return counted(cpu_milli / 1000, "core")


def _gb(memory_bytes: int) -> str:
    return f"{rounded(memory_bytes / 2**30)} GB"
