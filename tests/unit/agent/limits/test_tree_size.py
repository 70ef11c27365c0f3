"""Size of a tree on disk, counted a few entries at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.agent.execution.disk_guard import BLOCK_BYTES, ENTRY_BYTES, MAX_DEPTH, TreeSize


def on_disk(*paths: Path) -> int:
    return sum(ENTRY_BYTES + path.lstat().st_blocks * BLOCK_BYTES for path in paths)


def counted(tree: TreeSize, entries: int = 1000) -> int:
    """The size after a whole pass in steps of so many entries."""
    for _ in range(100_000):
        if tree.count(entries):
            return tree.size_bytes
    raise AssertionError("the pass has no end")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.mark.parametrize("entries", [1, 2, 7, 1000])
def test_a_tree_has_the_same_size_however_it_is_counted(root: Path, entries: int) -> None:
    for name in ("a", "a/b", "a/b/c", "d"):
        (root / name).mkdir()
    (root / "a/b/c/file").write_bytes(bytes(100_000))
    (root / "d/other").write_bytes(b"x")
    (root / "empty").touch()
    assert counted(TreeSize(str(root)), entries) == on_disk(*root.rglob("*"))


def test_one_step_looks_at_no_more_entries_than_it_may(root: Path) -> None:
    for number in range(50):
        (root / str(number)).touch()
    tree = TreeSize(str(root))
    assert not tree.count(10)
    assert tree.is_under_way
    assert tree.known_bytes == 10 * ENTRY_BYTES
    assert not tree.count(40), "the end of a directory is a step, too"
    assert tree.count(1)
    assert (tree.passes, tree.size_bytes) == (1, 50 * ENTRY_BYTES)


def test_links_are_not_followed_and_a_file_of_two_names_counts_once(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/large").write_bytes(bytes(1_000_000))
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "own").write_bytes(bytes(200_000))
    os.link(root / "own", root / "again")
    assert counted(TreeSize(str(root))) == on_disk(root / "link", root / "own")


def test_names_beyond_those_that_are_remembered_count_for_their_part(root: Path) -> None:
    (root / "own").write_bytes(bytes(200_000))
    os.link(root / "own", root / "again")
    assert counted(TreeSize(str(root), max_linked=0)) == on_disk(root / "own") // 2 * 2


def test_names_apart_are_summed_apart_at_the_top_only(root: Path) -> None:
    (root / "stdout").write_bytes(bytes(50_000))
    (root / "work").mkdir()
    (root / "work/stdout").write_bytes(bytes(70_000))
    tree = TreeSize(str(root), frozenset({"stdout"}))
    assert counted(tree) == on_disk(root / "work", root / "work/stdout")
    assert tree.apart_bytes == on_disk(root / "stdout")
    assert tree.known_total_bytes == on_disk(*root.rglob("*"))


def test_a_directory_that_is_gone_has_no_size(root: Path) -> None:
    (root / "file").write_bytes(bytes(100_000))
    tree = TreeSize(str(root))
    assert counted(tree) > 0
    (root / "file").unlink()
    root.rmdir()
    assert counted(tree) == 0


def test_a_directory_that_becomes_a_link_while_it_is_counted_is_not_entered(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/large").write_bytes(bytes(1_000_000))
    (root / "work").symlink_to(tmp_path / "outside")
    assert counted(TreeSize(str(root / "work"))) == 0


def test_a_tree_of_any_depth_keeps_few_descriptors_open(root: Path) -> None:
    at = root
    for _ in range(3 * MAX_DEPTH):
        at = at / "d"
        at.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    tree, most = TreeSize(str(root)), 0
    while not tree.count(1):
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    assert MAX_DEPTH <= most <= 2 * MAX_DEPTH
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_ends_a_pass_and_the_next_one_begins_anew(root: Path) -> None:
    for number in range(10):
        (root / str(number)).touch()
    tree = TreeSize(str(root))
    tree.count(3)
    tree.close()
    tree.close()
    assert not tree.is_under_way
    assert counted(tree) == 10 * ENTRY_BYTES
