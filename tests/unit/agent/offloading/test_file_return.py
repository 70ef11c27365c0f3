"""Files return to a directory, never over one that was changed there since, and never outside it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from distributed_grid.agent.offloading.move_orders import ReturnedFiles, return_files
from distributed_grid.trees.manifest import EXECUTABLE, PLAIN, Manifest, ManifestEntry, manifest_of


class Places:
    """A directory as it was, the files of the job, and the directory of their return."""

    def __init__(self, folder: Path) -> None:
        self.staged, self.target = folder / "staged", folder / "target"
        for one in (self.staged, self.target):
            one.mkdir()
        self.before: dict[str, ManifestEntry] = {}
        self.results: dict[str, ManifestEntry] = {}

    def had(self, path: str, text: str) -> None:
        """It was there when the original stood still."""
        self.before[path] = _entry(path, text)
        self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.target / path).parent.mkdir(parents=True, exist_ok=True)
        (self.target / path).write_text(text)

    def result(self, path: str, text: str, mode: int = PLAIN) -> None:
        """The job has written it."""
        self.results[path] = _entry(path, text, mode)
        (self.staged / path).parent.mkdir(parents=True, exist_ok=True)
        (self.staged / path).write_text(text)

    def put_back(self) -> ReturnedFiles:
        parents = {str(one) for path in self.results for one in Path(path).parents if str(one) != "."}
        folders = [ManifestEntry(one, "dir", 0, EXECUTABLE) for one in parents]
        staged, target = (os.open(one, os.O_RDONLY) for one in (self.staged, self.target))
        try:
            results = manifest_of([*folders, *self.results.values()])
            return return_files(results, staged, target, Manifest(tuple(self.before.values())), "move-1")
        finally:
            os.close(staged)
            os.close(target)

    def found(self) -> dict[str, str]:
        """All files and links that are there."""
        every = (one for one in sorted(self.target.rglob("*")) if one.is_symlink() or one.is_file())
        return {str(one.relative_to(self.target)): one.read_text() for one in every}


def _entry(path: str, text: str, mode: int = PLAIN) -> ManifestEntry:
    return ManifestEntry(path, "file", len(text), mode, hashlib.sha256(text.encode()).hexdigest())


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def test_what_is_as_it_was_is_replaced_and_keeps_its_mode(places: Places) -> None:
    places.had("out.txt", "old")
    (places.target / "out.txt").chmod(0o640)
    places.result("out.txt", "new")
    places.result("deep/er/made.sh", "#!/bin/sh", EXECUTABLE)
    assert places.put_back() == ReturnedFiles(2, (), ("executable now: deep/er/made.sh",))
    assert places.found() == {"out.txt": "new", "deep/er/made.sh": "#!/bin/sh"}
    assert (places.target / "out.txt").stat().st_mode & 0o777 == 0o640
    assert os.access(places.target / "deep/er/made.sh", os.X_OK)


def test_what_was_changed_or_made_since_is_kept_and_the_new_file_is_beside_it(places: Places) -> None:
    places.had("changed", "old")
    places.write("changed", "by its owner")
    places.write("made", "by its owner")
    places.result("changed", "new")
    places.result("made", "new")
    for _ in range(2):
        assert places.put_back() == ReturnedFiles(0, ("changed", "made"))
        assert places.found() == {
            "changed": "by its owner",
            "changed.from-move-1": "new",
            "made": "by its owner",
            "made.from-move-1": "new",
        }


def test_done_again_it_changes_nothing_and_counts_the_same(places: Places) -> None:
    places.had("a", "old")
    places.result("a", "new")
    places.result("b", "new")
    first = places.put_back()
    times = [one.stat().st_mtime_ns for one in places.target.iterdir()]
    assert places.put_back() == first == ReturnedFiles(2, ())
    assert [one.stat().st_mtime_ns for one in places.target.iterdir()] == times


def test_nothing_is_written_through_a_link(places: Places, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (places.target / "folder").symlink_to(outside)
    (places.target / "file").symlink_to(outside / "file")
    places.result("folder/file", "new")
    places.result("file", "new")
    assert places.put_back() == ReturnedFiles(0, ("file", "folder/file"))
    assert [one.name for one in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"
    assert (places.target / "file.from-move-1").read_text() == "new"


def test_a_file_or_a_directory_in_the_way_stays(places: Places) -> None:
    places.write("a", "a file")
    (places.target / "b").mkdir()
    places.result("a/b", "new")
    places.result("b", "new")
    assert places.put_back() == ReturnedFiles(0, ("a/b", "b"))
    assert places.found() == {"a": "a file", "a.from-move-1/b": "new", "b.from-move-1": "new"}


def test_links_are_made_where_nothing_is_in_their_way(places: Places) -> None:
    for name in ("fresh", "same", "taken"):
        places.results[name] = ManifestEntry(name, "link", target="t")
    places.write("t", "target")
    places.write("taken", "mine")
    (places.target / "same").symlink_to("t")
    assert places.put_back() == ReturnedFiles(2, ("taken",))
    assert os.readlink(places.target / "fresh") == "t"
    assert os.readlink(places.target / "taken.from-move-1") == "t"


def test_files_that_programs_read_by_themselves_are_never_returned(places: Places) -> None:
    places.had(".git/config", "[core]")
    for path in (".git/config", ".git/hooks/pre-commit", "sub/.GIT/config", ".bashrc", ".vscode/tasks.json"):
        places.result(path, "evil", EXECUTABLE)
    places.results["alias"] = ManifestEntry("alias", "link", target=".git/config")
    places.result("__pycache__/train.pyc", "evil")
    places.result("result.txt", "new")
    files, kept, notes = places.put_back()
    assert (files, kept) == (1, ())
    assert len(notes) == 1
    assert notes[0].startswith("never written back: .bashrc, .git/config, .git/hooks")
    assert places.found() == {".git/config": "[core]", "result.txt": "new"}


def test_a_name_that_is_as_long_as_can_be_has_room_beside_it(places: Places) -> None:
    name = "n" * 255
    places.write(name, "mine")
    places.result(name, "new")
    assert places.put_back().kept == (name,)
    assert sorted(places.found().values()) == ["mine", "new"]


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o770, 0o660), (0o700, 0o600)])
def test_a_new_file_may_be_read_by_whom_its_directory_lets_in(places: Places, folder: int, file: int) -> None:
    places.target.chmod(folder)
    places.result("result.txt", "new")
    places.put_back()
    assert (places.target / "result.txt").stat().st_mode & 0o777 == file
