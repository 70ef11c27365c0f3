"""Requests as methods of the clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import fields

from distributed_grid.api.answers.common import Answer
from distributed_grid.api.requests import REQUEST_TYPES
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject, Part, present
from distributed_grid.client.operations import OPERATIONS, AsyncOperations, Operations
from distributed_grid.server.daemon import SERVICES

STEPS = [JsonObject(node_id="gpu1", step="copying"), JsonObject(node_id="gpu1", step="starting")]
END = JsonObject(results=[], done=True)


class RecordingClient(Operations):
    """A client that answers with the request itself."""

    def call(self, op: str, **arguments: Any) -> JsonObject:
        return JsonObject(op=op, **arguments)

    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, Part]]:
        yield from ((b"J", JsonObject(part)) for part in (*STEPS, END))


class AsyncRecordingClient(AsyncOperations):
    async def call(self, op: str, **arguments: Any) -> JsonObject:
        return JsonObject(op=op, **arguments)

    async def stream(self, op: str, **arguments: Any) -> AsyncIterator[tuple[bytes, Part]]:
        for part in (*STEPS, END):
            yield b"J", JsonObject(part)


def test_every_request_but_the_hello_is_a_method() -> None:
    ops = {str(kind.__struct_config__.tag) for kind in REQUEST_TYPES}
    assert ops == OPERATIONS | {"hello"}
    assert SERVICES
    assert not OPERATIONS & set(dir(Client)), "an attribute of the client hides a request"


def test_a_method_sends_its_request() -> None:
    sent: list[object] = [RecordingClient().get_job(job_id="train"), asyncio.run(AsyncRecordingClient().list_nodes())]
    assert sent == [{"op": "get_job", "job_id": "train"}, {"op": "list_nodes"}]


def test_a_name_that_is_no_request_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'RecordingClient' object has no attribute 'get_jobs'"):
        RecordingClient().get_jobs()  # type: ignore[attr-defined]


def test_progress_is_reported_before_the_answer() -> None:
    steps: list[object] = []
    answers: list[object] = [RecordingClient().detach_ray(steps.append)]
    answers.append(asyncio.run(AsyncRecordingClient().detach_ray(steps.append)))
    assert (answers, steps) == ([{"results": []}] * 2, STEPS * 2)


def test_a_stream_has_all_its_parts() -> None:
    assert [part for _, part in RecordingClient().read_logs(job_id="train")] == [*STEPS, END]


def test_the_fields_of_an_answer_are_attributes_and_missing_ones_are_none() -> None:
    answer = JsonObject(job=JsonObject(job_id="train-7"), **{"for": [1], "copy": "c1"})
    assert (answer.job.job_id, answer.for_, answer.copy_, answer.note) == ("train-7", [1], "c1", None)
    assert json.dumps(answer) == '{"job": {"job_id": "train-7"}, "for": [1], "copy": "c1"}'
    with pytest.raises(AttributeError):
        answer._repr_html_()
    assert (present(answer.note), present(UNSET) is UNSET) == (None, True)


def _answer_types(kind: type[Answer]) -> Iterator[type[Answer]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _answer_types(subclass)


def test_a_field_of_an_answer_can_be_read_as_an_attribute_of_a_json_object() -> None:
    for kind in _answer_types(Answer):
        for field in fields(kind):
            assert field.name not in dir(dict), f"{kind.__name__}.{field.name} would be a method of dict"
            assert field.name.rstrip("_") == field.encode_name, f"{kind.__name__}.{field.name} has another JSON name"
