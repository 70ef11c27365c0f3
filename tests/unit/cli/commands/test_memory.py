"""Sizes as people write them, and blocks as they are shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from distributed_grid.cli.commands.memory import created_text, find_block, list_text, stats_text
from distributed_grid.cli.memory_transfer import ProgressBar
from distributed_grid.errors import Ambiguous, NotFound
from tests.support.records import records

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def a_block(block_id: str = "ab12" * 8, **fields: Any) -> Any:
    fields = {
        "block_id": block_id,
        "name": "",
        "size": 5 * 1024**3,
        "state": "ready",
        "copies": 1,
        "nodes": ["gpu2"],
        "on_disk": False,
        "expires_at": "2026-05-01T13:00:00.000Z",
        "meta": "",
        "detail": "",
        **fields,
    }
    return records(fields)


def test_blocks_are_listed_with_their_places_state_and_time() -> None:
    rows = [
        a_block(),
        a_block("cd34" * 8, name="k\x1b", nodes=["gpu1"], on_disk=True, copies=2, state="moving"),
        a_block("ef56" * 8, state="lost", detail="lost with gpu1", nodes=[], meta='{"length": 0}'),
    ]
    assert list_text(rows, NOW).splitlines() == [
        "ID        KEY    SIZE     NODES       COPIES  STATE                 EXPIRES IN",
        "ab12ab12  -      5 GB     gpu2        1       ready                 60 min",
        "cd34cd34  k\\x1b  5 GB     gpu1, disk  2       moving                60 min",
        "ef56ef56  -      0 bytes  -           1       lost: lost with gpu1  60 min",
    ]
    assert list_text([], NOW) == "no blocks"
    assert created_text(a_block(name="k")).startswith(f"block {'ab12' * 8}\n5 GB on gpu2 as k, until ")


def test_stats_tell_what_is_held_in_all_and_by_each_node() -> None:
    node = {"node": "gpu1", "blocks": 1, "bytes": 1024, "free_bytes": 1024**3, "serving": True, "address": "10.0.0.1:9"}
    idle = {**node, "node": "gpu2", "blocks": 0, "bytes": 0, "serving": False, "address": ""}
    found = {"blocks": 2, "bytes": 2048, "bytes_on_disk": 1024, "moving": 1, "lost": 0, "nodes": [node, idle]}
    assert stats_text(records(found)).splitlines() == [
        "2 blocks, 2 KB, 1 KB on disk, 1 moving",
        "",
        "NODE  BLOCKS  HELD     STILL LENDS  MEMORY SERVER",
        "gpu1  1       1 KB     1 GB         10.0.0.1:9",
        "gpu2  0       0 bytes  1 GB         not used yet",
    ]


def test_a_block_is_found_by_its_key_first_then_by_its_id_and_then_by_a_prefix() -> None:
    blocks = [a_block("aa" * 16, name="ab"), a_block("ab" * 16), a_block("ac" * 16)]
    assert find_block(blocks, "ab") is blocks[0]
    assert find_block(blocks, "ab" * 16) is blocks[1]
    assert find_block(blocks, "acac") is blocks[2]
    with pytest.raises(Ambiguous, match="fits several"):
        find_block([a_block("abcd1"), a_block("abcd2")], "abcd")
    for nothing in ("", "a", "aca", "zzzz"):
        with pytest.raises(NotFound):
            find_block(blocks, nothing)


def test_the_bar_shows_how_far_it_is() -> None:
    bar = ProgressBar("storing k", 4 * 1024**2)
    assert bar.line(1024**2, 0.5) == "storing k: [#######.......................] 1 MB of 4 MB, 2 MB/s"
    assert ProgressBar("reading", 0).line(2048, 1.0) == "reading: 2 KB, 2 KB/s"
