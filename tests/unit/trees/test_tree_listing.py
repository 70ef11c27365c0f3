"""A whole directory is listed as it is: nothing ignored, nothing outside, and not too much."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.errors import BadInput
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.trees.manifest import Manifest, check
from distributed_grid.trees.tree_listing import TreeListing, list_tree
from distributed_grid.trees.tree_writer import materialize


def listed(root: Path, **limits: int) -> TreeListing:
    fd = os.open(root, os.O_RDONLY)
    try:
        return list_tree(fd, str(root), **limits)
    finally:
        os.close(fd)


def test_files_directories_and_links_are_listed_whatever_their_names(tmp_path: Path, store: ContentStore) -> None:
    root = tmp_path / "tree"
    (root / "step-2" / "empty").mkdir(parents=True)
    (root / ".gridignore").write_text("*\n")
    (root / "step-2" / "model").write_bytes(b"abc")
    (root / "step-2" / "run").touch(0o700)
    (root / "latest").symlink_to("step-2")
    (root / "step-2" / "absolute").symlink_to(root / "step-2" / "model")
    os.close(os.open(os.fsencode(root) + b"/\xff\n", os.O_CREAT | os.O_WRONLY, 0o600))
    found = listed(root)
    assert found.skipped == ()
    shown = {entry.path: (entry.kind, entry.size, entry.mode, entry.target) for entry in found.entries}
    assert shown == {
        ".gridignore": ("file", 2, 0o600, ""),
        "latest": ("link", 0, 0o600, "step-2"),
        "step-2": ("dir", 0, 0o700, ""),
        "step-2/absolute": ("link", 0, 0o600, "model"),
        "step-2/empty": ("dir", 0, 0o700, ""),
        "step-2/model": ("file", 3, 0o600, ""),
        "step-2/run": ("file", 0, 0o700, ""),
        "\udcff\n": ("file", 0, 0o600, ""),
    }
    assert not list((tmp_path / "store").glob("??/*"))
    tree = Manifest(tuple(entry for entry in found.entries if entry.kind != "file"))
    check(tree)
    (tmp_path / "new").mkdir()
    materialize(tree, store, tmp_path / "new")
    assert (tmp_path / "new" / "latest" / "empty").is_dir()


def test_what_no_other_machine_can_have_is_left_out_and_named(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    os.mkfifo(root / "fifo")
    (root / "out").symlink_to("../..")
    (root / "etc").symlink_to("/etc")
    (root / "in").symlink_to("nowhere")
    found = listed(root)
    assert [entry.path for entry in found.entries] == ["in"]
    assert sorted((one.path, one.reason) for one in found.skipped) == [
        ("etc", "is a link that leads outside"),
        ("fifo", "is no file"),
        ("out", "is a link that leads outside"),
    ]


@pytest.mark.parametrize("limits", [{"limit_bytes": 9}, {"limit_files": 2}])
def test_too_much_is_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    for name in "abc":
        (root / name).write_text("1234")
    with pytest.raises(BadInput, match="it holds more than"):
        listed(root, **limits)
    assert len(listed(root, limit_bytes=12, limit_files=3).entries) == 3
