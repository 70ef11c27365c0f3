"""Workers in containers of the Docker engine on this machine.

A container is one worker: it runs `grid agent` and nothing else, and ends when the agent ends. It is never started
again, and `terminate` removes it. Its labels (grid, worker, order) are part of the call that creates it. Its limits
come out of this machine: all worker containers together never get more than it has.

The join token is not in the environment, which `docker inspect` shows, but in a file in the container that only the
agent's user can read. The file is written between creating and starting; a container that was only created is started
by the identical order.

A call that the engine does not answer, or answers with a failure of its own, raises `Unreachable`: it may have been
done, and may be made again. Nothing is kept between two connections, so a restarted engine is no other than before.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS as LABELS
from distributed_grid.config.providers import DockerLocalSettings, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, NoCapacity, Refused, Unreachable
from distributed_grid.number_text import counted, rounded
from distributed_grid.ports import (
    JOIN_VARIABLE,
    CloudProviderBase,
    InstanceState,
    WorkerInstance,
    WorkerOffer,
    WorkerOrder,
)

MAX_WORDS = 300
"""Length to which messages of the engine and of containers are cut."""
_ANY_VERSION = "1.41"


class Container(Struct, frozen=True):
    """A container as the engine describes it."""

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    created_at: float  # seconds of the wall clock
    end: str = ""  # exit code and last line, once it has ended

    @property
    def is_ended(self) -> bool:
        return self.status in ("exited", "dead")


class DockerEngine:
    """A connection to an engine, open within `connected`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def machine(self) -> WorkerResources:
        info = self._client.info()
        return WorkerResources(int(info["NCPU"]) * 1000, int(info["MemTotal"]))

    def has_runtime(self, name: str) -> bool:
        return name in self._client.info().get("Runtimes", {})

    def image_id(self, name: str) -> str | None:
        image = _answer(self._client.inspect_image, name)
        return None if image is None else str(image["Id"])

    def import_image(self, name: str, archive: Iterable[bytes], instructions: Sequence[str]) -> None:
        """Make an image of that name from the files of a tar, and remove the one that had the name unless it is used.

        Raises `Refused` with the engine's reason.
        """
        import docker.errors

        before = self.image_id(name)
        has_tag = ":" in name.rpartition("/")[2]
        repository, _, tag = name.rpartition(":") if has_tag else (name, "", "latest")
        answer = self._client.import_image_from_stream(
            iter(archive), repository=repository, tag=tag, changes=list(instructions)
        )
        if '"error"' in answer:
            raise Refused(f"the Docker engine did not take the image: {_line(answer)}")
        if before is not None and before != self.image_id(name):
            with contextlib.suppress(docker.errors.APIError):
                self._client.remove_image(before)

    def has_network(self, name: str) -> bool:
        return _answer(self._client.inspect_network, name) is not None

    def inspect(self, name: str) -> Container | None:
        """The container of that name; None where there is none."""
        row = _answer(self._client.inspect_container, name)
        if row is None or row["Name"] != f"/{name}":  # the engine takes the start of an id for a name, too
            return None
        state = row["State"]
        created = datetime.fromisoformat(row["Created"][:19] + "+00:00")
        container = Container(row["Id"], name, row["Config"].get("Labels") or {}, state["Status"], created.timestamp())
        if not container.is_ended:
            return container
        output = _answer(self._client.logs, container.id, tail=1) or b""
        cause = state.get("Error") or output.decode(errors="replace")
        killed = ", out of memory" if state.get("OOMKilled") else ""
        end = f"ended with exit code {state['ExitCode']}{killed}" + (f": {_line(cause)}" if cause.strip() else "")
        return replace(container, end=end)

    def containers(self, *labels: str) -> list[Container]:
        """Every container with these labels (`name` or `name=value`), ended ones included."""
        return [
            Container(
                id=row["Id"],
                name=row["Names"][0].lstrip("/"),
                labels=row["Labels"],
                status=row["State"],
                created_at=float(row["Created"]),
                end=row["Status"].lower() if row["State"] in ("exited", "dead") else "",
            )
            for row in self._client.containers(all=True, filters={"label": list(labels)})
        ]

    def create(self, name: str, image: str, *, limits: WorkerResources, network: str, **settings: Any) -> bool:
        """Create a container without starting it; False where there is one of that name already.

        Raises `Refused` with the engine's reason; then nothing was created.
        """
        import docker.errors

        gpus = {"Driver": "nvidia", "Count": limits.gpu_count, "Capabilities": [["gpu"]]}
        host = self._client.create_host_config(
            network_mode=network,
            nano_cpus=limits.cpu_milli * 1_000_000,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            init=True,
            security_opt=["no-new-privileges:true"],
            restart_policy={"Name": "no"},
            log_config={"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}},
            device_requests=[gpus] if limits.gpu_count else None,
        )
        try:
            self._client.create_container(image, name=name, host_config=host, **settings)
        except docker.errors.APIError as failure:
            if failure.status_code == 409:
                return False
            if failure.is_client_error():
                raise Refused(f"the Docker engine refuses the container: {_words(failure)}") from None
            raise
        return True

    def put_files(self, container: str, archive: bytes) -> None:
        self._client.put_archive(container, "/", archive)

    def start(self, container: str) -> None:
        """Start a container; one that runs already stays as it is. One that cannot run is removed and `Refused`."""
        import docker.errors

        try:
            self._client.start(container)
        except docker.errors.APIError as failure:
            self.remove(container)
            raise Refused(f"the container does not start: {_words(failure)}") from None

    def remove(self, container: str) -> None:
        """Kill and remove a container with its volumes. A missing container, or one being removed, is not an error."""
        import docker.errors

        try:
            self._client.remove_container(container, v=True, force=True)
        except docker.errors.APIError as failure:
            if failure.status_code not in (404, 409):
                raise


@contextlib.contextmanager
def connected(url: str, timeout_seconds: float) -> Iterator[DockerEngine]:
    """A connection to the engine at `url`, on which no call takes longer than that."""
    try:
        import docker
        import docker.errors
        import requests.exceptions
    except ImportError:
        raise BadInput("docker_local needs the package docker: pip install 'distributed-grid[docker]'") from None
    try:
        dialled = socket.socket(socket.AF_UNIX)
        try:
            dialled.settimeout(timeout_seconds)
            dialled.connect(url.removeprefix("unix://"))
        except BaseException:
            dialled.close()
            raise
        with dialled:
            pass  # the library leaves a socket behind that it cannot connect
        with contextlib.closing(docker.APIClient(base_url=url, version=_ANY_VERSION, timeout=timeout_seconds)) as first:
            version = str(first.version(api_version=False)["ApiVersion"])  # the newest that the engine speaks
        with contextlib.closing(docker.APIClient(base_url=url, version=version, timeout=timeout_seconds)) as client:
            yield DockerEngine(client)
    except docker.errors.APIError as failure:
        raise Unreachable(f"the Docker engine at {url} failed: {_words(failure)}") from failure
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as failure:
        raise Unreachable(f"no answer from the Docker engine at {url}: {_root_cause(failure)}") from failure


def _answer(call: Any, *arguments: Any, **options: Any) -> Any:
    """The answer of the engine; None for "not found"."""
    import docker.errors

    try:
        return call(*arguments, **options)
    except docker.errors.NotFound:
        return None


def _words(failure: Any) -> str:
    return _line(str(failure.explanation or failure))


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_WORDS]


def _root_cause(failure: BaseException) -> str:
    """The system error that the library has wrapped, several times."""
    error: BaseException | None = failure
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        seen.append(error)
        error = error.__cause__ or error.__context__
    return _line(str(failure))


CPU_LABEL = "distributed-grid.cpu-milli"
MEMORY_LABEL = "distributed-grid.memory-bytes"
HOME = "/var/lib/distributed-grid"
TOKEN_FILE = f"{HOME}/join-token"
TIMEOUT_SECONDS = 20.0
MIN_CPU_MILLI, MIN_MEMORY_BYTES = 10, 64 << 20
"""With less than this the engine refuses a container, or the agent does not start."""
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
_STATES: Mapping[str, InstanceState] = {
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
            container = engine.inspect(order.worker_id)
            warnings: Sequence[str] = ()
            if container is None:
                with self._creating:  # two at a time would both take the last of the machine
                    limits, warnings = self._limits(engine, order)
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
                        environment={
                            "HOME": HOME,
                            **{key: value for key, value in order.environ.items() if key != JOIN_VARIABLE},
                        },
                        labels={
                            **LABELS.of(order),
                            CPU_LABEL: str(limits.cpu_milli),
                            MEMORY_LABEL: str(limits.memory_bytes),
                        },
                    )
                    container = engine.inspect(order.worker_id)
                    if container is None:
                        raise Unreachable(f"container {order.worker_id} was removed as soon as it was created")
            LABELS.check_order(container.labels, order, f"a container {order.worker_id}")
            if container.status == "created":
                token = order.environ.get(JOIN_VARIABLE, "")
                content = token.encode()
                home, file = tarfile.TarInfo(HOME.lstrip("/")), tarfile.TarInfo(TOKEN_FILE.lstrip("/"))
                home.type, home.mode = tarfile.DIRTYPE, 0o700
                file.size, file.mode = len(content), 0o600
                buffer = io.BytesIO()
                with tarfile.open(fileobj=buffer, mode="w") as archive:
                    for entry in (home, file):
                        entry.uid, entry.gid = self._user
                        archive.addfile(entry, io.BytesIO(content))
                engine.put_files(container.id, buffer.getvalue())
                engine.start(container.id)
                container = engine.inspect(order.worker_id) or container
        return _instance(container, warnings)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The containers of this grid; one that has ended is `stopping` until it is removed."""
        with self._engine() as engine:
            return [_instance(row) for row in engine.containers(LABELS.worker, f"{LABELS.grid}={grid_id}")]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The container, with its last line of output where it has ended; None once it is removed."""
        with self._engine() as engine:
            container = engine.inspect(worker_id)
        if container is None or not LABELS.match(container.labels, worker_id, grid_id):
            return None
        return _instance(container)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        with self._engine() as engine:
            container = engine.inspect(worker_id)
            if container is not None and LABELS.match(container.labels, worker_id, grid_id):
                engine.remove(container.id)

    def offers(self) -> Sequence[WorkerOffer]:
        """One for each type of worker: `cpu`, and `gpu` where the engine has NVIDIA's runtime and there are GPUs."""
        with self._engine() as engine:
            machine, has_nvidia = engine.machine(), engine.has_runtime("nvidia")
        cpu_milli = min(self._settings.cpu_limit_milli or machine.cpu_milli, machine.cpu_milli)
        memory_bytes = min(self._settings.memory_limit_bytes or machine.memory_bytes, machine.memory_bytes)
        offers = [self._offer("cpu", WorkerResources(cpu_milli, memory_bytes))]
        if has_nvidia and self._nvidia_devices.is_dir() and (gpus := len(os.listdir(self._nvidia_devices))):
            offers.append(self._offer("gpu", WorkerResources(cpu_milli, memory_bytes, gpus)))
        return offers

    def check(self) -> Sequence[str]:
        with self._engine() as engine:
            machine = engine.machine()
            self._check_engine(engine)
        return [
            f"the engine answers, image {self._settings.image} is there; the machine has {_cores(machine.cpu_milli)}"
        ]

    def _check_engine(self, engine: DockerEngine) -> None:
        """Raise `Refused` where the engine lacks the image or the network."""
        image = self._settings.image
        if engine.image_id(image) is None:
            named = "" if image == DockerLocalSettings().image else f' IMAGE_ARGS="--image {image}"'
            raise Refused(f"image {image} is not there: make worker-image{named}")
        if not engine.has_network(self._settings.network):
            raise Refused(f"the Docker engine has no network {self._settings.network}")

    def _engine(self) -> AbstractContextManager[DockerEngine]:
        return connected(self._settings.endpoint_url, self._timeout_seconds)

    def _offer(self, worker_type: str, resources: WorkerResources) -> WorkerOffer:
        """Offer with its price; a container on one's own machine costs nothing unless the config has a price."""
        price = self._settings.price_per_hour.get(worker_type, 0.0)
        price_micro = round(price * 1_000_000)
        return WorkerOffer(f"docker-{worker_type}", worker_type, resources, price_micro, on_this_machine=True)

    def _limits(self, engine: DockerEngine, order: WorkerOrder) -> tuple[WorkerResources, Sequence[str]]:
        """Limits of the container, and a warning for each resource of which the machine has less than ordered."""
        machine = engine.machine()
        asked_milli = max(order.resources.cpu_milli or order.offer.resources.cpu_milli, MIN_CPU_MILLI)
        asked_bytes = max(order.resources.memory_bytes or order.offer.resources.memory_bytes, MIN_MEMORY_BYTES)
        cpu_milli, memory_bytes = min(asked_milli, machine.cpu_milli), min(asked_bytes, machine.memory_bytes)
        limits = WorkerResources(cpu_milli, memory_bytes, order.resources.gpu_count)
        warnings = []
        # The offer is the config's limit, cut to the machine: ordering all of it is ordering the config's limit.
        if cpu_milli == machine.cpu_milli < (wanted := max(asked_milli, self._settings.cpu_limit_milli or 0)):
            warnings.append(f"{_cores(cpu_milli)} instead of {_cores(wanted)}: this machine has no more")
        if memory_bytes == machine.memory_bytes < (wanted := max(asked_bytes, self._settings.memory_limit_bytes or 0)):
            warnings.append(f"{_gb(memory_bytes)} instead of {_gb(wanted)}: this machine has no more")
        # The containers of all grids on this machine share it.
        alive = [container.labels for container in engine.containers(LABELS.worker) if not container.is_ended]
        cpu_left = machine.cpu_milli - sum(_number(labels, CPU_LABEL) for labels in alive)
        bytes_left = machine.memory_bytes - sum(_number(labels, MEMORY_LABEL) for labels in alive)
        if cpu_milli > cpu_left or memory_bytes > bytes_left:
            left = f"{_cores(max(cpu_left, 0))} and {_gb(max(bytes_left, 0))}"
            asked = f"{_cores(cpu_milli)} and {_gb(memory_bytes)}"
            raise NoCapacity(f"{len(alive)} worker containers leave {left} of this machine; asked: {asked}")
        return limits, warnings


def _instance(container: Container, warnings: Sequence[str] = ()) -> WorkerInstance:
    return LABELS.instance(
        container.labels,
        container.id[:12],
        _STATES.get(container.status, "stopping"),
        age_seconds=max(0.0, time.time() - container.created_at),
        detail="; ".join([*warnings, *([container.end] if container.end else [])]),
    )


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else 0


def _cores(cpu_milli: int) -> str:
    return counted(cpu_milli / 1000, "core")


def _gb(memory_bytes: int) -> str:
    return f"{rounded(memory_bytes / 2**30)} GB"
