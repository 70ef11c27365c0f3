"""From the name of a file to the trace in it: compressed or not, whatever its format."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from distributed_grid.domain.nodes import Node
from distributed_grid.errors import BadInput
from distributed_grid.simulation.traces.event_log import read_events
from distributed_grid.simulation.traces.openb import read_nodes, read_pods
from distributed_grid.simulation.traces.swf import read_swf
from distributed_grid.simulation.traces.trace import Trace

GZIP = b"\x1f\x8b"
NODE_LISTS = "*node_list*.csv*"


def read_trace(source: str) -> Trace:
    """The trace in a file, or on the standard input (`-`); its format is told by its content, not by its name."""
    name = "standard input" if source == "-" else Path(source).name
    with _opened(source) as file:
        try:
            lines = list(file)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise BadInput(f"{name} cannot be read: {error}") from None
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        return read_events(name, lines)
    if first.startswith("sn,"):
        raise BadInput(f"{name} is a list of nodes: the list of pods is the trace, and looks for this one beside it")
    if first.startswith("name,"):
        return read_pods(name, lines, _nodes_beside(source))
    if first.startswith(";") or first[:1].isdigit():
        return read_swf(name, lines)
    what = "it is empty" if not first else f"its first line is {first[:40]!r}"
    raise BadInput(f"{name} is no trace: {what}; there is SWF, openb pod lists and `grid events --json`")


@contextmanager
def _opened(source: str) -> Iterator[TextIO]:
    if source == "-":
        yield _text(sys.stdin.buffer)
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise BadInput(f"{source}: {error.strerror}") from None
    with file:
        yield _text(file)


def _text(file: BinaryIO) -> TextIO:
    """The lines of a file, unpacked where it is packed."""
    start = file.peek(2)[:2] if isinstance(file, io.BufferedReader) else b""
    unpacked = gzip.GzipFile(fileobj=file) if start == GZIP else file
    return io.TextIOWrapper(unpacked, encoding="utf-8", newline="")


def _nodes_beside(source: str) -> list[Node]:
    """The machines of the node list in the same folder; none where there is no single one."""
    if source == "-":
        return []
    lists = sorted(Path(source).resolve().parent.glob(NODE_LISTS))
    if len(lists) != 1:
        return []
    with _opened(str(lists[0])) as file:
        return read_nodes(lists[0].name, list(file))
