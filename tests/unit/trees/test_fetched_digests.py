"""Digests of fetched files: kept per directory, and harmless when they are gone."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from distributed_grid.trees.file_return import FetchedDigests


def made(home: Path, *names: str) -> Path:
    home.mkdir(exist_ok=True)
    for name in names:
        (home / name).touch()
    return home


def test_digests_are_read_again_and_added_to(tmp_path: Path) -> None:
    home = made(tmp_path / "home", "a", "b")
    FetchedDigests(tmp_path / "state", home).record({"a": "1"})
    FetchedDigests(tmp_path / "state", home).record({"b": "2"})
    assert FetchedDigests(tmp_path / "state", home).read() == {"a": "1", "b": "2"}
    assert FetchedDigests(tmp_path / "state", tmp_path).read() == {}


def test_digests_of_files_that_are_gone_are_dropped(tmp_path: Path) -> None:
    home = made(tmp_path / "home", "a", "b")
    digests = FetchedDigests(tmp_path / "state", home)
    digests.record({"a": "1"})
    (home / "a").unlink()
    digests.record({"b": "2"})
    assert digests.read() == {"b": "2"}


def test_a_damaged_file_means_that_nothing_is_known(tmp_path: Path) -> None:
    home = made(tmp_path / "home", "a")
    digests = FetchedDigests(tmp_path / "state", home)
    digests.record({"a": "1"})
    for content in (b"", b"[]", b"{}", b'{"files": 3}', b"\xff"):
        next((tmp_path / "state").glob("*.json")).write_bytes(content)
        assert digests.read() == {}


def test_the_file_is_private_and_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    home = made(tmp_path / "home", "\udcff")
    digests = FetchedDigests(tmp_path / "state", home)
    digests.record({"\udcff": "1"})
    assert digests.read() == {"\udcff": "1"}
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "state").iterdir()} == {0}


def test_recording_at_the_same_time_loses_nothing(tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(20)]
    home = made(tmp_path / "home", *names)
    threads = [Thread(target=FetchedDigests(tmp_path / "state", home).record, args=({name: "1"},)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(FetchedDigests(tmp_path / "state", home).read()) == sorted(names)
