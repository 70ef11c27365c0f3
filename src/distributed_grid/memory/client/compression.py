"""Whether to compress what goes over a connection: only where that is clearly quicker than sending it as it is.

Rule 1. What is known is measured: the rate of each link, and of a few chunks of the data how fast and how far they
        shrink.
Rule 2. Within one machine nothing is compressed.
Rule 3. Where nothing is known yet, data go plain, and that is how it becomes known.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final, NamedTuple

import lz4.block

from distributed_grid.errors import BadInput
from distributed_grid.memory.client.buffered_socket import SMALL
from distributed_grid.memory.client.chunks import ChunkRange
from distributed_grid.memory.client.connection import ServerConnection
from distributed_grid.memory.client.locations import CopyLocation
from distributed_grid.memory.protocol.frames import CHUNK

MEASURED_BYTES: Final = 1024 * 1024  # fewer say nothing about a link
FIRST_PIECES: Final = 16
ALL_PIECES: Final = 2**31
ROUND_SECONDS: Final = 0.2  # decided anew after about so long
PROBE_PIECES: Final = 4
CLEARLY: Final = 0.85
SAMPLES: Final = 3
PROBE_EVERY: Final = 32  # rounds of plain reading after which it is tried again whether the data shrink
WORDS: Final = ("auto", "off", "lz4")


class Sample(NamedTuple):
    """How some data take to compression: what is left of a byte, and seconds a byte for both directions."""

    ratio: float
    seconds_per_byte: float


class LinkStats:
    """What is known of the way to one server."""

    def __init__(self) -> None:
        self.plain_rate = 0.0  # bytes a second
        self.sample = Sample(1.0, 0.0)
        self.rounds_until_probe = 0

    def saw(self, wire: int, seconds: float) -> None:
        """So many bytes went through in so long."""
        if wire >= MEASURED_BYTES and seconds > 0:
            rate = wire / seconds
            self.plain_rate = rate if not self.plain_rate else 0.7 * self.plain_rate + 0.3 * rate

    def pays(self, sample: Sample) -> bool:
        """Whether data like these are clearly quicker when compressed."""
        if not self.plain_rate:
            return False
        return sample.ratio / self.plain_rate + sample.seconds_per_byte < CLEARLY / self.plain_rate


class AdaptiveCompression:
    """Moves pieces, compressed where that is quicker, and counts them."""

    def __init__(self, wanted: str) -> None:
        if wanted not in WORDS:
            raise BadInput(f"compression is one of {', '.join(WORDS)}, not {wanted!r}")
        self._wanted = wanted
        self._links: dict[str, LinkStats] = {}
        self._lock = threading.Lock()
        self._sent = self._received = self._wire_sent = self._wire_received = 0
        self._squeezed = self._squeezed_wire = 0

    def write(self, place: CopyLocation, channel: ServerConnection, pieces: deque[ChunkRange]) -> None:
        """Write all pieces; the deque has what is left when that does not work."""
        link = self._link(place.line)
        while pieces:
            some = _some(pieces, self._round_of(link, channel))
            compress = self._always(channel) or (self._asks(channel) and link.pays(_sampled(some)))
            self._round(link, channel, some, pieces, compress=compress, is_read=False)

    def read(self, place: CopyLocation, channel: ServerConnection, pieces: deque[ChunkRange]) -> None:
        """Fill all pieces; the deque has what is left when that does not work."""
        link = self._link(place.line)
        while pieces:
            always, asks = self._always(channel), self._asks(channel)
            link.rounds_until_probe -= 1
            probe = asks and link.plain_rate > 0 and link.rounds_until_probe < 0 and len(pieces[0].view) > SMALL
            some = _some(pieces, PROBE_PIECES if probe else self._round_of(link, channel))
            if probe:
                link.rounds_until_probe = PROBE_EVERY
            compress = always or probe or (asks and link.pays(link.sample))
            tried = list(some)
            self._round(link, channel, some, pieces, compress=compress, is_read=True)
            if probe:
                link.sample = _sampled(tried)

    def _round(
        self,
        link: LinkStats,
        channel: ServerConnection,
        some: deque[ChunkRange],
        pieces: deque[ChunkRange],
        *,
        compress: bool,
        is_read: bool,
    ) -> None:
        size = sum(len(piece.view) for piece in some)
        before = channel.wire_received if is_read else channel.wire_sent
        began = time.perf_counter()
        try:
            if is_read:
                channel.read(some, compress=compress)
            else:
                channel.write(some, compress=compress)
        finally:
            pieces.extendleft(reversed(some))
        wire = (channel.wire_received if is_read else channel.wire_sent) - before
        if not compress:
            link.saw(wire, time.perf_counter() - began)
        self._count(size, wire, compress=compress, is_read=is_read)

    def _round_of(self, link: LinkStats, channel: ServerConnection) -> int:
        """How many pieces to decide about at once: between rounds a link stands still for a moment, and a fast one is
        not asked about often."""
        if not self._asks(channel):
            return ALL_PIECES
        return FIRST_PIECES if not link.plain_rate else max(FIRST_PIECES, int(link.plain_rate * ROUND_SECONDS) // CHUNK)

    def _link(self, line: str) -> LinkStats:
        with self._lock:
            return self._links.setdefault(line, LinkStats())

    def _always(self, channel: ServerConnection) -> bool:
        return self._wanted == "lz4" and not channel.is_local

    def _asks(self, channel: ServerConnection) -> bool:
        return self._wanted == "auto" and not channel.is_near

    # ------------------------------------------------------------------ numbers

    def count_small(self, size: int) -> None:
        """So many bytes were read on their own."""
        self._received += size
        self._wire_received += size

    def _count(self, size: int, wire: int, *, compress: bool, is_read: bool) -> None:
        with self._lock:
            if is_read:
                self._received += size
                self._wire_received += wire
            else:
                self._sent += size
                self._wire_sent += wire
            if compress:
                self._squeezed += size
                self._squeezed_wire += wire

    def stats(self) -> dict[str, int | float]:
        """Bytes as they are and as they travelled; `compression_ratio` is of those that were compressed."""
        return {
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "wire_bytes_sent": self._wire_sent,
            "wire_bytes_received": self._wire_received,
            "compressed_bytes": self._squeezed,
            "compressed_wire_bytes": self._squeezed_wire,
            "compression_ratio": round(self._squeezed / self._squeezed_wire, 3) if self._squeezed_wire else 1.0,
        }


def _some(pieces: deque[ChunkRange], most: int) -> deque[ChunkRange]:
    return deque(pieces.popleft() for _ in range(min(most, len(pieces))))


def _sampled(pieces: deque[ChunkRange] | list[ChunkRange]) -> Sample:
    """What a few of these show; small ones are not worth it."""
    chosen = [pieces[len(pieces) * number // SAMPLES] for number in range(min(SAMPLES, len(pieces)))]
    plain = sum(len(piece.view) for piece in chosen)
    if not chosen or len(chosen[0].view) <= SMALL:
        return Sample(1.0, 0.0)
    began = time.perf_counter()
    packed = [lz4.block.compress(piece.view, store_size=False) for piece in chosen]
    for piece, one in zip(chosen, packed, strict=True):
        lz4.block.decompress(one, uncompressed_size=len(piece.view))
    seconds = time.perf_counter() - began
    return Sample(sum(map(len, packed)) / plain, seconds / plain)
