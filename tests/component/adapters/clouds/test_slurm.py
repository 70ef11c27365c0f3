"""Pilot jobs on a real Slurm cluster, whose agent only sleeps."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from distributed_grid.adapters.clouds.slurm import SlurmProvider
from distributed_grid.adapters.clouds.slurm_queue import CommandResult, run_command
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, NoCapacity, Refused, Unreachable
from distributed_grid.orchestration.cloud_provider_manager import SlurmProvider as CloudSlurmProvider
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOrder
from distributed_grid.posix.private_files import try_lock
from tests.support.processes import is_running, processes_naming
from tests.support.project import PROJECT
from tests.support.provider_contract import TOKEN, ProviderContract
from tests.support.shell import wait_until
from tests.support.slurm_cluster import PARTITION, SlurmCluster

SMALL = WorkerResources(cpu_milli=1000, memory_bytes=64 << 20)
GRID_ID = "grid-slurm"
SLEEPER = """#!/bin/sh
printf '%s\\n' "$@" > "$OUT.arguments"; cat > "$OUT.token"; env > "$OUT.environment"
trap 'echo told > "$OUT.told"; exit 0' TERM
sleep 1000 & wait
"""


class LostAnswers:
    """Runs the commands, and loses what the chosen ones answer; `commands` has all that were run."""

    def __init__(self, config_file: object, *lost: str) -> None:
        self.lost = lost
        self.commands: list[Sequence[str]] = []
        self._config_file = str(config_file)

    def __call__(self, command: Sequence[str], text: str, keep_open: Sequence[int]) -> CommandResult:
        self.commands.append(command)
        done = run_command(command, text, keep_open, config_file=self._config_file)
        if command[0] in self.lost:
            raise Unreachable(f"no answer of {command[0]}")
        return done


@pytest.fixture
def settings(slurm: SlurmCluster, tmp_path: Path) -> dict[str, object]:
    """Settings with folders of this test's own; the commands talk to the cluster."""
    program = tmp_path / "grid"
    program.write_text(SLEEPER.replace("$OUT", f"{tmp_path}/out"))
    program.chmod(0o755)
    return {
        "config_file": str(slurm.config),
        "partition": PARTITION,
        "command": str(program),
        "directory": str(tmp_path / "shared"),
        "scratch": str(tmp_path),
    }


@pytest.fixture
def provider(settings: dict[str, object]) -> Iterator[SlurmProvider]:
    """A provider; the jobs of `GRID_ID` are cancelled with the test."""
    provider = SlurmProvider(settings)
    yield provider
    for one in provider.list(GRID_ID):
        provider.terminate(one.worker_id, GRID_ID)


def order_for(provider: CloudProviderBase, resources: WorkerResources = SMALL) -> WorkerOrder:
    name = f"worker-{uuid.uuid4().hex[:8]}"
    environ = {"GRID_JOIN_TOKEN": TOKEN, "GRID_OTHER": "it's seen"}
    return WorkerOrder(name, GRID_ID, provider.offers()[0], resources, environ)


def until_running(provider: CloudProviderBase, order: WorkerOrder) -> WorkerInstance:
    def find() -> WorkerInstance | None:
        found = provider.describe(order.worker_id, order.grid_id)
        assert found is not None
        return found if found.state == "running" else None

    instance: WorkerInstance = wait_until(find, 30, pause=0.1)
    return instance


class TestSlurmProvider(ProviderContract):
    @pytest.fixture
    def provider(self, settings: dict[str, object]) -> CloudProviderBase:
        self.settings = settings
        return SlurmProvider(settings)

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        with pytest.raises(Unreachable):
            SlurmProvider(self.settings, run=LostAnswers(self.settings["config_file"], "sbatch")).create(order)


def test_the_pilot_gets_its_order_and_is_told_before_it_ends(
    provider: SlurmProvider, tmp_path: Path, slurm: SlurmCluster
) -> None:
    order = order_for(provider)
    created = provider.create(order)
    assert (created.state, created.waits, created.ends_in_seconds) == ("starting", True, None)
    assert "waits in Slurm's queue" in created.detail
    running = until_running(provider, order)
    assert (running.instance, running.waits, running.detail) == (created.instance, False, "")
    assert running.ends_in_seconds is not None
    assert 3500 < running.ends_in_seconds <= 3600
    environment = wait_until(lambda: (tmp_path / "out.environment").exists() and _lines(tmp_path / "out.environment"))
    assert (tmp_path / "out.token").read_text() == TOKEN
    assert {"GRID_OTHER=it's seen", "GRID_NOTICE_SECONDS=120"} <= set(environment)
    assert not [line for line in environment if line.startswith(("PYTEST", "GRID_JOIN"))]
    arguments = _lines(tmp_path / "out.arguments")
    assert arguments[:5] == ["agent", "--join-file", "-", "--name", order.worker_id]
    home = Path(arguments[6]).parent
    assert (home.parent, stat.S_IMODE(home.stat().st_mode)) == (tmp_path, 0o700)
    slurm.ask("scancel", "--batch", "--signal=USR1", running.instance)  # as shortly before the time limit
    wait_until((tmp_path / "out.told").exists)
    ended = wait_until(lambda: _gone(provider, order), 30)
    assert ended.detail.startswith("Slurm: COMPLETED")
    assert not home.exists()
    assert provider.create(order).state == "gone", "the identical order starts no second machine"


def test_the_token_is_in_one_private_file_and_nowhere_else(
    provider: SlurmProvider, tmp_path: Path, slurm: SlurmCluster
) -> None:
    blocker = order_for(provider, WorkerResources(cpu_milli=32_000, memory_bytes=64 << 20))
    provider.create(blocker)
    until_running(provider, blocker)
    order = order_for(provider)
    waiting = provider.create(order)
    (token,) = (tmp_path / "shared").glob(f"{order.worker_id}-*/join-token")
    assert token.read_text() == TOKEN
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (token.parent, token.parent.parent)} == {0o700}
    shown = slurm.ask("scontrol", "show", "job", "-dd", waiting.instance)
    shown += slurm.ask("scontrol", "write", "batch_script", waiting.instance, "-")
    assert order.worker_id in shown
    stored = b"".join(path.read_bytes() for path in slurm.folder.rglob("*") if path.is_file())
    assert waiting.instance.encode() in stored
    assert TOKEN.encode() not in stored + shown.encode()
    provider.terminate(order.worker_id, GRID_ID)
    assert not token.exists()
    wait_until(lambda: _gone(provider, order))
    provider.terminate(order.worker_id, GRID_ID)
    assert not token.parent.exists()


def test_a_pilot_removes_what_one_that_was_killed_has_left_on_its_node(provider: SlurmProvider, tmp_path: Path) -> None:
    left, used = (tmp_path / f"distributed-grid-{os.getuid()}-{name}" / "agent" for name in ("left", "used"))
    for folder in (left, used):
        folder.mkdir(parents=True)
        (folder / "agent.lock").touch()
    (tmp_path / f"distributed-grid-{os.getuid()}-link").symlink_to(used.parent)
    with (used / "agent.lock").open() as lock:
        assert try_lock(lock.fileno())
        order = order_for(provider)
        provider.create(order)
        wait_until((tmp_path / "out.token").exists)
    assert (left.exists(), used.exists()) == (False, True)


def test_jobs_that_were_submitted_twice_never_run_at_once_and_the_second_ends_by_itself(
    settings: dict[str, object], provider: SlurmProvider, tmp_path: Path, slurm: SlurmCluster
) -> None:
    order = order_for(provider)
    first = provider.create(order)
    until_running(provider, order)
    blind = SlurmProvider(settings, run=_HiddenJobs(settings["config_file"], "sbatch"))
    with pytest.raises(Unreachable):
        blind.create(order)
    wait_until(lambda: len(_jobs_named(slurm, order.worker_id)) == 2)
    (both,) = provider.list(GRID_ID)
    assert (both.instance, both.state) == (first.instance, "running")
    assert "of the same worker" in both.detail
    (second,) = _jobs_named(slurm, order.worker_id).keys() - {first.instance}
    assert _jobs_named(slurm, order.worker_id)[second] == "PENDING"
    for token in (tmp_path / "shared").glob(f"{order.worker_id}-*/join-token"):
        token.unlink()  # what a pilot does that has started
    slurm.ask("scancel", first.instance)
    wait_until(lambda: not _jobs_named(slurm, order.worker_id), 30)
    assert "FAILED" in slurm.ask("squeue", "-h", "-t", "all", "-j", second, "-o", "%T")


def test_every_job_of_a_worker_is_cancelled(
    settings: dict[str, object], provider: SlurmProvider, slurm: SlurmCluster
) -> None:
    order = order_for(provider)
    provider.create(order)
    with pytest.raises(Unreachable):
        SlurmProvider(settings, run=_HiddenJobs(settings["config_file"], "sbatch")).create(order)
    assert len(_jobs_named(slurm, order.worker_id)) == 2
    provider.terminate(order.worker_id, GRID_ID)
    wait_until(lambda: not _jobs_named(slurm, order.worker_id), 30)


def test_a_control_plane_that_is_killed_during_sbatch_submits_once(
    settings: dict[str, object], provider: SlurmProvider, tmp_path: Path, slurm: SlurmCluster
) -> None:
    slow = tmp_path / "bin"
    slow.mkdir()
    begun = tmp_path / "begun"
    (slow / "sbatch").write_text(f'#!/bin/sh\ntouch {begun}\nsleep 2\nexec /usr/bin/sbatch "$@"\n')
    (slow / "sbatch").chmod(0o755)
    order = order_for(provider)
    program = textwrap.dedent(
        f"""
        from msgspec.structs import replace
        from tests.component.adapters.clouds.test_slurm import SlurmProvider, order_for
        provider = SlurmProvider({settings!r})
        provider.create(replace(order_for(provider), worker_id={order.worker_id!r}))
        """
    )
    env = {**os.environ, "PATH": f"{slow}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, start_new_session=True) as process:
        wait_until(begun.exists)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_running(process.pid)
    created = provider.create(order)
    assert list(_jobs_named(slurm, order.worker_id)) == [created.instance]


def test_offers_are_what_the_nodes_have_unless_the_config_says_otherwise(settings: dict[str, object]) -> None:
    (whole,) = SlurmProvider({**settings, "partition": None}).offers()
    assert whole.resources == WorkerResources(32_000, 8 << 30)
    assert (whole.id, whole.zone, whole.price_micro) == ("slurm-cpu", PARTITION, 0)
    assert (whole.lifetime_seconds, whole.queue_seconds, whole.unavailable) == (3600, 86400, "")
    types = {"cpu": {"cpus": 2, "memory_gb": 1}, "large": {"cpus": 64}, "other": {"partition": "stopped"}}
    more = {**settings, "worker_types": types, "price_per_hour": {"large": 1.5}, "time_limit": "0:30:00"}
    small, large, other = SlurmProvider(more).offers()
    assert (small.resources, small.lifetime_seconds) == (WorkerResources(2000, 1 << 30), 1800)
    assert large.price_micro == 1_500_000
    assert "no node of partition debug has 64 cores" in large.unavailable
    assert other.unavailable == "partition stopped is not up"
    (unknown,) = SlurmProvider({**settings, "partition": "nowhere"}).offers()
    assert unknown.unavailable == "Slurm has no partition nowhere"
    (long,) = SlurmProvider({**settings, "time_limit": "3:00:00"}).offers()
    assert long.unavailable == "partition debug allows 120 minutes, and providers.slurm.time_limit is 180"


@pytest.mark.parametrize(
    ("changes", "resources", "error"),
    [
        ({"partition": "nowhere"}, SMALL, Refused),
        ({"constraint": "none-such"}, SMALL, Refused),
        ({}, WorkerResources(1000, 1 << 50), NoCapacity),
        ({}, WorkerResources(1000, 64 << 20, gpu_count=1), Refused),
    ],
    ids=["partition", "constraint", "memory", "gpu"],
)
def test_what_slurm_refuses_leaves_nothing_behind(
    settings: dict[str, object],
    tmp_path: Path,
    changes: dict[str, object],
    resources: WorkerResources,
    error: type[Exception],
) -> None:
    provider = SlurmProvider({**settings, **changes})
    order = order_for(provider, resources)
    with pytest.raises(error, match="sbatch failed: "):
        provider.create(order)
    assert not [one for one in provider.list(GRID_ID) if one.worker_id == order.worker_id]
    assert not list((tmp_path / "shared").iterdir())


def test_check_asks_slurm_without_submitting_anything(settings: dict[str, object], slurm: SlurmCluster) -> None:
    before = slurm.ask("squeue", "-h", "-t", "all")
    version, offer, files = SlurmProvider({**settings, "account": "physics"}).check()
    assert version.startswith("slurm-wlm 2")
    assert "32 cores and 8 GB in partition debug, account physics: Job" in offer
    assert str(settings["directory"]) in files
    assert slurm.ask("squeue", "-h", "-t", "all") == before
    with pytest.raises(Refused, match="Slurm has no partition nowhere"):
        SlurmProvider({**settings, "partition": "nowhere"}).check()
    with pytest.raises(BadInput, match="is not a program"):
        SlurmProvider({**settings, "command": "/no/such/grid"}).check()


def test_without_slurm_it_says_what_is_missing(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    provider = SlurmProvider(settings)
    for call in (provider.offers, provider.check, lambda: provider.list(GRID_ID)):
        with pytest.raises(BadInput, match="is not there: install Slurm's client"):
            call()


def test_a_controller_that_does_not_answer_is_unreachable_and_what_it_stored_is_found_again(
    provider: SlurmProvider, slurm: SlurmCluster
) -> None:
    order = order_for(provider)
    created = provider.create(order)
    until_running(provider, order)
    slurm.until_saved()
    slurm.kill_controller()
    calls: list[Callable[[], object]] = [
        lambda: provider.create(order),
        lambda: provider.list(GRID_ID),
        lambda: provider.terminate(order.worker_id, GRID_ID),
        provider.offers,
    ]
    failures: list[BaseException] = []
    threads = [threading.Thread(target=_catch, args=(call, failures)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slurm.start_controller()
    assert [type(failure) for failure in failures] == [Unreachable] * 4
    assert "Unable to contact slurm controller" in str(failures[0])
    assert until_running(provider, order).instance == created.instance


def test_a_controller_that_forgets_that_a_pilot_runs_ends_it_and_its_second_start_finds_no_token(
    provider: SlurmProvider, tmp_path: Path, slurm: SlurmCluster
) -> None:
    order = order_for(provider)
    provider.create(order)
    until_running(provider, order)
    wait_until((tmp_path / "out.token").exists)
    (tmp_path / "out.token").unlink()
    slurm.kill_controller()  # what it has stored last may say that the job waits, or may not have the job
    slurm.start_controller()

    def is_over() -> bool:
        found = provider.describe(order.worker_id, GRID_ID)
        return (found is None or found.state == "gone") and not _jobs_named(slurm, order.worker_id)

    wait_until(is_over, 60, pause=0.2)
    wait_until(lambda: not processes_naming(str(tmp_path)), 60)  # Slurm kills what it does not know
    assert not (tmp_path / "out.token").exists(), "no agent was started a second time"


def _catch(call: Callable[[], object], failures: list[BaseException]) -> None:
    try:
        call()
    except BaseException as failure:
        failures.append(failure)


class _HiddenJobs(LostAnswers):
    """A queue that does not show what was submitted either."""

    def __call__(self, command: Sequence[str], text: str, keep_open: Sequence[int]) -> CommandResult:
        return CommandResult(0) if command[0] == "squeue" else super().__call__(command, text, keep_open)


def _gone(provider: CloudProviderBase, order: WorkerOrder) -> WorkerInstance | None:
    found = provider.describe(order.worker_id, order.grid_id)
    return found if found is not None and found.state == "gone" else None


def _jobs_named(slurm: SlurmCluster, name: str) -> dict[str, str]:
    lines = slurm.ask("squeue", "-h", f"--name={name}", "-o", "%i %T").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_programs_find_the_provider_beside_the_others() -> None:
    assert CloudSlurmProvider is SlurmProvider
