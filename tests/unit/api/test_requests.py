"""No message can do worse than be refused."""

from __future__ import annotations

import contextlib
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api.requests import (
    PATTERN_WORDS,
    REQUEST_TYPES,
    FetchAgentPackage,
    RequestLease,
    SubmitJob,
    parse,
)
from distributed_grid.errors import BadInput

OPS = [kind.__struct_config__.tag for kind in REQUEST_TYPES]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["request_id", "argv", "amount", "job_id", "env", "cwd", "priority", "prefer", "protocol", "x"]
)


def test_a_message_that_fits_becomes_its_type() -> None:
    asked = parse(b'{"op": "request_lease", "request_id": "r1", "resource_type": "cpu", "amount": 1}')
    assert isinstance(asked, RequestLease)
    assert (asked.amount, asked.wait_seconds) == (1.0, 300.0)
    submitted = parse(b'{"op": "submit_job", "request_id": "r1", "argv": ["true"], "env": {"A": "b"}}')
    assert isinstance(submitted, SubmitJob)
    assert submitted.env == {"A": "b"}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"op": "conquer"}',
        b'{"op": "get_status", "surprise": 1}',
        b'{"op": "list_events", "after": 9223372036854775808}',
        b'{"op": "read_logs", "job_id": "a", "stdout_seen": 9223372036854775808}',
        b'{"op": "request_lease", "request_id": "../..", "resource_type": "cpu", "amount": 1}',
        b'{"op": "request_lease", "request_id": "a.1", "resource_type": "cpu", "amount": 1}',
        b'{"op": "submit_job", "request_id": "r1", "argv": []}',
        b'{"op": "submit_job", "request_id": "r1", "argv": ["a\\u0000b"]}',
        b'{"op": "submit_job", "request_id": "r1", "argv": ["true"], "env": {"": "x"}}',
        b'{"op": "submit_job", "request_id": "r1", "argv": ["true"], "env": {"A=B": "x"}}',
        b'{"op": "submit_job", "request_id": "r1", "argv": ["true"], "job_id": "../x"}',
        b'{"op": "submit_job", "request_id": "r1", "argv": ["true"], "retries": -1}',
        b'{"op": "wait_for_job", "job_id": "x", "timeout_seconds": -1}',
        b"[" * 100_000,
    ],
)
def test_a_message_that_does_not_fit_is_refused(message: bytes) -> None:
    with pytest.raises(BadInput):
        parse(message)


@pytest.mark.parametrize(("word", "shown"), [("NaN", "nan"), ("-Infinity", "-inf"), ("1e999", "inf")])
def test_a_number_that_is_none_is_named(word: str, shown: str) -> None:
    message = f'{{"op": "request_boost", "request_id": "a", "resources": {{"memory": {word}}}}}'
    with pytest.raises(BadInput, match=f"^invalid request: resources.memory must be a finite number, not {shown}$"):
        parse(message.encode())


@given(st.sampled_from(OPS), st.dictionaries(FIELDS, VALUES, max_size=6))
def test_no_message_does_worse_than_be_refused(op: str, fields: dict[str, object]) -> None:
    with contextlib.suppress(BadInput):
        parse(json.dumps({**fields, "op": op}).encode())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"op": "request_lease", "request_id": "a b"}, "such as sweep-7 - at `$.request_id`"),
        ({"op": "register_pull_worker", "worker_id": "-"}, "such as gpu-box.2 - at `$.worker_id`"),
        ({"op": "submit_job", "request_id": "r1", "argv": ["true"], "workdir": "x"}, "a SHA-256 digest"),
        ({"op": "submit_job", "request_id": "r1", "argv": ["true"], "job_id": "a b"}, "such as train-7"),
        ({"op": "submit_task", "request_id": "r1", "argv": ["true"], "task_id": "-"}, "such as train-7"),
    ],
)
def test_an_id_that_does_not_fit_is_refused_in_words_with_an_example(fields: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse(json.dumps(fields).encode())
    assert words in str(refusal.value)
    assert "regex" not in str(refusal.value)


def test_every_pattern_of_a_request_has_its_words() -> None:
    patterns = set(re.findall(r"pattern='((?:[^'\\]|\\.)*)'", repr([msgspec.inspect.multi_type_info(REQUEST_TYPES)])))
    patterns |= set(re.findall(r"pattern='((?:[^'\\]|\\.)*)'", repr(msgspec.inspect.type_info(FetchAgentPackage))))
    assert patterns == {repr(pattern)[1:-1] for pattern in PATTERN_WORDS}
