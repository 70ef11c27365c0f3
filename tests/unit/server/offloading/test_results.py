"""Results of the job that took a process's place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.workdir import manifest
from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.adapters.workdir.manifest import Manifest
from distributed_grid.adapters.workdir.tree_digests import TreeDigests
from distributed_grid.adapters.workdir.tree_writer import materialize
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.domain.leases import Request
from distributed_grid.domain.moves import Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity, StandardStream, StreamKind
from distributed_grid.domain.resources import Amounts
from distributed_grid.errors import Unreachable
from distributed_grid.server.offloading.directory_shipping import stored_manifest
from distributed_grid.server.offloading.results import ResultCollector, stream_files

CWD = "/srv/ann/work"
NULL = StandardStream(StreamKind.NULL)


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
        request = Request("move-1", "grid", Amounts(1000))
        move = Move("move-1", "ann", "gpu1", "gpu2", Way.PROCESS_RESTART, request, 1, process=process, final=final)
        self.move = replace(move, ran_on="gpu2", ran_as="moved-1.1", result="exited 0")
        self.folder = folder

    def wrote(self, **outputs: bytes) -> None:
        for name, content in outputs.items():
            (self.jobs / "moved-1.1" / name).write_bytes(content)

    def collect(self) -> tuple[dict[str, bytes], str]:
        """What is to be returned, laid out, and the problem."""
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


def test_output_replaces_the_file_that_the_original_wrote_it_to(tmp_path: Path) -> None:
    moved = Moved(tmp_path, {"out.log": b"half of"}, to_file("out.log"), to_file("err.log"))
    moved.wrote(stdout=b"all of it\n", stderr=b"oh\n")
    assert moved.collect() == ({"out.log": b"all of it\n", "err.log": b"oh\n"}, "")


def test_output_is_appended_where_the_original_appended_and_both_may_share_a_file(tmp_path: Path) -> None:
    log = to_file("log", appends=True)
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
