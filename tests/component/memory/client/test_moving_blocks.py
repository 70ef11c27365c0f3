"""Blocks that move while they are used: readers and writers see a delay, never an error and never old bytes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from distributed_grid.errors import Corrupt, NotFound, TimedOut
from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, FILL, READ, WRITE
from distributed_grid.wire import CopyMadeReport, MakeCopyOrder
from tests.component.memory.memory_servers import FakeDirectory, Lender, lenders, wait_for

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Lender]]:
    folder = tmp_path_factory.mktemp("memory")
    with lenders(folder / "one", folder / "two") as both:
        yield both


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@pytest.fixture
def blocks(directory: FakeDirectory) -> Iterator[BlockClient]:
    blocks = BlockClient(directory, retry_seconds=30)
    yield blocks
    blocks.close()


def an_id() -> str:
    return f"mem-{random.getrandbits(60):x}"


def test_a_moved_block_is_whole_and_its_old_place_is_free(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block, size = an_id(), 3 * MIB + 5
    directory.allocate(block, size, one)
    blocks.write(block, b"start", 10)
    blocks.write(block, b"end", size - 3)
    assert not directory.move(block, other).problem
    assert f"{block}:1" not in one.served.copies
    assert other.served.copies == (f"{block}:2",)
    assert blocks.read(block, size) == bytes(10) + b"start" + bytes(size - 18) + b"end"
    assert blocks.stats()["moves"] == 1
    other.free(f"{block}:2")


def test_only_what_was_written_takes_room_at_the_new_place(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block = an_id()
    directory.allocate(block, 64 * MIB, one)
    blocks.write(block, b"x" * CHUNK_BYTES, 8 * MIB)
    assert not directory.move(block, other).problem
    wait_for(lambda: other.supervisor.stats()["copies"] == 1)
    assert other.supervisor.resident_bytes < MIB
    other.free(f"{block}:2")


def test_a_block_goes_to_disk_and_back(directory: FakeDirectory, blocks: BlockClient, two: list[Lender]) -> None:
    one, other = two
    block, data = an_id(), os.urandom(CHUNK_BYTES + 99)
    directory.allocate(block, len(data), one)
    blocks.write(block, data)
    assert not directory.move(block, other, on_disk=True).problem
    assert other.served.on_disk == (f"{block}:2",)
    assert blocks.read(block, len(data)) == data
    blocks.write(block, b"!", 5)
    assert not directory.move(block, one).problem
    assert blocks.read(block, 10) == data[:5] + b"!" + data[6:10]
    assert not list((other.folder / "spill").glob("*.block"))
    one.free(f"{block}:3")


def test_writers_in_flight_only_wait_while_a_block_moves_back_and_forth(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    block, size = an_id(), 4 * MIB
    directory.allocate(block, size, two[0])
    stop = threading.Event()
    problems: list[BaseException] = []

    def write_on(number: int) -> None:
        share = size // 3
        start, model, seed = number * share, bytearray(share), random.Random(number)
        own = BlockClient(directory, retry_seconds=30)
        try:
            while not stop.is_set():
                at = seed.randrange(share - 1)
                data = seed.randbytes(min(seed.choice([3, 5000, CHUNK_BYTES, 2 * CHUNK_BYTES]), share - at))
                own.write(block, data, start + at)
                model[at : at + len(data)] = data
                assert own.read(block, len(data), start + at) == data
        except BaseException as problem:
            problems.append(problem)
        finally:
            own.close()
        final[number] = model

    final: dict[int, bytearray] = {}
    writers = [threading.Thread(target=write_on, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    for number in range(6):
        assert not directory.move(block, two[(number + 1) % 2]).problem
    stop.set()
    for writer in writers:
        writer.join(30)
    assert not problems
    for number, model in final.items():
        assert blocks.read(block, len(model), number * (size // 3)) == model
    two[0].free(f"{block}:7")


def test_a_copy_that_cannot_be_made_is_told_and_the_block_is_usable_again(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block = an_id()
    directory.allocate(block, MIB, one)
    blocks.write(block, b"safe")
    ticket = directory.ticket(block, other, f"{block}:2", False, 2, READ | WRITE | FILL)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    gone = type(other.served.endpoint)("127.0.0.1", port)
    made = one.make_copy(MakeCopyOrder(f"{block}:1", 2, gone, ticket))
    assert "refused" in made.problem
    impatient = BlockClient(directory, retry_seconds=0.1)
    assert impatient.read(block, 4) == b"safe", "a frozen copy can be read"
    with pytest.raises(TimedOut, match="frozen"):
        impatient.write(block, b"more", 4)
    directory.blocks[block]["generation"] = 3  # the control plane's answer to a failed move
    impatient.write(block, b"more", 4)
    assert impatient.read(block, 8) == b"safemore"
    late = one.make_copy(MakeCopyOrder(f"{block}:1", 2, gone, ticket))  # the old order comes once more
    assert "past" in late.problem
    impatient.write(block, b"MORE", 4)
    impatient.close()
    one.free(f"{block}:1")


def test_a_copy_of_what_was_let_go_of_is_told_as_a_problem(directory: FakeDirectory, two: list[Lender]) -> None:
    one, other = two
    block = an_id()
    directory.allocate(block, MIB, one)
    one.free(f"{block}:1")
    assert "not here" in directory.move(block, other).problem


def test_a_block_that_nobody_has_touched_moves_too(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    block = an_id()
    directory.allocate(block, MIB, two[0])
    assert not directory.move(block, two[1]).problem
    assert blocks.read(block, MIB) == bytes(MIB)
    two[1].free(f"{block}:2")


def test_an_order_given_twice_is_done_once_and_told_again(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block = an_id()
    directory.allocate(block, MIB, one)
    blocks.write(block, b"x" * MIB)
    ticket = directory.ticket(block, other, f"{block}:2", False, 2, READ | WRITE | FILL)
    order = MakeCopyOrder(f"{block}:1", 2, other.served.endpoint, ticket)
    assert one.make_copy(order).problem == ""
    directory.blocks[block] |= {"places": [(other, f"{block}:2", False)], "generation": 2}
    blocks.forget(block)
    blocks.write(block, b"new")
    assert one.make_copy(order).problem == ""
    one.kill_server()  # and one that knows nothing of it
    wait_for(lambda: one.served)
    assert one.make_copy(order).problem == ""
    assert blocks.read(block, 5) == b"newxx", "it was copied over"
    one.free(f"{block}:1")
    other.free(f"{block}:2")


def test_a_server_killed_while_copying_copies_again(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block, data = an_id(), os.urandom(MIB) * 24
    directory.allocate(block, len(data), one)
    blocks.write(block, data)
    made: list[CopyMadeReport] = []
    mover = threading.Thread(target=lambda: made.append(directory.move(block, other)))
    mover.start()
    one.kill_server()
    other.kill_server()
    mover.join(30)
    if made[0].problem:  # the target was killed: told, and tried anew as the control plane would
        assert not directory.move(block, other).problem
    assert blocks.read(block, len(data)) == data
    copy = directory.blocks[block]["places"][0][1]
    other.free(copy)


def test_a_second_copy_gets_every_write_and_can_take_over(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    one, other = two
    block = an_id()
    directory.allocate(block, 2 * CHUNK_BYTES, one, other)
    data = os.urandom(2 * CHUNK_BYTES)
    blocks.write(block, data)
    blocks.write(block, b"both", CHUNK_BYTES - 2)
    known = directory.blocks[block]
    known["places"], known["generation"] = known["places"][1:], 2  # the first lender was lost
    blocks.forget(block)
    assert blocks.read(block, 2 * CHUNK_BYTES) == data[: CHUNK_BYTES - 2] + b"both" + data[CHUNK_BYTES + 2 :]
    one.free(f"{block}:1")
    other.free(f"{block}:2")


@pytest.mark.parametrize("streams", [1, 3])
def test_what_one_copy_has_lost_is_read_from_the_other(
    directory: FakeDirectory, two: list[Lender], streams: int
) -> None:
    one, other = two
    block, size, edge = an_id(), 200 * CHUNK_BYTES, 100 * CHUNK_BYTES
    directory.allocate(block, size, one, other)
    data = os.urandom(size)
    with contextlib.closing(BlockClient(directory, streams=streams)) as blocks:
        blocks.write(block, data)
        spoil(one, f"{block}:1", edge + 5)
        assert blocks.read(block, size) == data
        assert blocks.read(block, 7, edge + 2) == data[edge + 2 : edge + 9]
        assert blocks.read_many([(block, 8, 0), (block, 8, edge)]) == [data[:8], data[edge : edge + 8]]
        spoil(other, f"{block}:2", edge + CHUNK_BYTES - 1)
        with pytest.raises(Corrupt, match="not what was written"):
            blocks.read(block, size)
        assert blocks.read(block, edge) == data[:edge]
    one.free(f"{block}:1")
    other.free(f"{block}:2")


def spoil(lender: Lender, copy: str, at: int) -> None:
    """Change a byte of a copy behind everybody's back."""
    fd = wait_for(lambda: lender.supervisor._held.descriptors.get(copy))
    (before,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([before ^ 1]), at)


def test_expired_tickets_are_renewed_on_the_way(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender]
) -> None:
    block = an_id()
    directory.allocate(block, MIB, two[0])
    directory.ticket_ms = 0  # every ticket is out of date when it is shown, until one is not

    class Later:
        def __init__(self) -> None:
            self.calls = 0

        def find_block(self, *, block_id: str) -> dict[str, object]:
            self.calls += 1
            directory.ticket_ms = 60_000 if self.calls >= 3 else 0
            return directory.find_block(block_id=block_id)

    later = Later()
    patient = BlockClient(later, retry_seconds=10)
    patient.write(block, b"there")
    assert patient.read(block, 5) == b"there"
    assert later.calls == 3
    patient.close()
    two[0].free(f"{block}:1")


def test_a_deallocated_block_is_not_found(directory: FakeDirectory, blocks: BlockClient, two: list[Lender]) -> None:
    block = an_id()
    directory.allocate(block, MIB, two[0])
    blocks.write(block, b"x")
    two[0].free(f"{block}:1")
    del directory.blocks[block]
    with pytest.raises(NotFound):
        blocks.read(block, 1)


# ---------------------------------------------------------------------- against a model, with faults


@pytest.mark.parametrize("seed", range(3))
def test_any_story_of_reads_writes_moves_and_faults_ends_as_the_model(
    directory: FakeDirectory, blocks: BlockClient, two: list[Lender], seed: int
) -> None:
    luck = random.Random(seed)
    directory.use_path = seed % 2 == 0
    block = an_id()
    size = luck.choice([100, CHUNK_BYTES, 3 * CHUNK_BYTES + 1234])
    directory.allocate(block, size, two[0])
    model = bytearray(size)
    at_now = 0
    for _ in range(120):
        deed = luck.choices(["write", "read", "many", "move", "kill", "cut", "free"], [40, 30, 10, 4, 3, 6, 2], k=1)[0]
        offset = luck.randrange(size)
        length = luck.choice([1, min(size - offset, 5000), size - offset])
        length = max(1, min(length, size - offset))
        if deed == "write":
            data = luck.randbytes(length)
            blocks.write(block, data, offset)
            model[offset : offset + length] = data
        elif deed == "read":
            assert blocks.read(block, length, offset) == model[offset : offset + length]
        elif deed == "many":
            asks = [(luck.randrange(size), luck.randbytes(1)) for _ in range(20)]
            blocks.write_many([(block, data, at) for at, data in asks])
            for at, data in asks:
                model[at : at + 1] = data
            found = blocks.read_many([(block, min(50, size - at), at) for at, _ in asks])
            assert found == [model[at : at + min(50, size - at)] for at, _ in asks]
        elif deed == "move":
            at_now = 1 - at_now
            assert not directory.move(block, two[at_now]).problem
        elif deed == "kill":
            luck.choice(two).kill_server()
        elif deed == "cut":
            for channels in blocks._pool._idle.values():
                for channel in channels:
                    with contextlib.suppress(OSError):
                        channel.sock.shutdown(socket.SHUT_RDWR)
        else:
            lender, copy, _ = directory.blocks[block]["places"][0]
            lender.free(copy)
            block = an_id()
            directory.allocate(block, size, two[at_now])
            model = bytearray(size)
    assert blocks.read(block, size) == model
    lender, copy, _ = directory.blocks[block]["places"][0]
    lender.free(copy)
    assert [wait_for(lambda one=one: one.served).copies for one in two] == [(), ()]
