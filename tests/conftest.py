"""What every test shares: one Hypothesis profile, groups for parallel runs, and a janitor for interrupted ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import processes

settings.register_profile(
    "grid",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("grid")

LABS = {"tests/lab/hosts/": "ssh-lab", "tests/lab/ray/": "ray-lab"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """With `--dist loadgroup` a file runs in one worker, and so do all tests of a lab: they share a grid or a lab."""
    path = item.nodeid.partition("::")[0]
    item.add_marker(pytest.mark.xdist_group(next((LABS[folder] for folder in LABS if path.startswith(folder)), path)))


@pytest.fixture(scope="session", autouse=True)
def janitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ends whatever names this worker's temporary folder once this process is gone, also by Ctrl-C or kill -9."""
    command = [sys.executable, "-I", "-S", str(Path(processes.__file__)), str(tmp_path_factory.getbasetemp())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/"):
        yield
