"""Messages of workers become requests of the control plane, or one clear line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.api import requests
from distributed_grid.client.conversation import encode
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.coordinator_messages import MESSAGE_TYPES, parse_message

HAS = {"cpu": {"cores": 4}}


def test_a_connection_names_the_process_that_does_not_name_itself() -> None:
    told = parse_message({"type": "heartbeat", "worker_id": "w1"}, connection="c1").arguments
    assert told["incarnation"] == "c1"
    said = parse_message({"type": "heartbeat", "worker_id": "w1", "incarnation": "mine"}, connection="c1").arguments
    assert said["incarnation"] == "mine"


def test_what_a_worker_has_is_found_among_its_capabilities() -> None:
    found = HardwareDetector().get_capabilities()
    call = parse_message({"type": "register", "worker_id": "w1", "capabilities": found})
    assert call.arguments["resources"]["cpu"]["cores"] == found["cpu"]["cores"]
    assert requests.convert(call.arguments, requests.RegisterPullWorker).worker_id == "w1"


def test_a_heartbeat_of_the_detector_is_one() -> None:
    call = parse_message(HardwareDetector().heartbeat("w1"))
    assert requests.convert(call.arguments, requests.ReportPullWorker).resources["cpu"]["cores"] > 0


@pytest.mark.parametrize(
    ("percent", "available"), [(100, 1), (0, 4), (50, 2), (float("nan"), 1), (None, 1), ("busy", 1), (-5, 1)]
)
def test_cores_that_are_idle_now_are_available_though_the_load_average_lags(percent, available) -> None:
    message = {"resources": {"cpu": {"cores": 4, "available_cores": 1}}, "hardware_metrics": {"cpu_percent": percent}}
    call = parse_message({"type": "heartbeat", "worker_id": "w1", **message})
    assert call.arguments["resources"]["cpu"]["available_cores"] == available


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ([], "must be a mapping"),
        ({}, "no message type None"),
        ({"type": "dance"}, "no message type 'dance'"),
        ({"type": "register", "worker_id": "w1"}, "resources are missing"),
        ({"type": "register", "resources": HAS}, "worker_id is missing"),
        ({"type": "register", "worker_id": 7, "resources": HAS}, "worker_id must be text"),
        ({"type": "get_task", "worker_id": "w1", "wait_seconds": 61}, "from 0 to 60"),
        ({"type": "get_task", "worker_id": "w1", "running": "t1"}, "list of the ids"),
        ({"type": "complete", "worker_id": "w1", "task_id": "t1"}, "needs the fence"),
        ({"type": "task_result", "worker_id": "w1", "task_id": "t1", "fence": 1, "status": "so so"}, "no status"),
        ({"type": "add_task", "task": "t1"}, "task must be a mapping"),
        ({"type": "add_task", "task": {"command": "ls -l"}}, "a list of words"),
        ({"type": "add_task", "task": {"cost": float("nan")}}, "cannot be written as JSON"),
    ],
)
def test_what_is_wrong_is_one_line(message, line: str) -> None:
    with pytest.raises(BadInput, match=line) as refusal:
        parse_message(message)
    assert "\n" not in str(refusal.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
fields = ["worker_id", "task_id", "fence", "resources", "capabilities", "tags", "running", "task", "status", "result"]


@given(kind=st.sampled_from(MESSAGE_TYPES), said=st.dictionaries(st.sampled_from(fields), values, max_size=5))
def test_no_message_does_more_than_be_refused(kind: str, said: dict[str, object]) -> None:
    with contextlib.suppress(BadInput):
        call = parse_message({"type": kind, **said})
        assert call.op in {requests._snake_case(one.__name__) for one in requests.REQUEST_TYPES}


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


MALFORMED = [
    *(None, 5, -1, True, float("nan"), float("inf"), 10**400, "x", "x" * 100_000, b"x", object(), {1, 2}),
    *([], [1], [None], {}, {1: 2}, {("a",): 1}, {"a": {1, 2}}, nested(5_000)),
    *({"cpu": 5}, {"cpu": {"cores": "x"}}, {"cpu": {"cores": float("nan")}}, {"cpu": {"cores": 4, "x": object()}}),
]
FIELDS = (
    "type",
    "worker_id",
    "hostname",
    "capabilities",
    "tags",
    "resources",
    "incarnation",
    "hold_seconds",
    "running",
)


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_a_malformed_message_is_refused_or_can_be_sent_and_never_raises_anything_else(kind: str) -> None:
    whole = {"worker_id": "w1", "resources": HAS, "task_id": "t1", "fence": 3, "task": {"type": "x"}}
    fields = (*FIELDS, "wait_seconds", "task_id", "fence", "result", "status", "error", "task", "hardware_metrics")
    malformed = [{**whole, "type": kind, name: value} for name in fields for value in MALFORMED]
    missing = [{"type": kind, **{name: whole[name] for name in whole if name != left_out}} for left_out in whole]
    for message in (*malformed, *missing):
        with contextlib.suppress(BadInput):
            call = parse_message(message, connection="c1")
            assert encode({"op": call.op, **call.arguments})


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("capabilities", "fast", "capabilities must be a mapping, not str"),
        ("hold_seconds", float("nan"), "cannot be written as JSON"),
        ("resources", {"cpu": {"cores": 4, "x": object()}}, "cannot be written as JSON"),
        ("worker_id", 7, "worker_id must be text"),
        ("type", nested(5_000), "no message type list"),
    ],
)
def test_a_malformed_registration_is_one_line(field: str, value: object, line: str) -> None:
    message = {"type": "register", "worker_id": "w1", field: value}
    with pytest.raises(BadInput, match=line):
        parse_message({"resources": HAS, **message} if field != "capabilities" else message)
