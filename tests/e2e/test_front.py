"""The plain Python front on a real grid: `import distributed_grid as grid`, and its twins in `distributed_grid.aio`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import distributed_grid as grid
from distributed_grid import aio
from distributed_grid.errors import BadInput, NotFound, Refused, TimedOut
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def own_grid(grid: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A grid of this test alone, which the front finds by its environment."""
    return _entered(grid, monkeypatch)


@pytest.fixture
def shell(shared_grid: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """The grid of this file; a test ends what it has begun."""
    yield _entered(shared_grid, monkeypatch)
    assert [row for row in grid.status().allocations if row.state == "active"] == []


def _entered(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(shell.cwd)
    monkeypatch.setenv("GRID_STATE_DIR", str(shell.state_dir))
    monkeypatch.delenv("GRID_CONFIG", raising=False)
    return shell


def job_of(shell: Shell, result: Any) -> dict[str, Any]:
    return shell.job(result.job_id)


def test_result_has_output_exit_code_node_and_usage(shell: Shell) -> None:
    result = grid.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.exit_code, result.stdout, result.stderr, result.succeeded) == (7, "out\n", "err\n", False)
    assert (result.stdout_bytes, result.stderr_bytes) == (b"out\n", b"err\n")
    assert result.node == job_of(shell, result)["node_id"]
    assert result.usage.wall_seconds > 0 <= result.usage.cpu_seconds


def test_string_is_split_as_a_shell_would_and_with_shell_it_is_run_by_one(shell: Shell) -> None:
    assert grid.run("echo 'two words' $HOME;").stdout == "two words $HOME;\n"
    assert grid.run("echo $((1 + 1)) | cat", shell=True).stdout == "2\n"
    with pytest.raises(BadInput, match="cannot be split into words"):
        grid.run("echo 'open")
    with pytest.raises(BadInput, match="one string"):
        grid.run(["echo"], shell=True)
    with pytest.raises(BadInput, match="the command is empty"):
        grid.run("")


def test_checked_command_that_fails_raises_an_error_with_its_result(shell: Shell) -> None:
    with pytest.raises(grid.JobFailed, match=r"exited with 3 on .*: no disk") as failure:
        grid.run("echo first >&2; echo no disk >&2; exit 3", shell=True, check=True)
    assert failure.value.result.exit_code == 3
    assert grid.run("true", check=True).succeeded
    with pytest.raises(grid.JobFailed, match=r"never started on .*: no such command: nowhere$"):
        grid.run("nowhere", check=True)
    assert "outcome='never_started'" in repr(grid.run("nowhere"))


def test_output_that_is_not_utf8_is_replaced_in_text_and_kept_in_bytes(shell: Shell) -> None:
    result = grid.run(r"printf 'a\377b'", shell=True)
    assert (result.stdout, result.stdout_bytes) == ("a\ufffdb", b"a\xffb")


def test_options_reach_the_job(shell: Shell, tmp_path: Path) -> None:
    job = grid.submit(
        "echo $NAME; pwd",
        shell=True,
        cpus=0.5,
        mem="64M",
        env={"NAME": "ana"},
        workdir=tmp_path,
        timeout="1m",
        priority="high",
        job_id="front-options",
    )
    assert job.wait().stdout == f"ana\n{tmp_path}\n"
    row = shell.job("front-options")
    assert (row["resources"]["cpu_cores"], row["resources"]["memory_gb"]) == (0.5, 0.062)
    assert (row["priority"], row["wait_seconds"]) == ("high", None)


def test_timeout_ends_the_command_and_is_its_exit_code(shell: Shell) -> None:
    result = grid.run("sleep 60", timeout=0.3, grace=0.1)
    assert (result.exit_code, result.outcome) == (124, "timed_out")


def test_bad_input_is_one_line_and_unknown_options_are_type_errors(shell: Shell) -> None:
    wrong: list[dict[str, Any]] = [{"mem": "much"}, {"timeout": "soon"}, {"cpus": float("nan")}, {"cpus": -1}]
    wrong += [{"cpus": 0}, {"cpus": "two"}, {"env": {"A": 1}}, {"priority": "soon"}, {"retries": -1}]
    for options in wrong:
        with pytest.raises(BadInput) as problem:
            grid.run("true", **options)
        assert len(str(problem.value).splitlines()) == 1
    with pytest.raises(BadInput, match="a list of words, or one string, not int"):
        grid.run(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no such option: memory"):
        grid.run("true", memory=1)  # type: ignore[call-arg]
    with pytest.raises(Refused, match="No node can ever lend"):
        grid.run("true", gpus=64)


def test_vain_wait_for_resources_is_an_error(shell: Shell) -> None:
    with grid.borrow(cpus=CORES), pytest.raises(TimedOut, match="No resource offers available"):
        grid.run("true", wait=0.2)


def test_submitted_job_is_followed_waited_for_and_cancelled(shell: Shell) -> None:
    job = grid.submit("echo one; echo two >&2; printf three; sleep 0.2", shell=True)
    assert sorted(job.logs(follow=True)) == ["one", "three", "two"]
    assert list(job.logs(stderr=False)) == ["one", "three"]
    assert (job.wait().exit_code, job.state, job.status().job_id) == (0, "ended", job.id)

    job = grid.submit("sleep 60")
    with pytest.raises(TimedOut, match=r"has not ended after 0\.2 s"):
        job.wait(timeout=0.2)
    wait_until(lambda: job.node)
    threading.Timer(0.2, job.cancel).start()
    result = job.wait()
    assert (result.outcome, result.exit_code, job.state) == ("cancelled", 130, "ended")
    job.cancel()


def test_loop_over_logs_may_be_left_early(shell: Shell) -> None:
    job = grid.submit("for i in 1 2 3; do echo $i; sleep 0.1; done; sleep 60", shell=True)
    for line in job.logs(follow=True):
        if line == "2":
            break
    job.cancel()
    assert job.wait().stdout.startswith("1\n2\n")


def test_lease_runs_commands_and_is_released_at_the_end_of_its_block(shell: Shell) -> None:
    with grid.borrow(cpus=1, mem="128M", duration="10m") as lease:
        assert lease.run("nproc", timeout=20).stdout == "1\n"
        assert lease.run("exit 4", shell=True).exit_code == 4
        before = lease.expires_at
        lease.extend("5min")
        assert str(lease.expires_at) > str(before)
        (row,) = grid.status().allocations
        assert (row.allocation_id, row.node_id) == (lease.id, lease.node)
    assert grid.status().allocations == []
    with pytest.raises((Refused, NotFound)):
        lease.run("true")
    lease.release()


def test_exception_in_the_block_of_a_lease_releases_it_and_is_raised(shell: Shell) -> None:
    def fail() -> None:
        with grid.borrow(cpus=1) as lease:
            lease.submit("sleep 60")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until(lambda: grid.status().allocations == [])


def test_twenty_threads_at_once(shell: Shell) -> None:
    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(lambda i: grid.run(["echo", str(i)], cpus=0.25), range(20)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]


def test_plain_calls_work_inside_a_running_loop(shell: Shell) -> None:
    async def cell() -> None:
        assert grid.run("echo cell").stdout == "cell\n"
        assert list(grid.submit("echo line").logs(follow=True)) == ["line"]
        with grid.borrow(cpus=1) as lease:
            assert lease.run("true").succeeded

    asyncio.run(cell())


def test_twins_in_aio(shell: Shell) -> None:
    async def story() -> None:
        results = await asyncio.gather(*(aio.run(["echo", str(i)], cpus=0.25) for i in range(10)))
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(10)]
        with pytest.raises(grid.JobFailed):
            await aio.run("false", check=True)
        job = await aio.submit("echo one; sleep 0.2; echo two", shell=True)
        assert [line async for line in job.logs(follow=True)] == ["one", "two"]
        assert (await job.wait()).exit_code == 0
        assert (await job.status()).state == job.state == "ended"
        async with aio.borrow(cpus=1) as lease:
            assert (await lease.run("nproc")).stdout == "1\n"
            assert len((await aio.status()).allocations) == 1
            await lease.extend(60)
        lease = await aio.borrow(cpus=1)
        await lease.release()
        assert (await aio.status()).allocations == []

    asyncio.run(story())


def test_cancelled_task_cancels_its_job(shell: Shell) -> None:
    async def story() -> None:
        task = asyncio.create_task(aio.run("sleep 60", job_id="aio-cancelled"))
        while not (await aio.status()).allocations:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    wait_until(lambda: shell.job("aio-cancelled")["outcome"] == "cancelled")


SCRIPT = """
import sys
import distributed_grid as grid
try:
    grid.run("echo started; sleep 60", shell=True, job_id="interrupted")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_cancels_the_job_of_run(shell: Shell) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=shell.cwd, env=shell.env, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: shell.query("get_job", job_id="interrupted"))
    wait_until(lambda: shell.job("interrupted")["state"] == "running")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "interrupted\n"
    wait_until(lambda: shell.job("interrupted")["outcome"] == "cancelled")


WAITING_SCRIPT = """
import distributed_grid as grid
try:
    grid.borrow(cpus=%d)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_withdraws_the_request_of_borrow(shell: Shell) -> None:
    with grid.borrow(cpus=0.5):
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING_SCRIPT % CORES],
            cwd=shell.cwd,
            env=shell.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: grid.status().waiting == 1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "interrupted\n"
        wait_until(lambda: grid.status().waiting == 0)


def test_cancelled_task_withdraws_its_request_of_a_lease(shell: Shell) -> None:
    async def story() -> None:
        with grid.borrow(cpus=0.5):
            task = asyncio.ensure_future(asyncio.wait_for(aio.borrow(cpus=CORES), 0.3))
            with pytest.raises(TimeoutError):
                await task
            assert (await aio.status()).waiting == 0

    asyncio.run(story())


def test_blocking_run_loads_neither_msgspec_nor_asyncio(shell: Shell) -> None:
    grid.run("true")  # the control plane runs from here on
    program = (
        "import sys, json, distributed_grid as grid; job = grid.submit('echo hello'); job.wait(); list(job.logs());"
        "grid.run('true', mem='64M', timeout='1m', check=True); grid.borrow(cpus=1).release(); grid.status();"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=shell.cwd, env=shell.env, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert loaded & {"msgspec", "asyncio", "subprocess", "logging", "dataclasses", "distributed_grid.aio"} == set()


def test_wait_and_logs_survive_the_death_of_the_control_plane(own_grid: Shell) -> None:
    job = grid.submit("echo before; sleep 2; echo after", shell=True)
    wait_until(lambda: job.state == "running")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(job.logs(follow=True)))
    reader.start()
    wait_until(lambda: lines)
    own_grid.kill_daemon()
    assert job.wait(timeout=60).stdout == "before\nafter\n"
    reader.join(60)
    assert lines == ["before", "after"]


def test_named_config_of_the_environment_counts(own_grid: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own_grid.cwd / "two.yaml"
    nodes = [f"- {{name: {name}, host: local, cpu_count: 2, trust_declared: true}}" for name in ("left", "right")]
    config.write_text("nodes:\n" + "\n".join(nodes) + "\n")
    monkeypatch.setenv("GRID_CONFIG", str(config))
    began = time.monotonic()
    assert grid.run("echo $GRID_NODE", shell=True, node="right", isolated=True).stdout == "right\n"
    assert grid.run("true", node="left", strategy="node_specific", isolated=True).node == "left"
    assert {row.node_id for row in grid.status().nodes} == {"left", "right"}
    assert time.monotonic() - began < 60


def test_memory_pool_of_the_front(own_grid: Shell) -> None:
    with grid.pool() as pool:
        pool["greeting"] = b"hello"
        assert pool["greeting"] == b"hello"
        del pool["greeting"]

    async def story() -> None:
        async with aio.pool() as pool:
            await pool.store("greeting", b"again")
            assert await pool.retrieve("greeting") == b"again"

    asyncio.run(story())
