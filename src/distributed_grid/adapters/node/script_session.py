"""Talking to the script on a node: one constant command, everything else is data on its standard input.

Rule 1: no command line is ever built from anything that somebody configured.

The script for a node that has to do with Ray: both halves as one text.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from distributed_grid.adapters.node.errors import NodeOperationFailed

ASK_SECONDS = 120.0
OPEN_SECONDS = 15.0
LONGEST_ANSWER = 1024 * 1024
CHUNK = 256 * 1024
MARK = b"\x1eGRID "
NO_PYTHON, NOT_THIS_PYTHON = 97, 98
# The first line of the input is the interpreter that the config names (or nothing), the second those to look for.
# No newline and no `!`, so that it passes every login shell unharmed.
COMMAND = (
    "exec /bin/sh -c '"
    "IFS= read -r wanted; IFS= read -r names; "
    'boot="import sys; f = sys.stdin.buffer; exec(f.read(int(f.readline())))"; '
    'case $wanted in "~/"*) wanted=$HOME/${wanted#??};; esac; '
    'if [ -n "$wanted" ]; then command -v "$wanted" >/dev/null || exit 98; exec "$wanted" -I -c "$boot"; fi; '
    "PATH=$PATH:/usr/local/bin:$HOME/.local/bin; "
    'for name in $names; do if "$name" -I -c "" </dev/null >/dev/null 2>&1; then exec "$name" -I -c "$boot"; fi; done; '
    "command -v python3 >/dev/null || exit 97; "
    'exec python3 -I -c "$boot"'
    "'"
)
SCRIPT = Path(__file__).with_name("node_script.py")
Say = Callable[[str], None]


def interpreters() -> list[str]:
    """The interpreters to look for, ours first: what is installed here then fits there."""
    names = [f"python{major}.{minor}" for major, minor in ((3, 13), (3, 12), (3, 11))]
    ours = "python{}.{}".format(*sys.version_info[:2])
    return [ours, *(name for name in names if name != ours)]


class ScriptSession(Protocol):
    """A conversation with the script on a node, by whichever way."""

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        """The answer to one request; raises Failed with the node's own words."""


class FileScriptSession(ScriptSession, Protocol):
    """A script session that large files can be sent along in."""

    async def ask_with_files(
        self, do: str, files: Sequence[Path], *, say: Say, seconds: float, request: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer to a request that large files go with, sent piece by piece; how far that is gets told."""


def request_of(do: str, grid: str, node: str, request: dict[str, Any]) -> bytes:
    """A request as the script reads it."""
    body = json.dumps({"do": do, "grid": grid, "node": node, **request}).encode()
    return b"%d\n" % len(body) + body


def answer_in(line: bytes, say: Say) -> dict[str, Any] | None:
    """The script's answer in a line it wrote; None where that is a step, which is told, or only login noise."""
    if not line.startswith(MARK) or len(line) > LONGEST_ANSWER:
        return None
    message: dict[str, Any] = json.loads(line[len(MARK) :])
    if "done" in message:
        answer: dict[str, Any] = message["done"]
        return answer
    if "failed" in message:
        raise NodeOperationFailed(str(message["failed"]))
    say(str(message.get("step", "")))
    return None


DEEDS = ("ray-look", "ray-start", "ray-stop", "address", "ray-install")
"""What is asked of the second half."""
_OURS = re.compile(r"^from distributed_grid\.adapters\.node\.node_script import \(.*?^\)\n", re.MULTILINE | re.DOTALL)
_START = '\n\nif __name__ == "__main__":\n'


@functools.cache
def ray_script() -> bytes:
    """`node_script.py` with `node_script_ray.py` before its last lines, which start it."""
    first, start, last = SCRIPT.read_text().partition(_START)
    second = _OURS.sub("", SCRIPT.with_name("node_script_ray.py").read_text(), count=1)
    return f"{first}\n\n{second}{start}{last}".encode()
