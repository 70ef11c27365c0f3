"""What every test shares: a Hypothesis profile, groups for parallel runs, no skips in CI, and a janitor."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

# What pytest compiles of the tests and of Hypothesis is kept, also where Python is told to keep nothing: every worker
# and every session would do it again, for some seconds each.
sys.dont_write_bytecode = False
# What a test starts by a name such as python3 is the Python under ours, not a shim of pyenv in front of it, which takes
# longer than Python itself.
os.environ["PATH"] = f"{Path(os.path.realpath(sys.executable)).parent}:{os.environ['PATH']}"
# A shell without job control starts `make test &` with Ctrl-C ignored, and `nohup` with hang-ups ignored, which every
# command under test would inherit.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from bench.exclusive_cgroup import exclusive_cgroup  # noqa: E402
from tests.support import processes, run_order  # noqa: E402

settings.register_profile(
    "grid",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("grid")


class FilesAndLabs(LoadScopeScheduling):
    """Parallel runs: a file runs in one worker, and so do all tests of the Ray lab: they share a grid or a lab."""

    def _split_scope(self, nodeid: str) -> str:
        return run_order.scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FilesAndLabs:
    return FilesAndLabs(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is part of `make test-fast`, before `-m` selects; parallel runs begin with what takes longest."""
    for item in items:
        if run_order.is_in_process(item.nodeid) and item.get_closest_marker("slow") is None:
            item.add_marker("fast")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: run_order.place_of(item.nodeid))


def pytest_collection_finish() -> None:
    """Loaded modules stay: the garbage collector need not visit them again and again, nor for every few objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips gives the reason on a laptop, and fails with it in CI, where whatever it needs has to be."""
    report = yield
    if report.skipped and os.environ.get("CI") and call.excinfo is not None and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"may not be skipped in CI: {call.excinfo.value}"
    return report


@pytest.fixture
def own_cgroup(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests that look at how busy the machine is: some cores (one, or the parameter) and 10 GB, on which others do
    not show. Where that cannot be arranged, a machine that is quiet enough."""
    with exclusive_cgroup(getattr(request, "param", 1), 10 * 1024**3) as made:
        if not made and psutil.cpu_percent(interval=2) > 20:
            pytest.skip("others use this machine, and it has no control groups of version 1 to keep them apart")
        yield


@pytest.fixture(scope="session", autouse=True)
def janitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ends whatever names this worker's temporary folder once this process is gone, also by Ctrl-C or kill -9."""
    command = [sys.executable, "-I", "-S", str(Path(processes.__file__)), str(tmp_path_factory.getbasetemp())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/"):
        yield
