"""Files of moves: shipping of directories into the content store, and results of jobs in a process's place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.control.agent_files import AttemptFiles, AttemptOutputFile, RemoteFiles
from distributed_grid.domain.leases import Request
from distributed_grid.domain.moves import Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity, StandardStream, StreamKind
from distributed_grid.domain.resources import Amounts
from distributed_grid.errors import BadInput, NotFound, Unreachable
from distributed_grid.server.offloading.move_reconciler import (
    ResultCollector,
    ShippedTree,
    ship_tree,
    stored_manifest,
    stream_files,
)
from distributed_grid.trees import manifest
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.trees.manifest import Manifest
from distributed_grid.trees.tree_listing import TreeDigests
from distributed_grid.trees.tree_writer import materialize

CWD = "/srv/ann/work"
NULL = StandardStream(StreamKind.NULL)


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


class Moved:
    """A job that ran in a directory which began as the original left it."""

    def __init__(self, folder: Path, began: dict[str, bytes], *streams: StandardStream) -> None:
        self.store = ContentStore(folder / "store")
        self.jobs = folder / "jobs"
        self.work = self.jobs / "moved-1.1" / "work"
        self.work.mkdir(parents=True)
        for name, content in began.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_bytes(content)
            self.store.add(content)
        final = self.store.add(manifest.encode(Manifest(TreeDigests().list_tree(self.work).entries)))
        process = MovedProcess(ProcessIdentity(7, 8, "boot"), CWD, (NULL, *streams))
        request = Request(id="move-1", user="grid", ask=Amounts(1000))
        move = Move(
            id="move-1",
            user="ann",
            source="gpu1",
            target="gpu2",
            way=Way.PROCESS_RESTART,
            request=request,
            requested_at_ms=1,
            process=process,
            final=final,
        )
        self.move = replace(move, ran_on="gpu2", ran_as="moved-1.1", result="exited 0")
        self.folder = folder

    def wrote(self, **outputs: bytes) -> None:
        for name, content in outputs.items():
            (self.jobs / "moved-1.1" / name).write_bytes(content)

    def collect(self) -> tuple[dict[str, bytes], str]:
        """The returned files, laid out, and the problem."""
        files = AttemptFiles(self.jobs, RemoteFiles({}), lambda node: True)
        digest, problem = asyncio.run(ResultCollector(self.store, files).collect(self.move))
        if not digest:
            return {}, problem
        there = self.folder / "there"
        there.mkdir()
        materialize(stored_manifest(self.store, digest), self.store, there)
        found = {str(one.relative_to(there)): one.read_bytes() for one in there.rglob("*") if one.is_file()}
        return found, problem


def to_file(name: str, *, appends: bool = False) -> StandardStream:
    return StandardStream(StreamKind.FILE, f"{CWD}/{name}", appends)


def test_only_what_the_job_has_changed_or_made_comes_back(tmp_path: Path) -> None:
    moved = Moved(tmp_path, {"input": b"i", "sub/state": b"1"}, NULL, NULL)
    (moved.work / "sub" / "state").write_bytes(b"2")
    (moved.work / "sub" / "deep").mkdir()
    (moved.work / "sub" / "deep" / "new").write_bytes(b"n")
    (moved.work / "input").unlink()
    assert moved.collect() == ({"sub/state": b"2", "sub/deep/new": b"n"}, "")


def test_a_job_that_wrote_nothing_returns_nothing(tmp_path: Path) -> None:
    assert Moved(tmp_path, {"input": b"i"}, NULL, NULL).collect() == ({}, "")


def test_output_comes_after_what_the_original_had_written(tmp_path: Path) -> None:
    moved = Moved(tmp_path, {"out.log": b"step 1\n"}, to_file("out.log"), to_file("err.log"))
    moved.wrote(stdout=b"all of it\n", stderr=b"oh\n")
    assert moved.collect() == ({"out.log": b"step 1\nall of it\n", "err.log": b"oh\n"}, "")


@pytest.mark.parametrize("appends", [False, True])
def test_both_streams_may_share_a_file(tmp_path: Path, appends: bool) -> None:
    log = to_file("log", appends=appends)
    moved = Moved(tmp_path, {"log": b"before\n"}, log, log)
    moved.wrote(stdout=b"out\n", stderr=b"err\n")
    assert moved.collect() == ({"log": b"before\nout\nerr\n"}, "")


def test_a_link_that_leads_outside_stays_behind(tmp_path: Path) -> None:
    moved = Moved(tmp_path, {}, NULL, NULL)
    (moved.work / "out").symlink_to("/etc/passwd")
    (moved.work / "new").write_bytes(b"n")
    assert moved.collect() == ({"new": b"n"}, "the link 'out' leads outside its directory")


def test_a_directory_that_is_gone_is_said_and_a_node_that_is_away_is_waited_for(tmp_path: Path) -> None:
    moved = Moved(tmp_path, {}, NULL, NULL)
    moved.move = replace(moved.move, ran_as="moved-2.1")
    found, problem = moved.collect()
    assert found == {}
    assert "moved-2.1 is not there any more" in problem
    away = AttemptFiles(moved.jobs, RemoteFiles({}), lambda node: False)
    with pytest.raises(Unreachable):
        asyncio.run(ResultCollector(moved.store, away).collect(moved.move))


def test_streams_outside_the_directory_are_nobodys_to_return() -> None:
    outside = StandardStream(StreamKind.FILE, "/var/log/x")
    process = MovedProcess(ProcessIdentity(7, 8, "boot"), CWD, (NULL, to_file("a/b"), outside))
    assert stream_files(process) == {"a/b": [1]}


def test_files_that_are_left_out_are_named_up_to_a_limit(directory: Directory) -> None:
    listed = directory.list()
    assert directory.ship(found=AttemptOutputFile(listed.entries, (".env: looks like a secret",))).left_out == (
        ".env: looks like a secret",
    )
    many = AttemptOutputFile(listed.entries, tuple(f"{number}.key: looks like a secret" for number in range(25)))
    assert directory.ship(found=many).left_out[-2:] == ("19.key: looks like a secret", "and 5 more")
