"""Worker containers on a real Docker engine."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.clouds.docker_local import DockerLocalProvider
from distributed_grid.config import ConfigProblems
from distributed_grid.config.providers import DockerLocalSettings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import Conflict, NoCapacity, Refused, Unreachable
from distributed_grid.orchestration.cloud_provider_manager import DockerLocalProvider as CloudDockerProvider
from distributed_grid.ports import CloudProviderBase, WorkerOrder
from tests.component.adapters.clouds.conftest import SLEEPER
from tests.support.docker_engines import LocalDockerEngine
from tests.support.provider_contract import TOKEN, ProviderContract
from tests.support.shell import wait_until

SMALL = WorkerResources(cpu_milli=100, memory_bytes=64 << 20)
GRID_ID = "grid-docker"


def settings_for(engine: LocalDockerEngine, **changes: Any) -> DockerLocalSettings:
    known: dict[str, Any] = {"image": SLEEPER, "endpoint_url": engine.url, "network": "none"}
    return DockerLocalSettings(**known | changes)


def order_for(provider: CloudProviderBase, resources: WorkerResources = SMALL) -> WorkerOrder:
    name = f"worker-{uuid.uuid4().hex[:8]}"
    return WorkerOrder(name, GRID_ID, provider.offers()[0], resources, {"GRID_JOIN_TOKEN": TOKEN, "GRID_OTHER": "seen"})


@pytest.fixture
def provider(engine: LocalDockerEngine) -> Iterator[DockerLocalProvider]:
    """A provider; the containers of `GRID_ID` are removed with the test."""
    provider = DockerLocalProvider(settings_for(engine))
    yield provider
    for one in provider.list(GRID_ID):
        provider.terminate(one.worker_id, GRID_ID)


@contextlib.contextmanager
def losing_the_answer(engine: LocalDockerEngine, *request: bytes) -> Iterator[str]:
    """The address of a relay to the engine, which passes on the request with these parts and drops its answer."""
    folder = engine.folder / f"relay-{uuid.uuid4().hex[:6]}"
    folder.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()

    def serve(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            far.connect(engine.url.removeprefix("unix://"))
            lost = threading.Event()
            threading.Thread(target=pump, args=(far, near, lost), daemon=True).start()
            with contextlib.suppress(OSError):
                while data := near.recv(65536):
                    if all(part in data for part in request):
                        lost.set()
                    far.sendall(data)

    def pump(far: socket.socket, near: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(65536):
                if lost.is_set():
                    near.shutdown(socket.SHUT_RDWR)
                    far.shutdown(socket.SHUT_RDWR)
                    return
                near.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"unix://{folder}/socket"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        shutil.rmtree(folder)


class TestDockerLocalProvider(ProviderContract):
    @pytest.fixture
    def settings(self, engine: LocalDockerEngine) -> DockerLocalSettings:
        return settings_for(engine)

    @pytest.fixture(autouse=True)
    def _engine(self, engine: LocalDockerEngine) -> None:
        self.engine = engine

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        with losing_the_answer(self.engine, b"POST /v1.41/containers/create") as address:
            unheard = DockerLocalProvider(settings_for(self.engine, endpoint_url=address))
            with pytest.raises(Unreachable, match="no answer from the Docker engine"):
                unheard.create(order)


def test_a_start_whose_answer_was_lost_is_found_running(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    order = order_for(provider)
    with losing_the_answer(engine, b"POST /v1.41/containers/", b"/start ") as address:
        unheard = DockerLocalProvider(settings_for(engine, endpoint_url=address))
        with pytest.raises(Unreachable):
            unheard.create(order)
    assert provider.create(order).state == "running"


def test_limits_labels_name_and_user_are_those_of_the_order(engine: LocalDockerEngine) -> None:
    provider = DockerLocalProvider(settings_for(engine), user=(65534, 65534))
    order = order_for(provider, WorkerResources(cpu_milli=250, memory_bytes=96 << 20))
    try:
        created = provider.create(order)
        assert created.detail == ""
        with engine.client() as client:
            found = client.inspect_container(order.worker_id)
            said = client.exec_create(order.worker_id, ["cat", "/var/lib/distributed-grid/join-token"], user="65534")
            token = client.exec_start(said["Id"]).decode()
            files = client.exec_create(order.worker_id, ["cat", "/proc/1/status"])
            status = client.exec_start(files["Id"]).decode()
        assert found["HostConfig"]["NanoCpus"] == 250_000_000
        assert found["HostConfig"]["Memory"] == found["HostConfig"]["MemorySwap"] == 96 << 20
        assert found["HostConfig"]["NetworkMode"] == "none"
        assert found["HostConfig"]["RestartPolicy"]["Name"] == "no"
        assert found["Config"]["Hostname"] == order.worker_id
        assert found["Config"]["Labels"]["distributed-grid.worker"] == order.worker_id
        assert found["Config"]["Labels"]["distributed-grid.grid"] == GRID_ID
        assert "GRID_OTHER=seen" in found["Config"]["Env"]
        assert TOKEN not in str(found), "whoever may inspect containers would see the token"
        assert token == TOKEN
        assert "Uid:\t65534" in status
        assert "NoNewPrivs:\t1" in status
    finally:
        provider.terminate(order.worker_id, GRID_ID)


def test_what_the_machine_does_not_have_is_clamped_with_a_warning(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    machine = provider.offers()[0].resources
    wanted = DockerLocalProvider(
        settings_for(engine, cpu_limit_milli=machine.cpu_milli * 8, memory_limit_bytes=machine.memory_bytes * 4)
    )
    offer = wanted.offers()[0]
    assert offer.resources == machine
    order = replace(order_for(provider), resources=offer.resources)
    created = wanted.create(order)
    cores = machine.cpu_milli // 1000
    assert f"{cores} cores instead of {cores * 8} cores: this machine has no more" in created.detail
    assert "GB instead of" in created.detail
    with engine.client() as client:
        found = client.inspect_container(order.worker_id)["HostConfig"]
    assert (found["NanoCpus"], found["Memory"]) == (machine.cpu_milli * 1_000_000, machine.memory_bytes)


def test_containers_together_get_no_more_than_the_machine_has(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    machine = provider.offers()[0].resources
    most = order_for(provider, WorkerResources(machine.cpu_milli - 500, 64 << 20))
    provider.create(most)
    other = order_for(provider, WorkerResources(1000, 64 << 20))
    with pytest.raises(NoCapacity, match=r"1 worker containers leave 0\.5 cores and .* asked: 1 core and"):
        provider.create(other)
    assert provider.describe(other.worker_id, GRID_ID) is None
    provider.terminate(most.worker_id, GRID_ID)
    assert provider.create(other).state == "running"


def test_a_missing_image_or_network_is_refused_before_anything_is_created(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    order = order_for(provider)
    for changes, message in (
        ({"image": "nowhere:1"}, 'image nowhere:1 is not there: make worker-image IMAGE_ARGS="--image nowhere:1"'),
        ({"network": "nowhere"}, "the Docker engine has no network nowhere"),
    ):
        with pytest.raises(Refused, match=f"^{message}$"):
            DockerLocalProvider(settings_for(engine, **changes)).create(order)
        assert provider.describe(order.worker_id, GRID_ID) is None


def test_a_container_of_that_name_that_is_not_ours_is_refused_and_left_alone(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    order = order_for(provider)
    with engine.client() as client:
        somebodys = client.create_container(SLEEPER, "grid", name=order.worker_id)
        try:
            with pytest.raises(Conflict, match=f"there is a container {order.worker_id} that is not this grid's"):
                provider.create(order)
            assert provider.describe(order.worker_id, GRID_ID) is None
            provider.terminate(order.worker_id, GRID_ID)
            assert client.inspect_container(somebodys["Id"])["State"]["Status"] == "created"
        finally:
            client.remove_container(somebodys["Id"], force=True)


def test_a_container_whose_agent_ends_says_why_and_is_not_started_again(engine: LocalDockerEngine) -> None:
    engine.build_small_image("quitter", "echo the join token has expired >&2; exit 3")
    provider = DockerLocalProvider(settings_for(engine, image="quitter"))
    order = order_for(provider)
    try:
        provider.create(order)
        ended = wait_until(lambda: (found := provider.describe(order.worker_id, GRID_ID)).state == "stopping" and found)
        assert ended.detail == "ended with exit code 3: the join token has expired"
        listed = provider.list(GRID_ID)
        assert [(one.worker_id, one.state) for one in listed] == [(order.worker_id, "stopping")]
        assert "exited (3)" in listed[0].detail
        assert provider.create(order).state == "stopping"
    finally:
        provider.terminate(order.worker_id, GRID_ID)
    assert provider.describe(order.worker_id, GRID_ID) is None


def test_a_container_that_cannot_start_is_refused_and_nothing_is_left(
    engine: LocalDockerEngine, provider: DockerLocalProvider, tmp_path: Path
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    with_gpu = DockerLocalProvider(settings_for(engine), nvidia_devices=tmp_path)
    cpu, gpu = with_gpu.offers()
    assert (cpu.worker_type, gpu.worker_type, gpu.resources.gpu_count) == ("cpu", "gpu", 1)
    order = replace(order_for(provider), offer=gpu, resources=replace(SMALL, gpu_count=1))
    with pytest.raises(Refused, match=r"the container does not start: .*device driver"):
        with_gpu.create(order)
    assert provider.describe(order.worker_id, GRID_ID) is None


def test_there_is_a_gpu_offer_only_with_gpus(provider: DockerLocalProvider) -> None:
    assert [offer.worker_type for offer in provider.offers()] == ["cpu"]


def test_a_price_is_what_the_config_says_and_nothing_without(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    assert provider.offers()[0].price_micro == 0
    priced = DockerLocalProvider(settings_for(engine, price_per_hour={"cpu": 0.05}, cpu_limit_milli=500))
    assert priced.offers()[0].price_micro == 50_000
    assert priced.offers()[0].resources.cpu_milli == 500


def test_it_takes_the_keys_of_the_config_in_python_too(engine: LocalDockerEngine) -> None:
    provider = CloudDockerProvider({"image": SLEEPER, "cpu_limit": 0.5, "endpoint_url": engine.url, "network": "host"})
    assert provider.offers()[0].resources.cpu_milli == 500
    assert provider.is_on_this_host
    with pytest.raises(ConfigProblems, match=r"providers.docker_local.cpu_limit: found the number -1"):
        CloudDockerProvider({"cpu_limit": -1})


def test_an_engine_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    provider = DockerLocalProvider(DockerLocalSettings(endpoint_url=f"unix://{tmp_path}/no.sock"))
    with pytest.raises(Unreachable, match=r"no answer from the Docker engine at unix://.*: No such file or directory"):
        provider.offers()


def test_an_engine_that_says_nothing_is_unreachable_after_the_time_limit(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        provider = DockerLocalProvider(DockerLocalSettings(endpoint_url=f"unix://{tmp_path}/s"), timeout_seconds=0.3)
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no answer from the Docker engine"):
            provider.list(GRID_ID)
        assert time.monotonic() - began < 10


def test_an_engine_that_was_killed_and_started_anew_works_again(
    engine: LocalDockerEngine, provider: DockerLocalProvider
) -> None:
    order = order_for(provider)
    created = provider.create(order)
    engine.kill()
    for call in (lambda: provider.create(order), lambda: provider.list(GRID_ID), provider.offers):
        with pytest.raises(Unreachable):
            call()
    engine.start()
    # Without live restore the engine ends the containers of its former life.
    ended = wait_until(lambda: (found := provider.describe(order.worker_id, GRID_ID)).state == "stopping" and found)
    assert ended.instance == created.instance
    provider.terminate(order.worker_id, GRID_ID)
    assert provider.describe(order.worker_id, GRID_ID) is None
    assert provider.create(order_for(provider)).state == "running"
