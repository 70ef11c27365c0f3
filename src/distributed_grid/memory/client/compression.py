"""Adaptive compression of transfers: LZ4 only where that is clearly quicker than sending plain data.

Decided by measurement: the rate of each link, and how fast and how far a few chunks of the data shrink. Where nothing
is measured yet, data are sent plain, which measures the link. Within one machine nothing is compressed, unless the
program asks for `lz4`.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

import lz4.block

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.connection_pool import CopyLocation
from distributed_grid.memory.client.server_connection import ServerConnection
from distributed_grid.memory.client.transfer_queue import SMALL_BYTES, TransferQueue
from distributed_grid.memory.protocol.frames import CHUNK_BYTES

MIN_MEASURED_BYTES: Final = 1024 * 1024  # fewer say nothing about a link
FIRST_RANGES: Final = 16
ALL_RANGES: Final = 2**31
ROUND_SECONDS: Final = 0.2  # time between two decisions
PROBE_RANGES: Final = 4
CLEAR_GAIN: Final = 0.85
SAMPLES: Final = 3
PROBE_EVERY: Final = 32  # rounds of plain reading after which the data are sampled again
MODES: Final = ("auto", "off", "lz4")


class Sample(NamedTuple):
    """How well some data compress: compressed bytes per byte, and seconds per byte for both directions."""

    ratio: float
    seconds_per_byte: float


class LinkStats:
    """Measurements of the link to one server."""

    def __init__(self) -> None:
        self.plain_rate = 0.0  # bytes a second
        self.sample = Sample(1.0, 0.0)
        self.rounds_until_probe = 0

    def record(self, wire: int, seconds: float) -> None:
        if wire >= MIN_MEASURED_BYTES and seconds > 0:
            rate = wire / seconds
            self.plain_rate = rate if not self.plain_rate else 0.7 * self.plain_rate + 0.3 * rate

    def pays(self, sample: Sample) -> bool:
        """True if such data are clearly quicker when compressed."""
        if not self.plain_rate:
            return False
        return sample.ratio / self.plain_rate + sample.seconds_per_byte < CLEAR_GAIN / self.plain_rate


class AdaptiveCompression:
    """Moves transfer queues in rounds, each compressed where that is quicker, and counts the bytes."""

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise BadInput(f"compression is one of {', '.join(MODES)}, not {mode!r}")
        self._mode = mode
        self._is_forced = mode == "lz4"
        self._links: dict[str, LinkStats] = {}
        self._lock = threading.Lock()
        self._sent = self._received = self._wire_sent = self._wire_received = 0
        self._compressed = self._compressed_wire = 0

    def write(self, location: CopyLocation, connection: ServerConnection, queue: TransferQueue) -> None:
        """Write all of the queue; it has what is left when that fails."""
        link = self._link(location.server_key)
        while queue:
            batch = queue.take_batch(self._round_size(link, connection))
            compress = self._is_forced or (
                self._is_adaptive(connection) and link.pays(_measure(batch.samples(SAMPLES)))
            )
            self._run_round(link, connection, batch, queue, compress=compress, is_read=False)

    def read(self, location: CopyLocation, connection: ServerConnection, queue: TransferQueue) -> None:
        """Fill all of the queue; it has what is left when that fails."""
        link = self._link(location.server_key)
        while queue:
            is_adaptive = self._is_adaptive(connection)
            link.rounds_until_probe -= 1
            probe = is_adaptive and link.plain_rate > 0 and link.rounds_until_probe < 0 and not queue.has_small_ranges
            batch = queue.take_batch(PROBE_RANGES if probe else self._round_size(link, connection))
            samples = batch.samples(SAMPLES) if probe else []
            if probe:
                link.rounds_until_probe = PROBE_EVERY
            compress = self._is_forced or probe or (is_adaptive and link.pays(link.sample))
            self._run_round(link, connection, batch, queue, compress=compress, is_read=True)
            if probe:
                link.sample = _measure(samples)

    def _run_round(
        self,
        link: LinkStats,
        connection: ServerConnection,
        batch: TransferQueue,
        queue: TransferQueue,
        *,
        compress: bool,
        is_read: bool,
    ) -> None:
        size = batch.total_bytes
        before = connection.wire_received if is_read else connection.wire_sent
        began = time.perf_counter()
        try:
            if is_read:
                connection.read(batch, compress=compress)
            else:
                connection.write(batch, compress=compress)
        finally:
            queue.give_back(batch)
        wire = (connection.wire_received if is_read else connection.wire_sent) - before
        if not compress:
            link.record(wire, time.perf_counter() - began)
        with self._lock:
            if is_read:
                self._received += size
                self._wire_received += wire
            else:
                self._sent += size
                self._wire_sent += wire
            if compress:
                self._compressed += size
                self._compressed_wire += wire

    def _round_size(self, link: LinkStats, connection: ServerConnection) -> int:
        """Number of ranges per decision: between rounds a link is idle for a moment, so a fast one gets long rounds."""
        if not self._is_adaptive(connection):
            return ALL_RANGES
        if not link.plain_rate:
            return FIRST_RANGES
        return max(FIRST_RANGES, int(link.plain_rate * ROUND_SECONDS) // CHUNK_BYTES)

    def _link(self, server_key: str) -> LinkStats:
        with self._lock:
            return self._links.setdefault(server_key, LinkStats())

    def _is_adaptive(self, connection: ServerConnection) -> bool:
        return self._mode == "auto" and not connection.is_near

    # ------------------------------------------------------------------ counters

    def count_small(self, size: int) -> None:
        self._received += size
        self._wire_received += size

    def stats(self) -> dict[str, int | float]:
        """Bytes plain and on the wire; `compression_ratio` is of those that were compressed."""
        return {
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "wire_bytes_sent": self._wire_sent,
            "wire_bytes_received": self._wire_received,
            "compressed_bytes": self._compressed,
            "compressed_wire_bytes": self._compressed_wire,
            "compression_ratio": round(self._compressed / self._compressed_wire, 3) if self._compressed_wire else 1.0,
        }


def _measure(samples: list[memoryview]) -> Sample:
    """Compress and decompress these; small ones are not worth it."""
    if not samples or len(samples[0]) <= SMALL_BYTES:
        return Sample(1.0, 0.0)
    plain = sum(map(len, samples))
    began = time.perf_counter()
    packed = [lz4.block.compress(view, store_size=False) for view in samples]
    for view, block in zip(samples, packed, strict=True):
        lz4.block.decompress(block, uncompressed_size=len(view))
    seconds = time.perf_counter() - began
    return Sample(sum(map(len, packed)) / plain, seconds / plain)
