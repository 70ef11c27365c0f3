"""Files of an original: read while its move is open, and returned to its directory when the job has ended."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.files.attempt_files import AttemptFileReader, StoredWorkDirs
from distributed_grid.trees import manifest
from distributed_grid.trees.content_store import ContentStore, ContentStores
from distributed_grid.trees.manifest import ManifestEntry, manifest_of
from distributed_grid.wire import FileChunk, FileListing, ListFiles, ReadFile
from tests.component.agent.offloading.conftest import MOVE, Original, Source, kill
from tests.support.small_disks import SmallDisk, small_disk

__all__ = ["small_disk"]
MakeOriginal = Callable[..., Original]


class ControlPlane:
    """The content store of a control plane, and an agent that returns what is in it."""

    def __init__(self, folder: Path) -> None:
        self.store = ContentStore(folder / "content")
        self.source = Source(folder / "agent" / "moves", StoredWorkDirs(ContentStores(self.store)))

    def tree(self, **files: str) -> str:
        """The digest of a tree of these files."""
        entries = [
            ManifestEntry(name, "file", len(text), digest=self.store.add(text.encode())) for name, text in files.items()
        ]
        return self.store.add(manifest.encode(manifest_of(entries)))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlPlane]:
    found = ControlPlane(tmp_path)
    yield found
    found.source.close()
    for pid in reversed(found.source.guards()):
        kill(pid)


def end_process(control: ControlPlane, process: Original) -> None:
    source = control.source
    source.open(process.identity)
    source.freeze(process.identity)
    source.order("commit", process.identity)
    source.reported("dead")


def listed(
    reader: AttemptFileReader, answers: list[FileChunk | FileListing], source: Source, *, tree: bool = False
) -> FileListing:
    answers.clear()

    async def ask() -> None:
        reader.received(ListFiles(stream=1, lease_id=MOVE, patterns=() if tree else ("**",), tree=tree))

    source.run(ask())
    found = source.until(lambda: answers[-1] if answers else None)
    assert isinstance(found, FileListing)
    return found


def test_the_directory_of_an_original_can_be_read_while_its_move_is_open(
    source: Source, original: MakeOriginal, tmp_path: Path
) -> None:
    process = original()
    (process.folder / "data").write_text("what it needs")
    (process.folder / "out").symlink_to("/etc/passwd")
    os.mkfifo(process.folder / "fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"{process.folder}/s")
    answers: list[FileChunk | FileListing] = []
    reader = AttemptFileReader(tmp_path / "jobs", answers.append, source.moves.directory)
    assert "is not there any more" in listed(reader, answers, source).problem
    source.open(process.identity)
    process.folder.rename(tmp_path / "renamed")  # it still runs there
    found = listed(reader, answers, source)
    assert [entry.path for entry in manifest.decode_listing(found.files, limit_files=10)] == ["data"]
    assert sorted(one.partition(":")[0] for one in found.skipped) == ["fifo", "out", "s"]
    read = {
        name: read_file(reader, answers, source, name) for name in (b"work/data", b"work/out", b"stdout", b"work/../x")
    }
    assert read.pop(b"work/data").data == b"what it needs"
    assert all(chunk.problem and not chunk.data for chunk in read.values())
    source.order("close")
    source.until(lambda: source.moves.directory(MOVE) is None)
    assert "is not there any more" in listed(reader, answers, source).problem
    (tmp_path / "renamed").rename(process.folder)


def read_file(
    reader: AttemptFileReader, answers: list[FileChunk | FileListing], source: Source, name: bytes
) -> FileChunk:
    answers.clear()

    async def ask() -> None:
        reader.received(ReadFile(stream=2, lease_id=MOVE, name=name, offset=0, credit=1000))
        while not answers:
            await asyncio.sleep(0.001)

    source.run(ask())
    source.run(asyncio.sleep(0))
    found = answers[0]
    reader.close()
    assert isinstance(found, FileChunk)
    return found


def test_results_return_once_and_are_reported_again_to_the_next_agent(
    control: ControlPlane, original: MakeOriginal
) -> None:
    process, source = original(), control.source
    for name in ("same", "changed"):
        (process.folder / name).write_text("old")
    before = control.tree(same="old", changed="old")
    end_process(control, process)
    (process.folder / "changed").write_text("by its owner")
    results = control.tree(same="new", changed="new", fresh="new")
    source.order("return", process.identity, manifest=results, shipped=before)
    report = source.reported("returned")
    assert (report.files, report.kept, report.detail) == (2, ("changed",), "")
    texts = {one.name: one.read_text() for one in process.folder.iterdir()}
    assert texts == {"same": "new", "changed": "by its owner", "changed.from-move-1": "new", "fresh": "new"}
    (process.folder / "fresh").write_text("used by its owner")
    source.stop()
    source.start()
    source.order("return", process.identity, manifest=results, shipped=before)
    assert (source.reported("returned").files, (process.folder / "fresh").read_text()) == (2, "used by its owner")
    assert not (source.root / MOVE / "results").exists()


def test_a_directory_that_is_another_one_by_now_gets_nothing(control: ControlPlane, original: MakeOriginal) -> None:
    process, source = original(), control.source
    end_process(control, process)
    process.folder.rename(process.folder.with_name("moved away"))
    process.folder.mkdir()
    source.order("return", process.identity, manifest=control.tree(a="new"))
    report = source.reported("returned")
    assert report.files == 0
    assert "is another directory now" in report.detail
    assert list(process.folder.iterdir()) == []


def test_on_a_full_disk_nothing_is_half_there_and_it_succeeds_later(
    control: ControlPlane, tmp_path: Path, small_disk: Callable[..., SmallDisk]
) -> None:
    disk = small_disk(tmp_path / "small")
    process, source = Original(tmp_path / "small" / "work", "import time; time.sleep(600)"), control.source
    try:
        (process.folder / "large").write_text("old")
        before, results = control.tree(large="old"), control.tree(large="n" * 100_000)
        end_process(control, process)
        disk.fill()
        source.order("return", process.identity, manifest=results, shipped=before)
        assert "No space left" in source.reported("failed").detail
        assert {one.name: one.read_text() for one in process.folder.iterdir()} == {"large": "old"}
        disk.free()
        source.order("return", process.identity, manifest=results, shipped=before)
        assert source.reported("returned").files == 1
        assert (process.folder / "large").stat().st_size == 100_000
    finally:
        process.end()


def test_a_secret_in_the_directory_of_an_original_is_neither_listed_nor_read(
    source: Source, original: MakeOriginal, tmp_path: Path
) -> None:
    process = original()
    (process.folder / ".env").write_text("TOKEN=1")
    answers: list[FileChunk | FileListing] = []
    reader = AttemptFileReader(tmp_path / "jobs", answers.append, source.moves.directory)
    source.open(process.identity)

    def ask(question: ListFiles | ReadFile) -> FileChunk | FileListing:
        answers.clear()

        async def receive() -> None:
            reader.received(question)

        source.run(receive())
        source.until(lambda: answers)
        return answers[0]

    listing = ask(ListFiles(stream=1, lease_id=MOVE, patterns=(), tree=True))
    assert isinstance(listing, FileListing)
    assert b".env" not in listing.files
    assert listing.skipped == (".env: looks like a secret",)
    chunk = ask(ReadFile(stream=2, lease_id=MOVE, name=b"work/.env", offset=0, credit=100))
    assert isinstance(chunk, FileChunk)
    assert (chunk.data, chunk.problem) == (b"", "work/.env cannot be read: looks like a secret")
    (process.folder / ".gridignore").write_text("!.env\n")
    allowed = ask(ReadFile(stream=3, lease_id=MOVE, name=b"work/.env", offset=0, credit=100))
    assert isinstance(allowed, FileChunk)
    assert allowed.data == b"TOKEN=1"


@pytest.mark.parametrize("replaced", ["file", "directory"])
def test_a_path_that_becomes_a_link_after_it_was_listed_is_not_read_through_it(
    source: Source, original: MakeOriginal, tmp_path: Path, replaced: str
) -> None:
    process = original()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").write_text("of somebody else")
    (process.folder / "sub").mkdir()
    (process.folder / "sub" / "data").write_text("what it needs")
    answers: list[FileChunk | FileListing] = []
    reader = AttemptFileReader(tmp_path / "jobs", answers.append, source.moves.directory)
    source.open(process.identity)
    assert b"data" in listed(reader, answers, source, tree=True).files
    (process.folder / "sub" / "data").unlink()
    if replaced == "file":
        (process.folder / "sub" / "data").symlink_to(tmp_path / "other" / "data")
    else:
        (process.folder / "sub").rmdir()
        (process.folder / "sub").symlink_to(tmp_path / "other")
    answers.clear()

    async def receive() -> None:
        reader.received(ReadFile(stream=2, lease_id=MOVE, name=b"work/sub/data", offset=0, credit=100))

    source.run(receive())
    chunk = source.until(lambda: answers[-1] if answers else None)
    assert isinstance(chunk, FileChunk)
    assert (chunk.data, bool(chunk.problem)) == (b"", True)


def test_the_settings_of_a_repository_stay_at_home_and_the_rest_of_it_is_listed(
    source: Source, original: MakeOriginal, tmp_path: Path
) -> None:
    process = original()
    (process.folder / ".git" / "modules" / "lib").mkdir(parents=True)
    for name in ("config", "HEAD", "modules/lib/config"):
        (process.folder / ".git" / name).write_text("url = https://ada:token@git.example/repo")
    answers: list[FileChunk | FileListing] = []
    reader = AttemptFileReader(tmp_path / "jobs", answers.append, source.moves.directory)
    source.open(process.identity)
    found = listed(reader, answers, source, tree=True)
    paths = [entry.path for entry in manifest.decode_tree_page(found.files, limit_entries=10)]
    assert ".git/HEAD" in paths
    assert not [path for path in paths if path.endswith("config")]
    assert found.skipped == (".git/config: looks like a secret", ".git/modules/lib/config: looks like a secret")


def test_an_original_in_a_home_directory_is_not_opened(
    source: Source, original: MakeOriginal, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = original()
    monkeypatch.setenv("HOME", str(process.folder))
    source.order("open", process.identity)
    assert "home directory" in source.reported("failed").detail
