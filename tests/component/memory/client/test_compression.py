"""Compression: used where a link is slow and data shrink, and nowhere else."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.client.compression import LinkStats, Sample
from tests.component.memory.memory_servers import FakeDirectory, Lender, lenders

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lender]:
    with lenders(tmp_path_factory.mktemp("memory"), host="127.0.0.2") as (one,):
        yield one


class SlowRelay:
    """A link that carries so many bytes a second in each direction."""

    def __init__(self, to: tuple[str, int], bytes_a_second: int) -> None:
        self._to = to
        self._rate = bytes_a_second
        self._listener = socket.create_server(("127.0.0.3", 0))
        self.at = self._listener.getsockname()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._to)
            self._sockets += [ours, theirs]
            for pair in ((ours, theirs), (theirs, ours)):
                for one in pair:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
                self._threads.append(threading.Thread(target=self._carry, args=pair, daemon=True))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        free_at = time.monotonic()
        try:
            while data := source.recv(64 * 1024):
                free_at = max(free_at, time.monotonic()) + len(data) / self._rate
                time.sleep(max(0.0, free_at - time.monotonic()))
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture
def directory(lender: Lender) -> Iterator[FakeDirectory]:
    relay = SlowRelay((lender.served.endpoint.host, lender.served.endpoint.port), 40 * MIB)
    directory = FakeDirectory()
    directory.use_path = False
    directory.endpoint = lambda served: (relay.at[0], relay.at[1])
    yield directory
    relay.close()


def through(
    directory: FakeDirectory, lender: Lender, name: str, data: bytes, compression: str
) -> dict[str, int | float]:
    blocks = BlockClient(directory, compression=compression, retry_seconds=30)
    size = len(data)
    directory.allocate(name, 3 * size, lender)
    for number in range(3):
        blocks.write(name, data, number * size)
    for number in range(3):
        assert blocks.read(name, size, number * size) == data
    assert blocks.read(name, 100, 7) == data[7:107]
    blocks.close()
    lender.free(f"{name}:1")
    return blocks.stats()


def test_what_shrinks_is_compressed_on_a_slow_link(directory: FakeDirectory, lender: Lender) -> None:
    stats = through(directory, lender, "soft", b"the same words again and again, " * (8 * MIB // 32), "auto")
    assert stats["wire_bytes_sent"] < 0.7 * stats["bytes_sent"]
    assert stats["wire_bytes_received"] < 0.7 * stats["bytes_received"]
    assert stats["compression_ratio"] > 5


def test_dense_data_go_plain_on_the_same_link(directory: FakeDirectory, lender: Lender) -> None:
    stats = through(directory, lender, "dense", os.urandom(4 * MIB), "auto")
    assert stats["wire_bytes_sent"] == stats["bytes_sent"]
    assert stats["compressed_bytes"] <= 0.1 * (stats["bytes_sent"] + stats["bytes_received"]), "only a probe may try"


def test_off_is_off_and_lz4_is_always(lender: Lender) -> None:
    directory = FakeDirectory()
    directory.use_path = False
    soft = bytes(range(256)) * 4096
    off = through(directory, lender, "off", soft, "off")
    assert off["wire_bytes_sent"] == off["bytes_sent"]
    always = through(directory, lender, "always", soft, "lz4")
    assert always["wire_bytes_sent"] < always["bytes_sent"] / 10
    dense = through(directory, lender, "no-shrink", os.urandom(MIB), "lz4")
    assert dense["wire_bytes_sent"] == dense["bytes_sent"], "a chunk that does not shrink goes plain"


def test_within_one_machine_nothing_is_compressed(lender: Lender) -> None:
    for path in (True, False):
        directory = FakeDirectory()
        directory.use_path = path
        directory.endpoint = lambda served: (served.endpoint.host, served.endpoint.port)
        stats = through(directory, lender, f"near-{path}", b"soft" * MIB, "auto" if path else "off")
        assert stats["wire_bytes_sent"] == stats["bytes_sent"]


def test_lz4_is_obeyed_within_one_machine_too(lender: Lender) -> None:
    for path in (True, False):
        directory = FakeDirectory()
        directory.use_path = path
        directory.endpoint = lambda served: (served.endpoint.host, served.endpoint.port)
        stats = through(directory, lender, f"forced-{path}", b"soft" * MIB, "lz4")
        assert stats["wire_bytes_sent"] < stats["bytes_sent"] / 10
        assert stats["wire_bytes_received"] < stats["bytes_received"] / 10


def test_another_word_is_refused() -> None:
    with pytest.raises(BadInput, match="zip"):
        BlockClient(FakeDirectory(), compression="zip")


@pytest.mark.parametrize(
    ("rate", "ratio", "seconds_per_byte", "pays"),
    [
        (0, 0.1, 1e-10, False),  # nothing is known of the link yet
        (50e6, 0.3, 2e-9, True),
        (50e6, 0.99, 2e-9, False),
        (2e9, 0.3, 2e-9, False),  # the link is quicker than the compressor
        (50e6, 0.8, 2e-9, False),  # not clearly
    ],
)
def test_it_pays_only_where_the_sum_is_clearly_smaller(
    rate: float, ratio: float, seconds_per_byte: float, pays: bool
) -> None:
    link = LinkStats()
    link.plain_rate = rate
    assert link.pays(Sample(ratio, seconds_per_byte)) is pays
