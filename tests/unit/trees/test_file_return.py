"""Files return to a person's directory: local work stays, whatever comes, and nothing runs by itself."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import ProtocolError
from distributed_grid.trees.file_return import ReturnDirectory, ReturnPolicy, ReturnReport, current_umask


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Home:
    """A person's directory, and the files of a job that come to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.place.mkdir(exist_ok=True)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        (self.place / path).parent.mkdir(parents=True, exist_ok=True)
        (self.place / path).write_text(text)
        (self.place / path).chmod(mode)

    def receive(self, files: dict[str, str], *, executable: bool = False, **policy: object) -> ReturnReport:
        known = {"origin": "job", "umask": 0o022, **policy}
        root = os.open(self.place, os.O_RDONLY)
        directory = ReturnDirectory(root, ReturnPolicy(**known))  # type: ignore[arg-type]
        try:
            for path, text in files.items():
                directory.begin(path, len(text), executable=executable)
                for start in range(0, len(text), 3):
                    directory.write(text[start : start + 3].encode())
                directory.finish()
            directory.flush()
            return directory.report
        finally:
            directory.close()
            os.close(root)

    @property
    def files(self) -> dict[str, str]:
        every = (path for path in self.place.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path.relative_to(self.place)): path.read_text() for path in every}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_only_files_that_the_job_made_or_changed_are_written(home: Home) -> None:
    shipped = {"same": digest("same"), "changed": digest("old")}
    home.write("same", "same")
    home.write("changed", "old")
    before = (home.place / "same").stat().st_ino
    report = home.receive({"same": "same", "changed": "new", "out/made": "made", "empty": ""}, shipped=shipped)
    assert home.files == {"same": "same", "changed": "new", "out/made": "made", "empty": ""}
    assert (home.place / "same").stat().st_ino == before
    assert (list(report.written), report.unchanged, report.beside) == (["changed", "out/made", "empty"], 1, {})


def test_an_edited_file_stays_and_the_version_of_the_job_is_beside_it(home: Home) -> None:
    home.write("a.py", "edited since")
    for _ in range(2):
        report = home.receive({"a.py": "by the job"}, shipped={"a.py": digest("old")})
        assert report.beside == {"a.py": "a.py.from-job"}
        assert home.files == {"a.py": "edited since", "a.py.from-job": "by the job"}


def test_a_file_that_was_never_shipped_stays(home: Home) -> None:
    home.write("results.log", "a thousand lines")
    assert home.receive({"results.log": "one line"}).beside == {"results.log": "results.log.from-job"}
    assert home.files["results.log"] == "a thousand lines"


def test_overwriting_has_to_be_asked_for(home: Home) -> None:
    home.write("results.log", "a thousand lines")
    assert home.receive({"results.log": "one line"}, overwrite=True).beside == {}
    assert home.files == {"results.log": "one line"}


def test_a_file_that_is_as_it_was_fetched_is_replaced_and_an_edited_one_is_not(home: Home) -> None:
    first = home.receive({"out/a": "1", "out/b": "1"})
    home.write("out/b", "edited")
    report = home.receive({"out/a": "2", "out/b": "2"}, fetched=first.written)
    assert home.files == {"out/a": "2", "out/b": "edited", "out/b.from-job": "2"}
    assert (report.replaced, report.beside) == (1, {"out/b": "out/b.from-job"})


def test_a_version_beside_is_itself_not_overwritten(home: Home) -> None:
    home.write("a", "mine")
    home.write("a.from-job", "mine, too")
    assert home.receive({"a": "new"}).beside == {"a": "a.from-job.2"}
    assert home.files == {"a": "mine", "a.from-job": "mine, too", "a.from-job.2": "new"}


def test_links_and_files_in_the_way_stay_and_nothing_is_written_through_them(home: Home, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (home.place / "folder").symlink_to(outside)
    (home.place / "file").symlink_to(outside / "file")
    home.write("plain", "a file")
    report = home.receive({"folder/file": "new", "file": "new", "plain/x": "new"}, overwrite=True)
    assert [path.read_text() for path in outside.iterdir()] == ["mine"]
    assert home.files == {
        "folder.from-job/file": "new", "file.from-job": "new", "plain": "a file", "plain.from-job/x": "new",
    }  # fmt: skip
    assert set(report.beside) == {"folder/file", "file", "plain/x"}


def test_protected_files_are_dropped_even_when_overwriting(home: Home) -> None:
    home.write(".git/config", "[core]")
    report = home.receive(
        {".git/config": "evil", ".git/hooks/pre-commit": "evil", "m/__pycache__/m.pyc": "evil", "ok": "ok"},
        overwrite=True,
        executable=True,
    )
    assert home.files == {".git/config": "[core]", "ok": "ok"}
    assert report.protected == [".git/config", ".git/hooks/pre-commit"]


def test_a_new_executable_bit_is_reported_and_an_old_one_is_not(home: Home) -> None:
    home.write("old.sh", "old", 0o755)
    home.write("data", "old", 0o640)
    shipped = {"old.sh": digest("old"), "data": digest("old")}
    report = home.receive({"old.sh": "new", "data": "new", "made.sh": "new"}, shipped=shipped, executable=True)
    assert report.executable == ["data", "made.sh"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.place.iterdir()}
    assert modes == {"old.sh": 0o755, "data": 0o750, "made.sh": 0o755}


def test_the_umask_of_the_user_holds_for_new_files(home: Home) -> None:
    home.receive({"d/private": "x"}, umask=0o077)
    assert (home.place / "d/private").stat().st_mode & 0o777 == 0o600
    assert (home.place / "d").stat().st_mode & 0o777 == 0o700


def test_an_incomplete_file_leaves_nothing(home: Home) -> None:
    root = os.open(home.place, os.O_RDONLY)
    directory = ReturnDirectory(root, ReturnPolicy(origin="job"))
    directory.begin("deep/a", 10, executable=False)
    directory.write(b"half")
    with pytest.raises(ProtocolError):
        directory.finish()
    directory.begin("b", 10, executable=False)
    directory.close()
    os.close(root)
    assert list(home.place.iterdir()) == []


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", "", "a//b", "./a"])
def test_a_path_that_leads_outside_is_refused(home: Home, path: str) -> None:
    with pytest.raises(ProtocolError):
        home.receive({path: "x"})


CONTENTS = st.sampled_from(["", "1", "22", "333"])
TREES = st.dictionaries(st.sampled_from(["a", "b", "d/a", "d/b", "a/x"]), CONTENTS, max_size=4)


@given(shipped=TREES, local=TREES, returned=TREES, fetched=TREES)
def test_no_content_is_lost_that_the_grid_did_not_write(
    tmp_path_factory: pytest.TempPathFactory,
    shipped: dict[str, str],
    local: dict[str, str],
    returned: dict[str, str],
    fetched: dict[str, str],
) -> None:
    home = Home(tmp_path_factory.mktemp("law"))
    for path, text in local.items():
        if not any(other.startswith(f"{path}/") or path.startswith(f"{other}/") for other in home.files):
            home.write(path, text)
    before = home.files
    returned = {path: text for path, text in returned.items() if not (path == "a" and "a/x" in returned)}
    digests = ({path: digest(text) for path, text in tree.items()} for tree in (shipped, fetched))
    policy = dict(zip(("shipped", "fetched"), digests, strict=True))
    report = home.receive(returned, shipped=policy["shipped"], fetched=policy["fetched"])
    after = home.files
    for path, text in before.items():
        known = {shipped.get(path), fetched.get(path), returned.get(path)}
        assert after.get(path) == text or text in known
    for path, text in returned.items():
        if shipped.get(path) != text:
            assert after[report.beside.get(path, path)] == text


def test_the_umask_is_read_without_being_changed() -> None:
    mask = os.umask(0o027)
    try:
        assert current_umask() == 0o027
    finally:
        os.umask(mask)
