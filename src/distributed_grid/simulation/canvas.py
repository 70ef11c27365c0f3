"""A small picture made of dots: lines, letters, and a PNG file in the end. Enough for a chart, nothing to install."""

from __future__ import annotations

import struct
import zlib

import numpy as np

Colour = tuple[int, int, int]
WIDE, HIGH = 5, 7
# A letter is seven rows of five dots, each row one digit of base 32. Capitals are drawn small.
# fmt: off
_LETTERS = {
    "0": "ehjlphe", "1": "4c4444e", "2": "eh168gv", "3": "u11e11u", "4": "26aiv22", "5": "vgu11he", "6": "68guhhe",
    "7": "v124888", "8": "ehhehhe", "9": "ehhf12c", "a": "00e1fhf", "b": "ggmphhu", "c": "00egghe", "d": "11djhhf",
    "e": "00ehvge", "f": "698s888", "g": "0fhhf1e", "h": "ggmphhh", "i": "40c444e", "j": "20622ic", "k": "ggikoki",
    "l": "c44444e", "m": "00qllll", "n": "00mphhh", "o": "00ehhhe", "p": "0uhhugg", "q": "0fhhf11", "r": "00mpggg",
    "s": "00fge1u", "t": "88s8896", "u": "00hhhjd", "v": "00hhha4", "w": "00hhlla", "x": "00ha4ah", "y": "0hhf1he",
    "z": "00v248v", "_": "000000v", "-": "000v000", ".": "00000cc", ",": "0000c48", "%": "op248j3", "/": "01248g0",
    "(": "2488842", ")": "8422248", ":": "0cc0cc0",
}
# fmt: on
_LOW = "gpqy,"
"""These reach a row below the others."""
BLACK, GREY, PALE = (30, 30, 30), (130, 130, 130), (228, 228, 228)


class Canvas:
    """White paper of so many dots; (0, 0) is its upper left corner. What falls beside it is not drawn."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = np.full((height, width, 3), 255, dtype=np.uint8)

    def box(self, left: int, top: int, right: int, bottom: int, colour: Colour) -> None:
        """A filled rectangle, its edges included."""
        self._dots[max(top, 0) : max(bottom + 1, 0), max(left, 0) : max(right + 1, 0)] = colour

    def trace(self, left: int, heights: list[int], colour: Colour) -> None:
        """A line through one height in each column, two dots thick."""
        before = heights[0] if heights else 0
        for place, height in enumerate(heights):
            self.box(left + place, min(before, height), left + place, max(before, height) + 1, colour)
            before = height

    def write(self, left: int, top: int, text: str, colour: Colour = BLACK, *, scale: int = 2) -> None:
        """Letters from there to the right; one that is not known leaves a gap."""
        for place, letter in enumerate(text.lower()):
            for row, digit in enumerate(_LETTERS.get(letter, "")):
                for column in range(WIDE):
                    if int(digit, 32) >> (WIDE - 1 - column) & 1:
                        x, y = left + scale * (place * (WIDE + 1) + column), top + scale * (row + (letter in _LOW))
                        self.box(x, y, x + scale - 1, y + scale - 1, colour)

    def png(self) -> bytes:
        """The picture as a file."""
        lines = b"".join(b"\0" + row.tobytes() for row in self._dots)
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*parts, strict=True)))


def width_of(text: str, scale: int = 2) -> int:
    """How wide a text is, in dots."""
    return scale * (WIDE + 1) * len(text)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
