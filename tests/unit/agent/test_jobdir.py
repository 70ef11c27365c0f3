"""Files of an attempt are whole or absent, and names from outside lead nowhere else."""

import os
from pathlib import Path

import pytest

from distributed_grid.agent import jobdir
from distributed_grid.agent.jobdir import JobDir, is_safe_name


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / jobdir.LIVE).mkdir()
    return str(tmp_path)


def test_what_is_written_is_read_back_and_nothing_lies_around(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        assert job.read("x.json") is None
        job.write("x.json", {"text": "\udcff", "number": 1})
        job.write("x.json", {"text": "\udcff", "number": 2}, durable=True)
        assert job.read("x.json") == {"text": "\udcff", "number": 2}
    assert {path.name for path in Path(root, "a.1").iterdir()} == {"x.json", "work"}


def test_a_file_cut_short_counts_as_absent(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        Path(root, "a.1/x.json").write_text('{"half": ')
        assert job.read("x.json") is None


def test_making_it_twice_keeps_what_is_there(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write("x.json", 1)
    with JobDir.make(root, "a.1") as job:
        assert job.read("x.json") == 1
    assert Path(root, jobdir.LIVE, "a.1").exists()


def test_a_lock_lives_as_long_as_any_copy_of_its_descriptor(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        assert not job.is_locked()
        lock = job.take_lock()
        assert lock is not None
        assert job.take_lock() is None
        copy = os.dup(lock)
        os.close(lock)
        assert job.is_locked()
        os.close(copy)
        assert not job.is_locked()


def test_links_are_not_followed(root: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("1")
    with JobDir.make(root, "a.1") as job:
        Path(root, "a.1/x.json").symlink_to(tmp_path / "secret.json")
        with pytest.raises(OSError, match="symbolic"):
            job.read("x.json")
    Path(root, "b.1").symlink_to(Path(root, "a.1"))
    with pytest.raises(OSError, match="directory"):
        JobDir(root, "b.1")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a b", "a\n", "ä", "x" * 129, "a\0"])
def test_unsafe_names(root: str, name: str) -> None:
    assert not is_safe_name(name)
    with pytest.raises(ValueError, match="safe"):
        JobDir(root, name)
    with pytest.raises(ValueError, match="safe"):
        JobDir.make(root, name)


@pytest.mark.parametrize("name", ["a", "4f1c-9.1", "_x", "x" * 128, "a..b", "-"])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)
