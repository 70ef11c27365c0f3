"""Part of the suite that `examples/distributed_tests.py` spreads over workers."""

from __future__ import annotations

import json
import unittest
import zlib


class TextTest(unittest.TestCase):
    def test_what_is_compressed_comes_back(self) -> None:
        text = b"idle machines lend, owners come first. " * 50_000
        self.assertEqual(zlib.decompress(zlib.compress(text, 9)), text)

    def test_json_keeps_what_it_is_given(self) -> None:
        rows = [{"row": number, "name": f"worker-{number}"} for number in range(20_000)]
        self.assertEqual(json.loads(json.dumps(rows)), rows)


if __name__ == "__main__":
    unittest.main()
