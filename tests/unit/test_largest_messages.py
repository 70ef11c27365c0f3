"""Every message fits who must decode it: the largest one of each type of each protocol, made from its type."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distributed_grid import wire
from distributed_grid.adapters.child_process import MAX_FRAME_BYTES as MAX_CHILD_FRAME_BYTES
from distributed_grid.adapters.ray import driver_messages
from distributed_grid.adapters.ssh import process as ssh_process
from distributed_grid.api import requests
from distributed_grid.api.command_limits import MAX_COMMAND_BYTES, MAX_STRING_BYTES, command_problem
from distributed_grid.api.framing import JSON, MAX_REQUEST_BYTES, Unpacker
from distributed_grid.client.conversation import encode
from distributed_grid.domain.jobs import MAX_RUN_MS, Command
from distributed_grid.domain.nodes import MAX_GPUS
from distributed_grid.domain.processes import ProcessInfo
from distributed_grid.domain.resources import MAX_AMOUNT, Claim, GpuShare
from distributed_grid.errors import BadInput
from distributed_grid.memory.protocol import control_messages
from tests.support.largest_messages import MOST_WIDELY_ESCAPED, WIDEST, largest, members


def largest_command(letter: str = WIDEST) -> Command:
    """As much as `execve` takes: few long words, and very many empty ones."""
    size = len(letter.encode())
    word = letter * (MAX_STRING_BYTES // size)
    taken = MAX_STRING_BYTES // size * size + 9
    words, left = divmod(MAX_COMMAND_BYTES, taken)
    argv = (word,) * words + ("",) * (left // 9)
    assert command_problem(argv, {}) is None
    assert command_problem((*argv, word), {}) is not None
    path = letter * 4096
    return Command(argv, (), path, MAX_RUN_MS, MAX_RUN_MS, "f" * 64)


CLAIM = Claim(
    MAX_AMOUNT,
    MAX_AMOUNT,
    (GpuShare(2**16 - 1, 1000, MAX_AMOUNT),) * MAX_GPUS,
    ((WIDEST * 128, MAX_AMOUNT),) * 256,
)


PROCESS = ProcessInfo(
    pid=2**31 - 1,
    pid_start=2**62 - 1,
    boot=WIDEST * 256,
    ppid=1,
    uid=1,
    user=WIDEST * 256,
    name=WIDEST * 256,
    argv=(WIDEST * 8192,),
)
"""An agent ends a page before it is too long: `tests/component/agent/offloading/test_process_queries.py`."""


@pytest.mark.parametrize("kind", members(wire.FromAgent), ids=lambda kind: kind.__name__)
def test_the_control_plane_understands_the_largest_message_of_an_agent(kind: type) -> None:
    message = largest(kind, {ProcessInfo: PROCESS})
    raw = wire.encode(message)
    if kind in (wire.AgentHello, wire.Heartbeat):
        gpus = tuple(wire.ReportedGpu(number, MAX_AMOUNT, WIDEST * 128) for number in range(MAX_GPUS))
        custom = tuple((f"{WIDEST * 124}{number:04}", MAX_AMOUNT) for number in range(256))
        capacity = wire.ReportedCapacity(10**9, MAX_AMOUNT, gpus, custom)
        raw = wire.encode(msgspec.structs.replace(message, capacity=capacity))
    assert len(raw) <= wire.MAX_MESSAGE_BYTES
    assert type(wire.decode_from_agent(raw)) is kind


@pytest.mark.parametrize("kind", members(wire.ToAgent), ids=lambda kind: kind.__name__)
def test_an_agent_understands_the_largest_message_of_the_control_plane(kind: type) -> None:
    for letter in (WIDEST, "x"):
        message = largest(kind, {Command: largest_command(letter), Claim: CLAIM}, letter=letter)
        assert wire.decode_to_agent(wire.encode(message)) == message


@pytest.mark.parametrize("kind", members(control_messages.Message), ids=lambda kind: kind.__name__)
def test_a_memory_server_and_its_supervisor_understand_each_others_largest_messages(kind: type) -> None:
    raw = msgspec.msgpack.encode(largest(kind))
    assert len(raw) <= control_messages.MAX_MESSAGE_BYTES
    assert type(control_messages.decode(raw)) is kind


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        *((kind, driver_messages.REPORTS) for kind in members(driver_messages.RayReport)),
        *((kind, ssh_process.REPORTS) for kind in members(ssh_process.SshReport)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_control_plane_understands_the_largest_report_of_its_children(kind: type, decoder: Any) -> None:
    raw = msgspec.msgpack.encode(largest(kind))
    assert len(raw) <= MAX_CHILD_FRAME_BYTES, len(raw)
    assert type(decoder.decode(raw)) is kind


@pytest.mark.parametrize("letter", [WIDEST, MOST_WIDELY_ESCAPED, "x"])
def test_the_socket_takes_the_largest_command(letter: str) -> None:
    """As a client sends it: in JSON, where a letter may take six bytes."""
    message = {"op": "submit_job", "request_id": "r" * 64, "argv": largest_command(letter).argv}
    ((kind, body),) = Unpacker(MAX_REQUEST_BYTES).feed(encode(message))
    assert kind == JSON
    assert isinstance(requests.parse(body), requests.SubmitJob)


def test_a_request_that_is_too_long_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BadInput, match=r"the request has .* bytes"):
        encode({"op": "submit_job", "argv": ["x" * MAX_REQUEST_BYTES]})
