"""Connection to a Docker engine: the few calls that worker containers need, with the engine's answers as values.

A call that the engine does not answer, or answers with a failure of its own, raises `Unreachable`: nobody knows what
was done, and the same call may be made again. Nothing is kept between two connections, so an engine that was started
anew is no other than before.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Refused, Unreachable

MAX_WORDS = 300
"""How much is kept of what the engine, or a container, said."""
_ANY_VERSION = "1.41"


class Container(Struct, frozen=True):
    """A container as the engine describes it; `created_at` is in seconds of the wall clock.

    `end` says how it has ended, once it has.
    """

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    created_at: float
    end: str = ""

    @property
    def is_ended(self) -> bool:
        return self.status in ("exited", "dead")


class DockerEngine:
    """An engine, for as long as `connected` has a connection to it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def machine(self) -> WorkerResources:
        """The cores and memory of the machine that it runs on."""
        info = self._client.info()
        return WorkerResources(int(info["NCPU"]) * 1000, int(info["MemTotal"]))

    def has_runtime(self, name: str) -> bool:
        return name in self._client.info().get("Runtimes", {})

    def image_id(self, name: str) -> str | None:
        """The engine's id of an image; None where it has none of that name."""
        found = _answer(self._client.inspect_image, name)
        return None if found is None else str(found["Id"])

    def import_image(self, name: str, archive: Iterable[bytes], instructions: Sequence[str]) -> None:
        """Have an image of that name with the files of a tar; the one that had the name before goes, unless it is used.

        Raises `Refused` with what the engine says against it.
        """
        import docker.errors

        before = self.image_id(name)
        has_tag = ":" in name.rpartition("/")[2]
        repository, _, tag = name.rpartition(":") if has_tag else (name, "", "latest")
        said = self._client.import_image_from_stream(
            iter(archive), repository=repository, tag=tag, changes=list(instructions)
        )
        if '"error"' in said:
            raise Refused(f"the Docker engine did not take the image: {_line(said)}")
        if before is not None and before != self.image_id(name):
            with contextlib.suppress(docker.errors.APIError):
                self._client.remove_image(before)

    def has_network(self, name: str) -> bool:
        return _answer(self._client.inspect_network, name) is not None

    def inspect(self, name: str) -> Container | None:
        """The container of that name; None where there is none."""
        found = _answer(self._client.inspect_container, name)
        if found is None or found["Name"] != f"/{name}":  # the engine takes the start of an id for a name, too
            return None
        state = found["State"]
        created = datetime.fromisoformat(found["Created"][:19] + "+00:00")
        container = Container(
            found["Id"], name, found["Config"].get("Labels") or {}, state["Status"], created.timestamp()
        )
        if not container.is_ended:
            return container
        said = _answer(self._client.logs, container.id, tail=1) or b""
        cause = state.get("Error") or said.decode(errors="replace")
        killed = ", out of memory" if state.get("OOMKilled") else ""
        end = f"ended with exit code {state['ExitCode']}{killed}" + (f": {_line(cause)}" if cause.strip() else "")
        return Container(container.id, name, container.labels, container.status, container.created_at, end)

    def containers(self, *labels: str) -> list[Container]:
        """Every container with these labels (`name` or `name=value`), ended ones included."""
        found = self._client.containers(all=True, filters={"label": list(labels)})
        return [
            Container(
                one["Id"],
                one["Names"][0].lstrip("/"),
                one["Labels"],
                one["State"],
                float(one["Created"]),
                one["Status"].lower() if one["State"] in ("exited", "dead") else "",
            )
            for one in found
        ]

    def create(self, name: str, image: str, *, limits: WorkerResources, network: str, **settings: Any) -> bool:
        """Create a container that is not started yet; False where there is one of that name already.

        Raises `Refused` with what the engine says against it; then nothing was created.
        """
        import docker.errors

        gpus = (
            [{"Driver": "nvidia", "Count": limits.gpu_count, "Capabilities": [["gpu"]]}] if limits.gpu_count else None
        )
        host = self._client.create_host_config(
            network_mode=network,
            nano_cpus=limits.cpu_milli * 1_000_000,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            init=True,
            security_opt=["no-new-privileges:true"],
            restart_policy={"Name": "no"},
            log_config={"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}},
            device_requests=gpus,
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
        """Have the files of a tar in a container, below its root; those that are there are replaced."""
        self._client.put_archive(container, "/", archive)

    def start(self, container: str) -> None:
        """Start a container; one that runs already is left as it is. Raises `Refused` where it cannot run.

        Then nothing is left of it.
        """
        import docker.errors

        try:
            self._client.start(container)
        except docker.errors.APIError as failure:
            self.remove(container)
            raise Refused(f"the container does not start: {_words(failure)}") from None

    def remove(self, container: str) -> None:
        """Kill and remove a container with its volumes. Removing what is gone, or on its way, is not an error."""
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
        with _dial(url, timeout_seconds):
            pass  # the library leaves a socket behind that it cannot connect
        version = _version(docker.APIClient(base_url=url, version=_ANY_VERSION, timeout=timeout_seconds))
        with contextlib.closing(docker.APIClient(base_url=url, version=version, timeout=timeout_seconds)) as client:
            yield DockerEngine(client)
    except docker.errors.APIError as failure:
        raise Unreachable(f"the Docker engine at {url} failed: {_words(failure)}") from failure
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as failure:
        raise Unreachable(f"no answer from the Docker engine at {url}: {_root_cause(failure)}") from failure


def _dial(url: str, timeout_seconds: float) -> socket.socket:
    """A plain connection to the engine's socket."""
    dialled = socket.socket(socket.AF_UNIX)
    try:
        dialled.settimeout(timeout_seconds)
        dialled.connect(url.removeprefix("unix://"))
    except BaseException:
        dialled.close()
        raise
    return dialled


def _version(client: Any) -> str:
    """The newest version of the API that the engine speaks."""
    with contextlib.closing(client):
        return str(client.version(api_version=False)["ApiVersion"])


def _answer(call: Any, *arguments: Any, **options: Any) -> Any:
    """What the engine answers; None where it says that there is no such thing."""
    import docker.errors

    try:
        return call(*arguments, **options)
    except docker.errors.NotFound:
        return None


def _words(failure: Any) -> str:
    """What the engine said, in one line."""
    return _line(str(failure.explanation or failure))


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_WORDS]


def _root_cause(failure: BaseException) -> str:
    """The error of the system that the library has wrapped, several times."""
    found: BaseException | None = failure
    seen: list[BaseException] = []
    while found is not None and found not in seen:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        seen.append(found)
        found = found.__cause__ or found.__context__
    return _line(str(failure))
