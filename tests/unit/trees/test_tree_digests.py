"""Digests of whole directories."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from distributed_grid.errors import BadInput
from distributed_grid.trees.secret_files import SecretFilter
from distributed_grid.trees.tree_listing import TreeDigests


def age(path: Path, seconds: float = 60) -> None:
    """Make a file look as if it was last written a while ago; its change time stays."""
    os.utime(path, (time.time() - seconds,) * 2)


def test_directories_links_and_files_are_listed_with_digests(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"one")
    (tmp_path / "run.sh").write_bytes(b"#!")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "out").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    found = TreeDigests().list_tree(tmp_path)
    by_path = {entry.path: entry for entry in found.entries}
    assert [entry.path for entry in found.entries] == ["empty", "out", "run.sh", "sub", "sub/a.txt"]
    assert (by_path["empty"].kind, by_path["out"].kind, by_path["out"].target) == ("dir", "link", "/etc")
    assert by_path["sub/a.txt"].digest == hashlib.sha256(b"one").hexdigest()
    assert (by_path["run.sh"].mode, by_path["sub/a.txt"].mode) == (0o700, 0o600)
    assert [one.path for one in found.skipped] == ["pipe"]


def test_only_what_the_user_names_in_gridignore_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / ".gridignore").write_text("big/\n")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "x").touch()
    (tmp_path / "a.log").touch()
    (tmp_path / ".venv").mkdir()
    paths = [entry.path for entry in TreeDigests().list_tree(tmp_path).entries]
    assert paths == [".gitignore", ".gridignore", ".venv", "a.log"]


def test_a_second_listing_reads_what_has_changed_and_finds_every_change(tmp_path: Path) -> None:
    changed, same = tmp_path / "changed", tmp_path / "same"
    changed.write_bytes(b"one")
    same.write_bytes(b"two")
    digests = TreeDigests()
    first = {entry.path: entry.digest for entry in digests.list_tree(tmp_path).entries}
    changed.write_bytes(b"ONE")  # as long as before, within the same moment
    second = {entry.path: entry.digest for entry in digests.list_tree(tmp_path).entries}
    assert second["same"] == first["same"]
    assert second["changed"] == hashlib.sha256(b"ONE").hexdigest()
    os.replace(same, changed)
    assert [entry.path for entry in digests.list_tree(tmp_path).entries] == ["changed"]


def test_a_directory_beyond_the_limits_is_refused_with_its_largest_parts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"x" * 2000)
    with pytest.raises(BadInput, match=r"more than 1000 bytes.*data/ .*gridignore"):
        TreeDigests().list_tree(tmp_path, limit_bytes=1000)


def test_secrets_are_listed_as_skipped_where_a_filter_is_given(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_rsa").touch()
    (tmp_path / "sub").mkdir()
    for name in (".env", "sub/.env", "a"):
        (tmp_path / name).touch()
    (tmp_path / "sub" / ".gridignore").write_text("!.env\n")
    assert TreeDigests().list_tree(tmp_path).skipped == ()
    found = TreeDigests().list_tree(tmp_path, secrets=SecretFilter(os.fsencode(tmp_path)))
    assert [entry.path for entry in found.entries] == ["a", "sub", "sub/.env", "sub/.gridignore"]
    assert [(one.path, one.reason) for one in found.skipped] == [
        (".env", "looks like a secret"),
        (".ssh/", "looks like a secret"),
    ]
