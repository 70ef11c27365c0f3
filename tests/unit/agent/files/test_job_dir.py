"""Files of an attempt are whole or absent, and names from outside lead nowhere else.

A line of a journal is whole or absent, whatever happened before it and wherever it was cut.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir, is_safe_name
from tests.support import odd_files


@pytest.fixture
def root(tmp_path: Path) -> str:
    job_dir.make_root(str(tmp_path))
    return str(tmp_path)


def test_what_is_written_is_read_back_and_nothing_lies_around(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        assert job.read("x.json") is None
        job.write("x.json", {"text": "\udcff", "number": 1})
        job.write("x.json", {"text": "\udcff", "number": 2}, durable=True)
        assert job.read("x.json") == {"text": "\udcff", "number": 2}
    assert [path.name for path in Path(root, job_dir.CONTROL, "a.1").iterdir()] == ["x.json"]


def test_a_file_cut_short_counts_as_absent(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        Path(root, job_dir.CONTROL, "a.1/x.json").write_text('{"half": ')
        assert job.read("x.json") is None


def test_making_it_twice_keeps_what_is_there(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write("x.json", 1)
    with JobDir.make(root, "a.1") as job:
        assert job.read("x.json") == 1
    assert Path(root, job_dir.LIVE, "a.1").exists()


def test_a_lock_lives_as_long_as_any_copy_of_its_descriptor(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write(job_dir.SPEC, {"attempt_id": "a.1"})
        assert not job.is_locked()
        lock = job.take_lock()
        assert lock is not None
        assert job.take_lock() is None
        copy = os.dup(lock)
        os.close(lock)
        assert job.is_locked()
        os.close(copy)
        assert not job.is_locked()


def test_a_lock_once_taken_is_not_taken_again(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write(job_dir.SPEC, {"attempt_id": "a.1"})
        lock = job.take_lock()
        assert lock is not None
        os.close(lock)
        assert not job.is_locked()
        assert job.take_lock() is None
        job.remove(job_dir.LOCK)  # somebody made sure that nothing ran
        again = job.take_lock()
        assert again is not None
        os.close(again)


def test_one_file_tells_all_that_happened_under_three_names(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write(job_dir.SPEC, {"attempt_id": "a.1", "cores": [1]})
        lock = job.take_lock()
        assert lock is not None
        assert (job.read(job_dir.LOCK), job.read(job_dir.STARTED), job.read(job_dir.EXIT)) == (None, None, None)
        job_dir.append_entry(lock, job_dir.journal_entry("shim", {"boot": "b", "pid": 1, "start": 2}))
        job_dir.append_entry(lock, job_dir.journal_entry("started", {"pid": 3}))
        job.write_end(lock, {"ending": "exited", "exit_code": 0})
        os.close(lock)
        assert job.read(job_dir.SPEC) == {"attempt_id": "a.1", "cores": [1]}
        assert job.read(job_dir.LOCK) == {"boot": "b", "pid": 1, "start": 2}
        assert job.read(job_dir.STARTED) == {"pid": 3}
        assert job.read(job_dir.EXIT) == job.read_end() == {"ending": "exited", "exit_code": 0}
    control = Path(root, job_dir.CONTROL, "a.1")
    assert {path.name for path in control.iterdir()} == {"spec.json", "shim.lock", "exit.json"}
    assert len({path.stat().st_ino for path in control.iterdir()}) == 1
    assert sorted(path.name for path in Path(root, "a.1").iterdir()) == ["checkpoints", "work"]


def test_an_end_that_was_not_shown_counts_once_its_shim_is_gone(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write(job_dir.SPEC, {"attempt_id": "a.1"})
        lock = job.take_lock()
        assert lock is not None
        job_dir.append_entry(lock, job_dir.journal_entry("ended", {"ending": "exited"}))
        assert job.read_end() is None  # it may not be on the disk yet
        os.close(lock)
        assert job.read(job_dir.EXIT) is None
        assert job.read_end() == {"ending": "exited"}
        assert job.read(job_dir.EXIT) == {"ending": "exited"}
        job.remove(job_dir.EXIT)
        job.remove(job_dir.LOCK)  # a name lost in a power failure
        assert job.read_end() == {"ending": "exited"}


def test_an_end_recorded_again_after_a_full_disk_is_one_end(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        job.write(job_dir.SPEC, {"attempt_id": "a.1"})
        lock = job.take_lock()
        assert lock is not None
        os.write(lock, b'\n{"ended": {"ending": "exi')
        job.write_end(lock, {"ending": "exited"})
        job.write_end(lock, {"ending": "exited"})
        os.close(lock)
        assert job.read_end() == {"ending": "exited"}


def test_an_attempt_is_listed_as_live_without_a_new_file(root: str) -> None:
    Path(root, job_dir.HOST_LOCK).touch()
    JobDir.make(root, "a.1").close()
    JobDir.make(root, "a.1").close()
    assert Path(root, job_dir.LIVE, "a.1").samefile(Path(root, job_dir.HOST_LOCK))


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_what_is_no_file_of_ours_counts_as_absent_and_is_replaced(root: str, kind: str) -> None:
    names = (job_dir.SPEC, job_dir.STOP, job_dir.GROUPS)
    with JobDir.make(root, "a.1") as job:
        for name in (*names, job_dir.LOCK, job_dir.EXIT):
            odd_files.put(kind, Path(root, job_dir.CONTROL, "a.1", name))
        assert [job.read(name) for name in (*names, job_dir.LOCK, job_dir.STARTED, job_dir.EXIT)] == [None] * 6
        assert (job.read_end(), job.is_locked()) == (None, False)
        for name in names:
            odd_files.put(kind, Path(root, job_dir.CONTROL, f"a.1/.{name}.{os.getpid()}"))  # where it is written aside
            job.write(name, {"whole": name})
            assert job.read(name) == {"whole": name}


@pytest.mark.parametrize("kind", odd_files.KINDS)
def test_a_hold_in_the_place_of_which_is_something_else_is_none(root: str, kind: str) -> None:
    odd_files.put(kind, Path(root, job_dir.HOLD))
    assert job_dir.read_hold(root, "boot") == 0
    job_dir.write_hold(root, 5, "boot")
    assert (job_dir.read_hold(root, "boot"), job_dir.read_hold(root, "other")) == (5, 0)
    Path(root, job_dir.HOLD).unlink()
    odd_files.put(kind, Path(root, job_dir.HOLD))
    job_dir.make_hold(root)
    assert job_dir.read_hold(root, "boot") == 0


@pytest.mark.parametrize(
    "text", ["x", "1", "1 2", "1 boot", f"{'9' * 5000} boot {'9' * 5000}", "1 boot 1 boot 1", "{}"]
)
def test_a_hold_that_is_none_is_none_and_does_not_stay(root: str, text: str) -> None:
    Path(root, job_dir.HOLD).write_text(text)
    assert job_dir.read_hold(root, "boot") == 0
    job_dir.write_hold(root, 5, "boot")
    assert job_dir.read_hold(root, "boot") == 5


def test_nonsense_is_no_json_however_deep(root: str) -> None:
    with JobDir.make(root, "a.1") as job:
        for text in (b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 10_000, b"\xff\xfe", b"NaN x", b""):
            Path(root, job_dir.CONTROL, "a.1", "x.json").write_bytes(text)
            assert job.read("x.json") is None


def test_links_are_not_followed(root: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("1")
    with JobDir.make(root, "a.1") as job:
        Path(root, job_dir.CONTROL, "a.1/x.json").symlink_to(tmp_path / "secret.json")
        assert job.read("x.json") is None
        with pytest.raises(OSError, match="symbolic"):
            job.open("x.json", os.O_RDONLY)
    Path(root, job_dir.CONTROL, "b.1").symlink_to(Path(root, job_dir.CONTROL, "a.1"))
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


SPEC = b'{"attempt_id": "a.1", "argv": ["\\n{\\"ended\\": 1}"]}'
ENTRIES = {"shim": {"pid": 7}, "started": {"pid": 8, "cores": [0]}, "ended": {"ending": "exited", "detail": "\udcff\n"}}


def a_journal(path: Path) -> bytes:
    path.write_bytes(SPEC)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for key, content in ENTRIES.items():
        job_dir.append_entry(fd, job_dir.journal_entry(key, content))
    os.close(fd)
    return path.read_bytes()


def test_what_is_told_is_found(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    assert {key: job_dir.find_entry(text, key) for key in ENTRIES} == ENTRIES
    assert job_dir.first_entry(text) == {"attempt_id": "a.1", "argv": ['\n{"ended": 1}']}
    assert job_dir.find_entry(text, "other") is None


def test_cut_anywhere_it_says_less_but_nothing_else(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    found = []
    for length in range(len(text) + 1):
        entries = {key: job_dir.find_entry(text[:length], key) for key in ENTRIES}
        assert all(content in (None, ENTRIES[key]) for key, content in entries.items()), text[:length]
        found.append(sum(content is not None for content in entries.values()))
        assert (job_dir.first_entry(text[:length]) is not None) == (length >= len(SPEC))
    assert found == sorted(found)
    assert set(found) == {0, 1, 2, 3}


def test_a_line_cut_short_hides_none_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = a_journal(path)
    line = job_dir.journal_entry("ended", ENTRIES["ended"])
    begun = whole[: -len(line)]
    for length in range(len(line)):
        path.write_bytes(begun + line[:length])
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        job_dir.append_entry(fd, line)
        os.close(fd)
        assert job_dir.find_entry(path.read_bytes(), "ended") == ENTRIES["ended"]


def test_what_a_power_failure_left_as_zeros_is_nothing(tmp_path: Path) -> None:
    text = a_journal(tmp_path / "journal")
    end = text.index(b'{"ended"')
    assert job_dir.find_entry(text[:end] + bytes(200), "ended") is None
    assert job_dir.find_entry(text[:end] + bytes(200), "started") == ENTRIES["started"]
    assert job_dir.first_entry(bytes(len(text))) is None
