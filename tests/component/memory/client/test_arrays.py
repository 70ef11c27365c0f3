"""Remote arrays in a real memory server: random scripts of reads and assignments agree with NumPy."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from distributed_grid.memory.client.arrays import RemoteArray
from distributed_grid.memory.client.block_client import BlockClient
from tests.component.memory.memory_servers import FakeDirectory, lenders

TYPES = ("u1", "<i2", "<f4", "<f8", "<c16")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeDirectory, BlockClient, list[Any]]]:
    folder = tmp_path_factory.mktemp("lenders")
    with lenders(folder / "one", folder / "two") as found:
        directory = FakeDirectory()
        blocks = BlockClient(directory)
        yield directory, blocks, found
        blocks.close()


def some_index(random_: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Any basic index of this shape."""
    words: list[Any] = []
    for size in shape:
        if size and random_.random() < 0.25:
            words.append(random_.randrange(-size, size))
            continue
        ends = [None, *range(-size - 1, size + 2)] if size < 20 else [None, 0, 1, size // 3, -size // 4, size]
        words.append(slice(random_.choice(ends), random_.choice(ends), random_.choice([None, 1, 1, 2, 3, 7, -1, -3])))
    kept = random_.randrange(len(shape) + 1)
    return (*words[:kept], ...) if random_.random() < 0.5 else tuple(words[:kept])


@pytest.mark.parametrize("seed", range(12))
def test_a_random_script_of_reads_and_assignments_agrees_with_numpy(
    served: tuple[FakeDirectory, BlockClient, list[Any]], seed: int
) -> None:
    directory, blocks, found = served
    random_ = random.Random(seed)
    shapes = [(90, 120), (3, 4, 5, 6), (9_000,), (20, 3, 1000), (17, 1, 9), (0, 4), ()]
    shape, kind = shapes[seed % len(shapes)], TYPES[seed % len(TYPES)]
    name = f"array{seed}"
    model = np.zeros(shape, kind)
    directory.allocate(name, max(model.nbytes, 1), *found[: 1 + seed % 2])
    remote = RemoteArray(blocks, name, shape, kind)
    rng = np.random.default_rng(seed)
    for _ in range(25):
        index = some_index(random_, shape)
        if random_.random() < 0.5:
            value = (rng.random(model[index].shape) * 100).astype(random_.choice(["<f8", kind]))
            with np.errstate(all="ignore"):
                model[index] = value
                remote[index] = value
        else:
            assert np.array_equal(remote[index], model[index])
    assert np.array_equal(np.asarray(remote), model)
    if shape:
        assert np.array_equal(np.array(list(remote), kind).reshape(shape), model)


def test_reading_goes_on_while_the_array_moves(served: tuple[FakeDirectory, BlockClient, list[Any]]) -> None:
    directory, blocks, (one, two) = served
    model = np.random.default_rng(1).random((600, 4000))
    directory.allocate("moving", model.nbytes, one)
    remote = RemoteArray(blocks, "moving", model.shape, model.dtype)
    remote[...] = model
    chunks = remote.chunks(rows=100)
    first = next(chunks)
    assert directory.move("moving", two).problem == ""
    assert np.array_equal(np.concatenate([first, *chunks]), model)


def test_leaving_a_loop_over_chunks_ends_reading_ahead(
    served: tuple[FakeDirectory, BlockClient, list[Any]],
) -> None:
    directory, blocks, (one, _) = served
    directory.allocate("left", 80_000, one)
    remote = RemoteArray(blocks, "left", (100, 100), "<f8")
    for chunk in remote.chunks(rows=10):
        assert not chunk.any()
        break
    del chunk
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("remote-array")]
