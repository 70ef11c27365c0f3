"""Part of the suite that `examples/distributed_tests.py` spreads over workers."""

from __future__ import annotations

import unittest


class MemoryTest(unittest.TestCase):
    def test_a_large_buffer_holds_what_is_written(self) -> None:
        buffer = bytearray(96 * 1024 * 1024)
        for at in range(0, len(buffer), 4096):
            buffer[at] = at % 251
        self.assertTrue(all(buffer[at] == at % 251 for at in range(0, len(buffer), 4096)))


if __name__ == "__main__":
    unittest.main()
