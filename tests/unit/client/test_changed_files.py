"""Files that come back from another node: only what the job has changed, never over what was changed here."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from distributed_grid.api.framing import JSON, STDOUT
from distributed_grid.client.changed_files import ChangedFilesDownload, ShippedDirectory


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("same", "changed", "edited"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def shipped(folder: Path) -> ShippedDirectory:
    digests = {path.name: digest(path.read_bytes()) for path in folder.iterdir()}
    return ShippedDirectory(str(folder), digests, time.time_ns())


def receive(download: ChangedFilesDownload, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        header = {"file": name.encode().hex(), "size": len(content), "executable": False}
        assert download.receive(JSON, header) is None
        for start in range(0, len(content), 3):
            assert download.receive(STDOUT, content[start : start + 3]) is None
    assert download.receive(JSON, {"done": True}) == {"done": True}


def test_only_what_was_changed_there_and_not_here_is_written(folder: Path) -> None:
    (folder / "untouched").write_bytes(b"mine")
    before = shipped(folder)
    unchanged = (folder / "same").stat()
    (folder / "edited").write_bytes(b"edited here")
    download = ChangedFilesDownload(before, ["**"])
    receive(
        download, {"same": b"same", "changed": b"by the job", "edited": b"by the job", "out/new": b"made", "empty": b""}
    )
    assert (folder / "changed").read_bytes() == b"by the job"
    assert (folder / "edited").read_bytes() == b"edited here"
    assert (folder / "out/new").read_bytes() == b"made"
    assert (folder / "empty").read_bytes() == b""
    assert (folder / "same").stat() == unchanged
    assert (download.written, download.kept) == (["changed", "out/new", "empty"], ["edited"])


def test_a_file_that_was_removed_here_does_not_come_back(folder: Path) -> None:
    before = shipped(folder)
    (folder / "changed").unlink()
    download = ChangedFilesDownload(before, ["**"])
    receive(download, {"changed": b"by the job"})
    assert download.kept == ["changed"]
    assert not (folder / "changed").exists()


def test_of_files_that_were_not_shipped_those_that_are_older_are_replaced(folder: Path) -> None:
    (folder / "ignored.log").write_bytes(b"old")
    made = (folder / "ignored.log").stat().st_ctime_ns
    before = ShippedDirectory(str(folder), {}, made)
    assert not before.was_changed_since("ignored.log")
    assert ShippedDirectory(str(folder), {}, made - 1).was_changed_since("ignored.log")


def test_a_link_in_the_place_of_a_file_is_left(folder: Path) -> None:
    before = shipped(folder)
    (folder / "changed").unlink()
    (folder / "changed").symlink_to("edited")
    download = ChangedFilesDownload(before, ["**"])
    receive(download, {"changed": b"by the job", "out": b"next"})
    assert (folder / "edited").read_bytes() == b"edited"
    assert (folder / "out").read_bytes() == b"next"
    assert download.kept == ["changed"]


def test_a_link_that_was_shipped_is_left_without_a_word(folder: Path) -> None:
    (folder / "link").symlink_to("same")
    before = ShippedDirectory(str(folder), {"same": digest(b"same")}, time.time_ns(), {"link"})
    download = ChangedFilesDownload(before, ["**"])
    receive(download, {"link": b"by the job", "same": b"by the job"})
    assert (folder / "link").is_symlink()
    assert (folder / "same").read_bytes() == b"by the job"
    assert (download.written, download.kept) == (["same"], [])
