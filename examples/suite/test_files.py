"""Part of the suite that `examples/distributed_tests.py` spreads over workers."""

from __future__ import annotations

import hashlib
import tempfile
import unittest
from pathlib import Path


class FilesTest(unittest.TestCase):
    def test_a_file_is_read_as_it_was_written(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "blob")
            data = bytes(range(256)) * 16_384
            path.write_bytes(data)
            self.assertEqual(hashlib.sha256(path.read_bytes()).digest(), hashlib.sha256(data).digest())


if __name__ == "__main__":
    unittest.main()
