"""Shipping of directories into the content store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.adapters.workdir.tree_digests import TreeDigests
from distributed_grid.adapters.workdir.tree_writer import materialize
from distributed_grid.control.agent_files import AttemptOutputFile
from distributed_grid.errors import BadInput, NotFound
from distributed_grid.server.offloading.directory_shipping import ShippedTree, ship_tree, stored_manifest


class Directory:
    """A directory that is read as an agent would read it."""

    def __init__(self, path: Path, store: ContentStore) -> None:
        self.path = path
        self.store = store
        self.digests = TreeDigests()
        self.read_bytes = 0
        self.listed: AttemptOutputFile | None = None

    async def read(self, name: bytes, at: int, most: int) -> bytes:
        data = (self.path / name.decode().removeprefix("work/")).read_bytes()[at : at + most]
        self.read_bytes += len(data)
        return data

    def list(self) -> AttemptOutputFile:
        return AttemptOutputFile(self.digests.list_tree(self.path).entries, ())

    def ship(self, *, still: bool = False, found: AttemptOutputFile | None = None) -> ShippedTree:
        self.read_bytes = 0
        return asyncio.run(ship_tree(self.store, found or self.list(), self.read, still=still))


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    (tmp_path / "cwd" / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "cwd" / "sub" / "data").write_bytes(b"d" * 5_000_000)
    (tmp_path / "cwd" / "log").write_bytes(b"1\n")
    (tmp_path / "cwd" / "last").symlink_to("sub/data")
    return Directory(tmp_path / "cwd", ContentStore(tmp_path / "store"))


def test_what_is_shipped_can_be_laid_out_again(directory: Directory, tmp_path: Path) -> None:
    shipped = directory.ship()
    assert shipped.new_bytes == 5_000_002
    (tmp_path / "there").mkdir()
    materialize(stored_manifest(directory.store, shipped.digest), directory.store, tmp_path / "there")
    assert (tmp_path / "there" / "last").read_bytes() == b"d" * 5_000_000
    assert (tmp_path / "there" / "sub" / "empty").is_dir()


def test_the_second_time_only_the_difference_is_read(directory: Directory) -> None:
    first = directory.ship()
    (directory.path / "log").write_bytes(b"1\n2\n")
    second = directory.ship(still=True)
    assert (second.new_bytes, directory.read_bytes) == (4, 4)
    assert second.digest != first.digest


def test_what_changes_while_it_is_shipped_ahead_is_left_for_the_difference(directory: Directory) -> None:
    listed = directory.list()
    (directory.path / "log").write_bytes(b"2\n")
    (directory.path / "sub" / "data").unlink()
    (directory.path / "sub" / "data").write_bytes(b"short")
    shipped = directory.ship(found=listed)
    assert shipped.changing == 2
    assert [entry.path for entry in shipped.manifest.entries] == ["last", "sub", "sub/empty"]


def test_nothing_may_change_while_the_original_stands_still(directory: Directory) -> None:
    listed = directory.list()
    (directory.path / "log").write_bytes(b"2\n")
    with pytest.raises(NotFound, match="log changed though"):
        directory.ship(still=True, found=listed)


def test_a_link_that_leads_outside_is_refused(directory: Directory) -> None:
    (directory.path / "out").symlink_to("../..")
    with pytest.raises(BadInput, match=r"the link out -> ../.. leads outside"):
        directory.ship()
