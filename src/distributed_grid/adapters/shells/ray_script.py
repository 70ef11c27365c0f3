"""The script for a node that has to do with Ray: both halves as one text."""

from __future__ import annotations

import functools
import re

from distributed_grid.adapters.shells.remote import SCRIPT

DEEDS = ("ray-look", "ray-start", "ray-stop", "address", "ray-install")
"""What is asked of the second half."""
_OURS = re.compile(r"^from distributed_grid\.adapters\.shells\.on_node import \(.*?^\)\n", re.MULTILINE | re.DOTALL)
_START = '\n\nif __name__ == "__main__":\n'


@functools.cache
def ray_script() -> bytes:
    """`on_node.py` with `on_node_ray.py` before its last lines, which start it."""
    first, start, last = SCRIPT.read_text().partition(_START)
    second = _OURS.sub("", SCRIPT.with_name("on_node_ray.py").read_text(), count=1)
    return f"{first}\n\n{second}{start}{last}".encode()
