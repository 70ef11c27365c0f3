"""The work list of a transfer: unfinished parts are always queued again, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.memory.client.transfer_queue import SMALL_WINDOW, WINDOW, ChunkRange, TransferQueue
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FrameStatus, StatusError

OK, CORRUPT, FULL = FrameStatus.OK, FrameStatus.CORRUPT, FrameStatus.FULL


def a_queue(count: int) -> TransferQueue:
    return TransferQueue(ChunkRange(0, number, memoryview(b"x")) for number in range(count))


def offsets(queue: TransferQueue) -> list[int]:
    """The queued offsets; the queue is unchanged afterwards."""
    with queue.copy() as rest:
        return [rest.take().offset for _ in range(len(rest))]


def run_pass(queue: TransferQueue, taken: int, *statuses: FrameStatus, breaks: bool = False) -> None:
    """Take so many ranges, have the oldest answered so, and end, or break."""
    with queue:
        for _ in range(taken):
            queue.take()
        for status in statuses:
            queue.acknowledge(status)
        if breaks:
            raise OSError("the connection broke")


@given(offset=st.integers(0, 3 * CHUNK_BYTES), size=st.integers(0, 3 * CHUNK_BYTES))
def test_a_range_is_cut_at_the_edges_of_its_chunks(offset: int, size: int) -> None:
    queue = TransferQueue.of_range(memoryview(bytearray(size)), offset, handle=7)
    assert queue.total_bytes == size
    at = offset
    with queue:
        for _ in range(len(queue)):
            item = queue.take()
            assert (item.handle, item.offset) == (7, at)
            assert item.offset // CHUNK_BYTES == (item.offset + len(item.view) - 1) // CHUNK_BYTES
            at += len(item.view)
            queue.acknowledge(OK)
    assert at == offset + size


def test_a_queue_is_empty_when_everything_is_acknowledged() -> None:
    queue = a_queue(3)
    with queue:
        assert [queue.take().offset, queue.take().offset] == [0, 1]
        assert (queue.in_flight, len(queue), queue.oldest.offset) == (2, 1, 0)
        queue.acknowledge(OK)
        assert queue.take().offset == 2
        queue.acknowledge(OK)
        queue.acknowledge(OK)
        assert not queue.may_send
    assert not queue


def test_what_was_in_flight_when_a_connection_broke_is_queued_again_in_order() -> None:
    queue = a_queue(5)
    with pytest.raises(OSError, match="broke"):
        run_pass(queue, 3, OK, breaks=True)
    assert offsets(queue) == [1, 2, 3, 4]
    assert queue.in_flight == 0


def test_a_refusal_stops_sending_and_is_raised_at_the_end_with_all_that_is_not_done_queued() -> None:
    queue = a_queue(5)
    with pytest.raises(StatusError) as raised:
        run_pass(queue, 3, OK, FULL, OK)
    assert raised.value.status is FULL
    assert offsets(queue) == [1, 3, 4]
    with queue:
        assert queue.may_send, "the next pass begins without the refusal"


def test_a_connection_that_breaks_after_a_refusal_counts_as_broken() -> None:
    queue = a_queue(5)
    with pytest.raises(OSError, match="broke"):
        run_pass(queue, 3, OK, FULL, breaks=True)
    assert offsets(queue) == [1, 2, 3, 4]


def test_a_corrupt_range_is_retried_once_after_all_others() -> None:
    queue = a_queue(3)
    run_pass(queue, 1, CORRUPT)
    assert offsets(queue) == [1, 2, 0]
    with pytest.raises(StatusError) as raised:
        run_pass(queue, 3, OK, OK, CORRUPT)
    assert raised.value.status is CORRUPT
    assert offsets(queue) == [0]
    queue.clear_retries()  # another copy: one retry there, too
    run_pass(queue, 1, CORRUPT)
    assert offsets(queue) == [0]


@given(count=st.integers(0, 20), batch=st.integers(1, 25), done=st.integers(0, 25))
def test_what_a_batch_does_not_move_comes_back_to_the_front(count: int, batch: int, done: int) -> None:
    queue = a_queue(count)
    part = queue.take_batch(batch)
    assert len(part) + len(queue) == count
    with part:
        for _ in range(min(done, len(part))):
            part.take()
            part.acknowledge(OK)
    queue.give_back(part)
    assert offsets(queue) == list(range(min(done, batch, count), count))
    assert not part


def test_all_ranges_get_the_handle_of_the_connection_that_moves_them() -> None:
    queue = a_queue(3)
    queue.bind_handle(9)
    with queue:
        assert {queue.take().handle for _ in range(3)} == {9}


def test_small_ranges_are_sent_in_a_wider_window() -> None:
    with a_queue(1) as queue:
        assert queue.window == SMALL_WINDOW
    with TransferQueue.of_range(memoryview(bytearray(CHUNK_BYTES)), 0) as queue:
        assert queue.window == WINDOW


def test_samples_are_spread_over_the_queue() -> None:
    view = memoryview(bytes(range(9)))
    queue = TransferQueue(ChunkRange(0, at, view[at : at + 1]) for at in range(9))
    assert [bytes(sample) for sample in queue.samples(3)] == [b"\x00", b"\x03", b"\x06"]
    assert len(a_queue(2).samples(3)) == 2
