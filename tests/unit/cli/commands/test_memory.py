"""Sizes as people write them, and blocks as they are shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.cli.commands.memory import created_text, find_block, list_text, stats_text
from distributed_grid.cli.memory_transfer import ProgressBar
from distributed_grid.cli.output import MAX_BLOCK_BYTES, format_size, format_span, parse_seconds, parse_size
from distributed_grid.errors import Ambiguous, BadInput, NotFound

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def a_block(block_id: str = "ab12" * 8, **fields: Any) -> dict[str, Any]:
    return {
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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1", 1),
        ("5GB", 5 * 1024**3),
        ("5 gb", 5 * 1024**3),
        ("512MB", 512 * 1024**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("2k", 2048),
        ("7B", 7),
        ("1T", 1024**4),
        ("70368744177664", MAX_BLOCK_BYTES),
    ],
)
def test_a_size_means_what_people_mean_by_it(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "5XB", "GB", "nan", "inf", "1e9", "9" * 400, "65TB", "1,5GB"])
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadInput) as no:
        parse_size(text)
    assert len(str(no.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_seconds(text)


@given(st.integers(1, MAX_BLOCK_BYTES))
def test_a_size_that_is_shown_is_about_the_size_it_stands_for(size: int) -> None:
    shown = format_size(size)
    assert abs(parse_size(shown.replace(" bytes", "").replace(" byte", "")) - size) <= size / 1000


def test_sizes_and_times_are_shown_in_one_unit() -> None:
    assert [format_size(size) for size in (0, 1, 1023, 1024, 1536 * 1024**2)] == [
        "0 bytes",
        "1 byte",
        "1023 bytes",
        "1 KB",
        "1.5 GB",
    ]
    assert [format_span(seconds) for seconds in (-5, 59.6, 119, 3600, 86400, 200_000)] == [
        "0 s",
        "60 s",
        "119 s",
        "60 min",
        "24 h",
        "2 d",
    ]


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
    assert stats_text(found).splitlines() == [
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
    assert find_block(blocks, "ac") is blocks[2]
    with pytest.raises(Ambiguous, match="fits several"):
        find_block(blocks, "a")
    for nothing in ("", "zz"):
        with pytest.raises(NotFound):
            find_block(blocks, nothing)


def test_the_bar_shows_how_far_it_is() -> None:
    bar = ProgressBar("storing k", 4 * 1024**2)
    assert bar.line(1024**2, 0.5) == "storing k: [#######.......................] 1 MB of 4 MB, 2 MB/s"
    assert ProgressBar("reading", 0).line(2048, 1.0) == "reading: 2 KB, 2 KB/s"
