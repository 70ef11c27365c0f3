"""`grid predict` and `ResourcePerformancePredictor` in a real grid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.errors import BadInput
from distributed_grid.orchestration import resource_performance_predictor
from distributed_grid.orchestration.resource_performance_predictor import ResourcePerformancePredictor
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def predictor(shared_grid: Shell) -> Iterator[ResourcePerformancePredictor]:
    with ResourcePerformancePredictor(state_dir=shared_grid.state_dir) as predictor:
        yield predictor


def shown(grid: Shell, *command: str) -> dict[str, Any]:
    """Prediction for the next run of a command."""
    found: dict[str, Any] = json.loads(grid("predict", "show", "--json", *command, check=0).stdout)
    return found


def executions(count: int, task_type: str) -> list[dict[str, Any]]:
    """Runs of a type whose memory grows with the batch."""
    return [
        {
            "task_id": f"{task_type}-{i}",
            "task_type": task_type,
            "parameters": {"batch_size": 2 ** (i % 5)},
            "metrics": {"memory_mb": 500 + 100 * 2 ** (i % 5) + i % 3, "cpu_cores": 2},
            "execution_time_seconds": 10 + i % 2,
        }
        for i in range(count)
    ]


def test_execution_recorded_by_hand_is_predicted(shared_grid: Shell) -> None:
    words = ("predict", "record", "--time", "10", "--cpu-time", "15", "--input", "1GB")
    for i in range(6):
        found = json.loads(
            shared_grid(
                *words,
                "--json",
                "--memory",
                f"{300 + i}MB",
                "--task-id",
                f"hand-{i}",
                "--",
                "work",
                "--n",
                str(i),
                check=0,
            ).stdout
        )
        assert (found["key"], found["samples"], found["known"]) == ("work --n #", i + 1, False)
    again = shared_grid(*words, "--memory", "9GB", "--task-id", "hand-1", "--", "work", "--n", "1", check=0).stdout
    assert again == "hand-1 known already: work --n #, 6 runs\n"
    found = shown(shared_grid, "--input", "1GB", "work", "--n", "3")
    assert (found["tier"], found["samples"]) == ("statistics", 6)
    assert 303 <= found["memory_mb"] < 330
    assert found["run_seconds"] == pytest.approx(10, rel=0.01)
    assert found["confidence"] >= 0.7
    text = shared_grid("predict", "show", "work", "--n", "3", check=0).stdout
    assert "statistics predict" in text
    assert len(text.splitlines()) >= 6


def test_a_job_gets_at_most_twice_what_was_measured_here(shared_grid: Shell) -> None:
    """Whatever was recorded by hand; and nothing before the grid has measured a run."""
    for i in range(8):
        words = ("--memory", f"{8000 + i}MB", "--time", "1", "--task-id", f"huge-{i}")
        shared_grid("predict", "record", *words, "--", "python3", "-c", "pass", check=0)

    def sizing() -> Any:
        found = shared_grid("--json", "run-shared", "--dry-run", "python3", "-c", "pass", check=0)
        return json.loads(found.stdout)["job"]["sizing"]

    assert sizing() is None
    said = shared_grid("predict", "show", "python3", "-c", "pass", check=0).stdout
    assert "no run of it was measured by the grid itself: a job gets no memory from this" in said
    shared_grid("run-shared", "-j", "measured", "python3", "-c", "pass", check=0)
    peak_gb = shared_grid.job("measured")["max_memory_gb"]
    assert 0 < peak_gb < 0.1

    wait_until(sizing)
    assert sizing()["memory_gb"] <= max(2 * peak_gb, 64 / 1024)
    assert (
        "the largest peak that the grid has measured" in shared_grid("predict", "show", "python3", "-c", "pass").stdout
    )


def test_executions_are_read_from_a_file_and_from_standard_input(shared_grid: Shell) -> None:
    file = shared_grid.cwd / "runs.json"
    file.write_text(json.dumps(executions(8, "fromfile")))
    found = shared_grid.json("predict", "record", "--from", "runs.json")
    assert len(found["executions"]) == 8
    assert shared_grid("predict", "record", "--from", "runs.json", check=0).stdout == "0 recorded, 8 known already\n"
    lines = "\n".join(map(json.dumps, executions(10, "fromfile")))
    process = shared_grid.start("predict", "record", "--from", "-", stdin=-1)
    out, _ = process.communicate(lines.encode(), timeout=60)
    assert out == b"2 recorded, 8 known already\n"
    types = shared_grid.json("predict", "show")["task_types"]
    assert {row["key"]: row["samples"] for row in types}["type:fromfile batch_size=#"] == 10
    found = shown(shared_grid, "--type", "fromfile", "--param", "batch_size=8")
    assert 1300 <= found["memory_mb"] < 1500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("record", "--memory", "1GB"), "give a command or --type"),
        (("record", "--memory", "much", "work"), "a size is written as"),
        (("record", "work"), "nothing was measured"),
        (("record", "--type", "x", "--memory", "1GB", "work"), "give a command or --type, not both"),
        (("record", "--type", "x", "--param", "batch", "--memory", "1GB"), "NAME=VALUE"),
        (("record", "--from", "missing.json"), "cannot read missing.json"),
        (("record", "--from", "bad.json"), "is no JSON"),
        (("record", "--from", "odd.json"), "execution 2"),
        (("record", "--from", "odd.json", "work"), "with --from everything is in the file"),
        (("show", "--param", "a=1", "work"), "--param goes with --type"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(shared_grid: Shell, words: tuple[str, ...], message: str) -> None:
    (shared_grid.cwd / "bad.json").write_text("{")
    (shared_grid.cwd / "odd.json").write_text('[{"task_id": "odd", "type": "odd", "memory_mb": 1}, {"task_id": "b"}]')
    done = shared_grid("predict", *words, check=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "type:odd" not in shared_grid("predict", "show", check=0).stdout


def test_training_says_what_was_trained_and_how_good_it_is(
    shared_grid: Shell, predictor: ResourcePerformancePredictor
) -> None:
    for one in executions(35, "trained"):
        predictor.record_task_execution(one["task_id"], one)
    found = shared_grid.json("predict", "train")
    (row,) = [row for row in found["trained"] if row["key"] == "type:trained batch_size=#"]
    assert (row["samples"], row["tier"]) == (35, "ml")
    assert row["confidence"] >= 0.7
    text = shared_grid("predict", "train", check=0).stdout
    assert "type:trained batch_size=#" in text
    assert "trained in" in text


def test_a_program_records_predicts_and_trains(predictor: ResourcePerformancePredictor) -> None:
    task = {"task_type": "api", "parameters": {"batch_size": 8}}
    nothing = predictor.predict_resource_requirements(task)
    assert nothing == {
        "cpu_cores": resource_performance_predictor.DEFAULT_CPU_CORES,
        "memory_mb": resource_performance_predictor.DEFAULT_MEMORY_MB,
        "gpu_memory_mb": resource_performance_predictor.DEFAULT_GPU_MEMORY_MB,
        "execution_time_seconds": None,
        "tier": "defaults",
        "confidence": 0.0,
        "samples": 0,
    }
    assert predictor.calculate_batch_scaling_factor("api", 4) == 4.0
    for one in executions(35, "api"):
        record = predictor.record_task_execution(one["task_id"], one)
        assert not record["known"]
    found = predictor.predict_resource_requirements(task)
    assert (found["tier"], found["samples"]) == ("ml", 35)
    assert 1300 <= found["memory_mb"] < 1500
    assert found["cpu_cores"] == pytest.approx(2, rel=0.05)
    assert found["execution_time_seconds"] == pytest.approx(10.5, rel=0.1)
    assert any(row["key"] == "type:api batch_size=#" for row in predictor.train_models()["trained"])
    factor = predictor.calculate_batch_scaling_factor(task, 16)
    assert factor == pytest.approx(2100 / 1300, rel=0.1)
    assert predictor.calculate_batch_scaling_factor("api", 16, 1) == pytest.approx(2100 / 600, rel=0.1)
    assert predictor.calculate_batch_scaling_factor(task, 16, resource="run_time") == pytest.approx(1, rel=0.2)
    with pytest.raises(BadInput, match="resource must be"):
        predictor.calculate_batch_scaling_factor(task, 16, resource="luck")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="needs a task_type or a command"):
        predictor.predict_resource_requirements({})


def test_the_methods_are_safe_inside_a_running_loop(predictor: ResourcePerformancePredictor) -> None:
    async def story() -> float:
        return predictor.predict_resource_requirements({"command": "anything at all"})["memory_mb"]

    assert asyncio.run(story()) == resource_performance_predictor.DEFAULT_MEMORY_MB


def test_the_constants_are_the_defaults_of_the_config() -> None:
    defaults = ClusterConfig.embedded("here").prediction
    module = resource_performance_predictor
    assert (defaults.confidence_threshold, defaults.update_interval_seconds) == (
        module.DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD,
        module.DEFAULT_PREDICTION_UPDATE_INTERVAL,
    )
    assert (defaults.min_samples_for_ml, defaults.min_samples_for_stats) == (
        module.DEFAULT_MIN_SAMPLES_FOR_ML,
        module.DEFAULT_MIN_SAMPLES_FOR_STATS,
    )
    assert (
        module.DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD,
        module.DEFAULT_PREDICTION_UPDATE_INTERVAL,
        module.DEFAULT_MIN_SAMPLES_FOR_ML,
        module.DEFAULT_MIN_SAMPLES_FOR_STATS,
    ) == (0.7, 3600, 30, 5)


def test_the_predictor_is_trained_as_often_as_the_config_says(grid: Shell) -> None:
    (grid.cwd / "often.yaml").write_text("prediction: {update_interval_seconds: 1, min_samples_for_stats: 3}\n")
    grid("-c", "often.yaml", "daemon", "start", check=0)
    for i in range(4):
        grid("predict", "record", "--memory", f"{100 + i}MB", "--", "work", check=0)
    assert shown(grid, "work")["tier"] == "statistics"
    wait_until(lambda: grid.json("predict", "show")["task_types"][0]["trained_at"] is not None)
    grid("daemon", "stop", check=0)
    grid("-c", "often.yaml", "daemon", "start", check=0)
    assert shown(grid, "work")["samples"] == 4
    assert (grid.host_dir / "predictions.db").stat().st_mode & 0o777 == 0o600
