"""Reading and writing blocks through a real memory server."""

from __future__ import annotations

import mmap
import os
import random
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.errors import BadInput, NotFound
from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.client.transfer_queue import ReadBuffer
from tests.component.memory.memory_servers import FakeDirectory, Lender, lenders, wait_for

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lender]:
    with lenders(tmp_path_factory.mktemp("memory")) as (one,):
        yield one


@pytest.fixture(params=["unix", "tcp"])
def directory(request: pytest.FixtureRequest) -> FakeDirectory:
    directory = FakeDirectory()
    directory.use_path = request.param == "unix"
    return directory


@pytest.fixture
def blocks(directory: FakeDirectory) -> Iterator[BlockClient]:
    blocks = BlockClient(directory, retry_seconds=20)
    yield blocks
    blocks.close()


def a_block(directory: FakeDirectory, lender: Lender, size: int) -> str:
    block_id = f"mem-{random.getrandbits(60):x}"
    directory.allocate(block_id, size, lender)
    return block_id


@pytest.mark.parametrize("size", [1, 2, 4096, 262_144, 262_145, 3 * MIB + 17])
def test_what_is_written_is_read(directory: FakeDirectory, blocks: BlockClient, lender: Lender, size: int) -> None:
    block, data = a_block(directory, lender, size), os.urandom(size)
    blocks.write(block, data)
    assert blocks.read(block, size) == data
    buffer = bytearray(size)
    blocks.read_into(block, buffer)
    assert buffer == data
    lender.free(f"{block}:1")


def test_what_was_never_written_reads_as_zeros_and_takes_no_room(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    block = a_block(directory, lender, 200 * MIB)
    blocks.write(block, b"x", 100 * MIB)
    assert blocks.read(block, MIB, 100 * MIB - 10) == bytes(10) + b"x" + bytes(MIB - 11)
    assert blocks.read(block, 3 * MIB) == bytes(3 * MIB)
    wait_for(lambda: lender.supervisor.stats()["copies"] == 1 and 0 < lender.supervisor.resident_bytes < MIB)
    lender.free(f"{block}:1")


@pytest.mark.parametrize(("size", "offset"), [(1, 100), (101, 0), (5, -1), (50, 51), (2**50, 0)])
def test_outside_the_block_is_refused_with_numbers_and_nothing_changes(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender, size: int, offset: int
) -> None:
    block = a_block(directory, lender, 100)
    blocks.write(block, b"a" * 100)
    with pytest.raises(BadInput, match=str(size if size > 2**46 else 100)):
        blocks.read(block, size, offset)
    if size < 1000:
        with pytest.raises(BadInput, match="100"):
            blocks.write(block, b"b" * size, offset)
        with pytest.raises(BadInput, match="100"):
            blocks.write_many([(block, b"c", 0), (block, b"b" * size, offset)])
        with pytest.raises(BadInput, match="100"):
            blocks.read_many([(block, size, offset)])
    assert blocks.read(block, 100) == b"a" * 100
    with pytest.raises(BadInput, match="-1"):
        blocks.read(block, -1)
    lender.free(f"{block}:1")


def test_nothing_can_be_read_of_a_block_that_is_not_there(directory: FakeDirectory, blocks: BlockClient) -> None:
    with pytest.raises(NotFound):
        blocks.read("nowhere", 1)


def test_reading_nothing_gives_nothing(directory: FakeDirectory, blocks: BlockClient, lender: Lender) -> None:
    block = a_block(directory, lender, 100)
    assert blocks.read(block, 0, 100) == b""
    blocks.write(block, b"", 100)
    assert blocks.read_many([(block, 0, 0), (block, 1, 99)]) == [b"", b"\0"]


def test_many_small_ones_go_together_and_in_order(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    names = [a_block(directory, lender, 3000) for _ in range(3)]
    luck = random.Random(5)
    models = {name: bytearray(3000) for name in names}
    asks = [(luck.choice(names), luck.randbytes(luck.randrange(1, 90)), luck.randrange(2900)) for _ in range(700)]
    for name, data, offset in asks:
        models[name][offset : offset + len(data)] = data
    blocks.write_many(asks)
    reads = [(luck.choice(names), luck.randrange(0, 90), luck.randrange(2900)) for _ in range(700)]
    expected = [models[name][offset : offset + size] for name, size, offset in reads]
    assert blocks.read_many(reads) == expected
    lender.free(*(f"{name}:1" for name in names))


def test_any_buffer_will_do(directory: FakeDirectory, blocks: BlockClient, lender: Lender) -> None:
    block = a_block(directory, lender, 80)
    numbers = array("d", range(10))
    blocks.write(block, memoryview(numbers))
    found = array("d", bytes(80))
    blocks.read_into(block, memoryview(found))
    assert found == numbers
    with pytest.raises(BadInput, match="read-only"):
        blocks.read_into(block, bytes(5))


def test_several_streams_carry_one_transfer(directory: FakeDirectory, lender: Lender) -> None:
    blocks = BlockClient(directory, streams=4, retry_seconds=20)
    size = 40 * MIB + 3
    block, data = a_block(directory, lender, size), os.urandom(MIB) * 40 + b"end"
    blocks.write(block, data)
    assert blocks.read(block, size) == data
    assert wait_for(lambda: lender.supervisor.stats()["connections"] >= 4)
    blocks.close()
    lender.free(f"{block}:1")


def test_a_forked_child_makes_connections_of_its_own(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    block = a_block(directory, lender, 100)
    blocks.write(block, b"parent")
    child = os.fork()
    if child == 0:
        try:
            right = blocks.read(block, 6) == b"parent"
            blocks.write(block, b"child!")
        except BaseException:
            right = False
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert blocks.read(block, 6) == b"child!"
    assert blocks.stats()["retries"] == 0
    lender.free(f"{block}:1")


def test_a_block_of_this_machine_is_mapped_read_only_and_shows_what_is_written(lender: Lender) -> None:
    directory = FakeDirectory()
    blocks = BlockClient(directory, retry_seconds=20)
    block = a_block(directory, lender, 2 * MIB + 5)
    blocks.write(block, b"hello", MIB)
    view = blocks.map(block)
    assert view is not None
    assert view.readonly
    assert len(view) == 2 * MIB + 5
    assert bytes(view[MIB : MIB + 5]) == b"hello"
    blocks.write(block, b"j", MIB)
    assert bytes(view[MIB : MIB + 5]) == b"jello"
    assert blocks.map(block) is view
    fd = blocks._pool.open_descriptor(blocks._locations[block].copies[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"!")
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 10, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    lender.free(f"{block}:1")
    assert bytes(view[MIB : MIB + 5]) == b"jello", "who has it mapped keeps it"
    view.release()
    blocks.close()


def test_a_block_of_another_machine_is_not_mapped(lender: Lender) -> None:
    directory = FakeDirectory()
    directory.use_path = False
    blocks = BlockClient(directory, retry_seconds=20)
    assert blocks.map(a_block(directory, lender, MIB)) is None
    blocks.close()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 4096, 5 * MIB + 1, 40 * MIB])
def test_bytes_that_were_filled_in_place_are_bytes_like_any_other(size: int) -> None:
    buffer = ReadBuffer(size)
    content = os.urandom(size)
    buffer.view[:] = content
    made = buffer.to_bytes()
    assert made == content
    assert type(made) is bytes
    assert hash(made) == hash(content)
    assert made + b"" == content


def test_bytes_that_the_interpreter_shares_are_never_filled() -> None:
    for content in (b"", b"a"):
        buffer = ReadBuffer(len(content))
        buffer.view[:] = b"b"[: len(content)]
        assert buffer.to_bytes() == b"b"[: len(content)]
        assert bytes([97]) == b"a"
    with pytest.raises(ValueError, match="negative"):
        ReadBuffer(-1)


def test_memory_is_made_ready_as_long_as_somebody_wants_it() -> None:
    before = set(threading.enumerate())

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    start = resident()
    buffer = ReadBuffer(128 * MIB)
    wait_for(lambda: resident() > start + 100 * MIB)  # nobody has written to it
    wait_for(lambda: set(threading.enumerate()) <= before)
    buffer.view[:5] = b"other"
    assert buffer.to_bytes()[:5] == b"other"
    del buffer
    buffer = ReadBuffer(1024 * MIB)
    del buffer
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert resident() < start + 64 * MIB
