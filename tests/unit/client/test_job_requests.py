from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distributed_grid.api import requests
from distributed_grid.client.job_requests import argv_of, command_request, job_request, lease_fields
from distributed_grid.errors import BadInput

GIB = 1024**3


def submitted(**options: Any) -> requests.SubmitJob:
    """The request as the control plane parses it."""
    request = job_request("true", options, wait_seconds=300.0)  # type: ignore[arg-type]
    op = requests.parse(msgspec.json.encode({"op": "submit_job", **request.fields}))
    assert isinstance(op, requests.SubmitJob)
    return op


def leased(**options: Any) -> requests.RequestLease:
    op = requests.parse(msgspec.json.encode({"op": "request_lease", **lease_fields(options)}))  # type: ignore[arg-type]
    assert isinstance(op, requests.RequestLease)
    return op


def test_without_amounts_the_grid_sizes_the_job() -> None:
    op = submitted()
    assert (op.resource_type, op.amount, op.states_needs) == (None, None, False)
    assert (op.cwd, op.wait_seconds, op.timeout_seconds, op.priority) == (os.getcwd(), 300.0, 0.0, "medium")


def test_memory_and_gpus_come_with_one_core() -> None:
    op = submitted(mem="1536M", gpus=1)
    assert (op.resource_type, op.amount, op.resources) == (None, None, {"memory": 1.5, "gpu": 1.0})


def test_amounts_of_all_kinds() -> None:
    op = submitted(cpus=2, mem=4, gpus=0.5, also={"TPU": 1}, gpu_models=["a100"], gpu_memory_gb=10)
    assert (op.resource_type, op.amount) == ("cpu", 2.0)
    assert op.resources == {"memory": 4.0, "gpu": 0.5, "tpu": 1.0}
    assert (op.gpu_models, op.gpu_memory_gb) == (("a100",), 10.0)


def test_no_cores_leave_the_other_amounts() -> None:
    op = submitted(cpus=0, gpus=1, mem="1G")
    assert (op.resource_type, op.amount, op.resources) == ("memory", 1.0, {"gpu": 1.0})
    with pytest.raises(BadInput, match="an amount of something"):
        submitted(cpus=0)


def test_resource_named_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="asked for twice: memory"):
        submitted(mem="1G", also={"memory": 2})


def test_named_node_is_preferred_and_with_node_specific_required() -> None:
    assert submitted(node="gpu2").prefer == ("gpu2",)
    op = submitted(node=["gpu1", "gpu2"], strategy="node-specific")
    assert (op.prefer, op.require) == ((), ("gpu1", "gpu2"))


def test_times_are_taken_in_words() -> None:
    op = submitted(timeout="1h30m", wait="5min", grace=timedelta(seconds=2), expects="90s")
    assert (op.timeout_seconds, op.wait_seconds, op.grace_seconds, op.expects_seconds) == (5400.0, 300.0, 2.0, 90.0)
    assert submitted(timeout=None, wait=0).wait_seconds == 0.0


def test_working_directory_and_files_that_come_back(tmp_path: Path) -> None:
    op = submitted(workdir=tmp_path, fetch="out/**", overwrite=True)
    assert (op.cwd, op.fetch, op.fetch_to, op.overwrite) == (str(tmp_path), ("out/**",), str(tmp_path), True)
    assert submitted(isolated=True).cwd == ""
    assert submitted(workdir="none").cwd == os.getcwd()


def test_variables_are_added_to_a_clean_base_and_named() -> None:
    op = submitted(env={"A": "1"})
    assert (op.given, op.env["A"], "PYTEST_CURRENT_TEST" in op.env) == (("A",), "1", False)


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no such option: memory"):
        submitted(memory=1)
    with pytest.raises(TypeError, match="no such option: shell"):
        lease_fields({"shell": True})  # type: ignore[typeddict-unknown-key]


def test_lease_has_an_end_and_one_core_by_default() -> None:
    op = leased()
    assert (op.resource_type, op.amount, op.duration_seconds, op.wait_seconds) == ("cpu", 1.0, 3600.0, 300.0)
    op = leased(gpus=1, duration="1d", target_node="gpu1")
    assert (op.resource_type, op.amount, op.resources) == ("cpu", 1.0, {"gpu": 1.0})
    assert (op.duration_seconds, op.target) == (86_400.0, "gpu1")


def test_command_in_a_lease() -> None:
    request = command_request("true", {"timeout": 3}, {"allocation_id": "abc"}, "gpu1")
    op = requests.parse(msgspec.json.encode({"op": "run_in_lease", **request.fields}))
    assert isinstance(op, requests.RunInLease)
    assert (op.allocation_id, op.timeout_seconds, request.lease_node) == ("abc", 3.0, "gpu1")


def test_words_of_a_command(tmp_path: Path) -> None:
    assert argv_of("echo 'a b' c", shell=False) == ["echo", "a b", "c"]
    assert argv_of(["ls", tmp_path, 3], shell=False) == ["ls", str(tmp_path), "3"]
    assert argv_of("a | b", shell=True) == ["/bin/sh", "-c", "a | b"]
