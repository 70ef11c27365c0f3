"""One lab with one Ray cluster of three hosts for all tests here: they run in one process (`make test-ray`)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab import Lab, problem
from tests.lab.ray.ray_grids import SHARE, Console, RayGrid, furnish, ray_processes, remains_of

_running = contextlib.ExitStack()
"""The lab and its grid, which end with the last test here: an idle Ray cluster takes part of a core."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _running.close()


@contextlib.contextmanager
def _lab() -> Iterator[Lab]:
    with Lab(share=SHARE) as lab:
        for host in lab:
            furnish(host)
        yield lab


@contextlib.contextmanager
def _grid(lab: Lab, folder: Path) -> Iterator[RayGrid]:
    gpu = {"gpu_count": 1, "trust_declared": True}  # Ray and the grid believe it: there is no driver to ask
    ours: dict[str, dict[str, Any]] = {
        name: {"dedicated": True} for name in ("gpu_master", "gpu1", "gpu2")
    }  # no owner keeps what Ray needs to start
    ours["gpu2"] |= gpu
    grid = RayGrid(lab, folder, **ours)
    try:
        grid.start_ray()
        yield grid
    finally:
        grid.close()
    assert [ray_processes(host) for host in lab] == [[], [], []]
    assert grid.leaves_nothing(), [*map(remains_of, lab)]


@pytest.fixture(scope="session")
def ray_lab() -> Iterator[Lab]:
    """gpu-master, gpu1 and gpu2, each with two cores, 3 GB and an interpreter that has Ray."""
    if reason := problem():
        pytest.skip(reason)
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed here; type: make ray")
    with _running:  # also where the run is interrupted
        yield _running.enter_context(_lab())


@pytest.fixture(scope="session")
def ray_grid(ray_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> RayGrid:
    """The grid of these hosts, with Ray started by one command; at the end nothing of it is left."""
    return _running.enter_context(_grid(ray_lab, tmp_path_factory.mktemp("grid")))


@pytest.fixture(scope="module")
def console(ray_grid: RayGrid, ray_lab: Lab) -> Iterator[Console]:
    """A Ray program that runs on the head."""
    with contextlib.closing(Console(ray_grid, ray_lab.host("gpu-master"))) as program:
        yield program


@pytest.fixture
def nothing_held(ray_grid: RayGrid) -> Iterator[None]:
    """The test ends with no boost."""
    yield
    for row in ray_grid.observe("boost", "status")["boosts"]:
        ray_grid("boost", "release", row["boost_id"], check=0)
