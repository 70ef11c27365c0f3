"""`python -m bench --smoke`: every measurement runs with tiny sizes; a failing one loses no figures of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import NAMES, SMOKE_NOTE
from tests.support.project import PROJECT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LONG = {
    "ray_boosts": "a real Ray takes half a minute, whatever is measured",
    "worker_starts": "a Docker engine, a Slurm cluster and two workers take 20 seconds",
}
"""Measurements that have no tiny size: `make chaos` runs them."""
CASES = [pytest.param(name, marks=pytest.mark.chaos if name in LONG else ()) for name in NAMES]


def run_bench(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        cwd=PROJECT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_measurement_runs_with_tiny_sizes(name: str) -> None:
    done = run_bench("--smoke", name)
    assert done.returncode == 0, done.stderr[-3000:]
    if f"{name} is left out: " in done.stderr:
        pytest.skip(done.stderr.partition("is left out: ")[2].splitlines()[0])
    table = done.stdout[done.stdout.index("measured ") :].splitlines()
    assert len(table) >= 3, done.stdout  # the head, a figure, the note
    assert table[-1] == SMOKE_NOTE


def test_every_measurement_of_the_folder_is_known() -> None:
    files = (PROJECT / "bench").glob("*.py")
    assert {file.stem for file in files if "\ndef measure() -> list[Line]:" in file.read_text()} == set(NAMES)


def test_a_failing_measurement_does_not_lose_the_figures_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "load").mkdir()  # its series are missing
    done = run_bench("--smoke", "load_forecast", "lease_report", "worker_steps", GRID_TRACES=str(tmp_path))
    assert done.returncode == 1
    assert "who lent whom" in done.stdout
    assert "pull workers ask" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("failed: load_forecast: FileNotFoundError: ")


def test_a_measurement_without_its_trace_is_left_out_with_the_reason(tmp_path: Path) -> None:
    done = run_bench("--smoke", "openb", "lease_report", GRID_TRACES=str(tmp_path))
    assert done.returncode == 0
    assert f"openb is left out: no GPU cluster at {tmp_path}/openb; see GRID_TRACES" in done.stderr
    assert "who lent whom" in done.stdout


def test_an_unknown_measurement_is_refused() -> None:
    done = run_bench("--smoke", "nonsense")
    assert done.returncode == 2
    assert "no measurement 'nonsense'; there is reactor_steps, " in done.stderr
