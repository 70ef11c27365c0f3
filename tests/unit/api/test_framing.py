"""Frames survive being cut anywhere; malformed ones are refused, and nothing else is raised."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api.framing import JSON, STDERR, STDOUT, BrokenFrame, Unpacker, frame

FRAMES = st.lists(st.tuples(st.sampled_from([JSON, STDOUT, STDERR]), st.binary(max_size=200)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 50), max_size=200))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frame(kind, body) for kind, body in frames)
    unpacker, found = Unpacker(), []
    for cut in [*cuts, len(stream)]:
        found += list(unpacker.feed(stream[:cut]))
        stream = stream[cut:]
    assert found == frames


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_nothing_worse(garbage: bytes) -> None:
    unpacker = Unpacker(max_bytes=1000)
    with contextlib.suppress(BrokenFrame):
        list(unpacker.feed(garbage))


def test_a_frame_larger_than_allowed_is_refused_before_it_arrives() -> None:
    with pytest.raises(BrokenFrame):
        list(Unpacker(max_bytes=10).feed(frame(JSON, b"x" * 11)[:5]))
