"""Materialized trees and received files: exactly what was announced, whole, and never a byte outside the target."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import GridError, ProtocolError, Refused, StoreFailed
from distributed_grid.trees.content_store import ContentMissing, ContentStore
from distributed_grid.trees.manifest import EXECUTABLE, Manifest, ManifestEntry
from distributed_grid.trees.scan import scan_directory
from distributed_grid.trees.tree_writer import FileReceiver, materialize
from tests.unit.trees.tree_files import Tree, read_tree, write_tree

TREE: Tree = {"a": b"one", "sub/b": b"two" * 100_000, "sub/deep/empty": b"", "l": "sub/b", "sub/d": None}


@pytest.fixture
def taken(tmp_path: Path, store: ContentStore) -> Manifest:
    return scan_directory(write_tree(tmp_path / "from", TREE), store).manifest


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


def test_a_second_call_finds_everything_done(taken: Manifest, store: ContentStore, target: Path) -> None:
    first, second = materialize(taken, store, target), materialize(taken, store, target)
    assert (first.written, first.kept, second.written, second.kept) == (4, 0, 0, 4)


def test_an_open_directory_does_as_well_as_its_path(taken: Manifest, store: ContentStore, target: Path) -> None:
    fd = os.open(target, os.O_RDONLY)
    materialize(taken, store, fd)
    os.close(fd)  # it is still the caller's
    assert read_tree(target) == read_tree(target.parent / "from")


def test_what_a_crash_left_is_mended(taken: Manifest, store: ContentStore, target: Path) -> None:
    write_tree(target, {"a": b"on", "sub/b": bytes(300_000), "l": "elsewhere", "sub/deep": None, "other": b"stays"})
    (target / "l").unlink()
    (target / "l").symlink_to("/etc/passwd")
    laid = materialize(taken, store, target)
    assert laid.written == 4
    assert read_tree(target) == read_tree(target.parent / "from") | {"other": b"stays"}


def test_a_file_in_place_of_a_link_and_a_link_in_place_of_a_file_are_replaced(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    outside = target.parent / "outside"
    outside.write_bytes(b"untouched")
    write_tree(target, {"l": b"a file", "a": "../outside"})
    materialize(taken, store, target)
    assert read_tree(target) == read_tree(target.parent / "from")
    assert outside.read_bytes() == b"untouched"


def test_a_link_on_the_way_is_refused_and_nothing_goes_through_it(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    (target.parent / "outside").mkdir()
    (target / "sub").symlink_to("../outside")
    with pytest.raises(Refused, match="sub: is a link, and links are not followed"):
        materialize(taken, store, target)
    assert read_tree(target.parent / "outside") == {}


def test_a_job_that_writes_into_its_files_does_not_change_the_store(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    materialize(taken, store, target)
    with open(target / "sub/b", "r+b") as file:
        file.write(b"changed")
    (target.parent / "again").mkdir()
    materialize(taken, store, target.parent / "again")
    assert read_tree(target.parent / "again") == read_tree(target.parent / "from")


def test_missing_contents_are_named_before_anything_is_made(taken: Manifest, store: ContentStore, target: Path) -> None:
    for digest in taken.contents():
        (Path(store.root) / digest[:2] / digest).unlink()
    with pytest.raises(ContentMissing, match="3 of the files needed") as caught:
        materialize(taken, store, target)
    assert set(caught.value.digests) == set(taken.contents())
    assert read_tree(target) == {}


def test_a_store_on_another_disk_serves_as_well(small_disk: Path, tmp_path: Path) -> None:
    root = write_tree(tmp_path / "from", TREE)
    store = ContentStore(small_disk / "store")
    (tmp_path / "to").mkdir()
    materialize(scan_directory(root, store).manifest, store, tmp_path / "to")
    assert read_tree(tmp_path / "to") == read_tree(root)


def test_a_full_disk_is_said_and_the_rest_follows_when_there_is_room(
    small_disk: Path, tmp_path: Path, store: ContentStore
) -> None:
    root = write_tree(tmp_path / "from", {name: name.encode() * 900_000 for name in "ab"})
    manifest = scan_directory(root, store).manifest
    write_tree(small_disk, {"ballast": bytes(1 << 20), "to": None})
    with pytest.raises(StoreFailed, match="No space left"):
        materialize(manifest, store, small_disk / "to")
    assert set(read_tree(small_disk / "to")) == {"a"}
    (small_disk / "ballast").unlink()
    materialize(manifest, store, small_disk / "to")
    assert read_tree(small_disk / "to") == read_tree(root)


PATHS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "out"]), min_size=1, max_size=3).map("/".join)
TARGETS = st.one_of(PATHS, st.just("/tmp"), st.just("../outside"), st.just("../../outside"))


@given(data=st.data())
def test_no_manifest_whatever_it_says_writes_outside_the_target(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    store = ContentStore(place / "store")
    digest = store.add(b"owned")
    write_tree(place, {"outside/a": b"safe", "jobs/to": None})
    if data.draw(st.booleans()):
        (place / "jobs/to/b").symlink_to("../../outside")
    entry = st.one_of(
        st.builds(lambda path: ManifestEntry(path, "file", 5, digest=digest), PATHS),
        st.builds(lambda path: ManifestEntry(path, "dir", mode=EXECUTABLE), PATHS),
        st.builds(lambda path, target: ManifestEntry(path, "link", target=target), PATHS, TARGETS),
    )
    entries = data.draw(st.lists(entry, max_size=6))
    if data.draw(st.booleans()):
        entries = sorted({entry.path: entry for entry in entries}.values(), key=lambda entry: entry.path.split("/"))
    try:
        materialize(Manifest(tuple(entries)), store, place / "jobs/to")
    except GridError:
        pass
    assert read_tree(place / "outside") == {"a": b"safe"}
    assert sorted(os.listdir(place / "jobs")) == ["to"]
    assert sorted(os.listdir(place)) == ["jobs", "outside", "store"]
    for folder, _, names in os.walk(place / "jobs/to"):
        for name in names:
            if name != "b":  # planted above
                assert os.path.realpath(os.path.join(folder, name)).startswith(str(place / "jobs/to"))


def send(receiver: FileReceiver, path: str, content: bytes, mode: int = 0o600) -> None:
    receiver.begin(path, len(content), mode)
    receiver.write(content[:3])
    receiver.write(content[3:])
    receiver.finish(hashlib.sha256(content).hexdigest())


def test_files_arrive_with_their_parents_and_x_bits_and_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with FileReceiver(tmp_path / "new" / "to") as receiver:
            send(receiver, "a", b"one")
            send(receiver, "out/deep/run", b"#! two", 0o700)
            send(receiver, "out/caf\udce9", b"")
    finally:
        os.umask(before)
    to = tmp_path / "new" / "to"
    assert read_tree(to) == {
        "a": b"one",
        "out": None,
        "out/deep": None,
        "out/deep/run": b"#! two",
        "out/caf\udce9": b"",
    }
    assert [(to / path).stat().st_mode & 0o777 for path in ("a", "out/deep/run")] == [0o640, 0o750]


def test_a_file_of_that_name_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": b"old"})
    with FileReceiver(tmp_path) as receiver:
        receiver.begin("a", 3, 0o600)
        receiver.write(b"ne")
        assert read_tree(tmp_path) == {"a": b"old"}
        receiver.write(b"w")
        receiver.finish()
    assert read_tree(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a\0b", "a/", "x" * 300])
def test_a_path_that_is_not_below_the_target_is_refused(tmp_path: Path, path: str) -> None:
    with FileReceiver(tmp_path / "to") as receiver, pytest.raises(ProtocolError):
        receiver.begin(path, 1, 0o600)
    assert read_tree(tmp_path) == {"to": None}


@pytest.mark.parametrize("link", ["../outside", "/", "inside", "."])
def test_a_link_among_the_parents_is_refused_even_if_it_stays_inside(tmp_path: Path, link: str) -> None:
    write_tree(tmp_path, {"outside": None, "to/inside": None, "to/sub": link})
    with FileReceiver(tmp_path / "to") as receiver, pytest.raises(Refused, match="sub: is a link"):
        receiver.begin("sub/x", 1, 0o600)
    assert read_tree(tmp_path) == {"outside": None, "to": None, "to/inside": None, "to/sub": link}


def test_whatever_but_a_file_stands_under_the_name_is_refused_and_stays(tmp_path: Path) -> None:
    write_tree(tmp_path, {"secret": b"safe", "to/link": "../secret", "to/dir": None, "to/file": b""})
    os.mkfifo(tmp_path / "to" / "fifo")
    with FileReceiver(tmp_path / "to") as receiver:
        for path, reason in [
            ("link", "is a link"),
            ("dir", "is a directory"),
            ("fifo", "not a regular file"),
            ("file/x", "is a file"),
        ]:
            with pytest.raises(Refused, match=reason):
                receiver.begin(path, 1, 0o600)
        send(receiver, "other", b"goes on")
    assert (tmp_path / "secret").read_bytes() == b"safe"
    assert (tmp_path / "to" / "link").is_symlink()


def test_a_link_that_appears_meanwhile_is_not_written_through(tmp_path: Path) -> None:
    write_tree(tmp_path, {"secret": b"safe", "to": None})
    with FileReceiver(tmp_path / "to") as receiver:
        receiver.begin("a", 1, 0o600)
        receiver.write(b"x")
        (tmp_path / "to" / "a").symlink_to("../secret")
        with pytest.raises(Refused, match="is a link"):
            receiver.finish()
    assert read_tree(tmp_path) == {"secret": b"safe", "to": None, "to/a": "../secret"}


def test_a_file_that_is_not_as_announced_is_dropped(tmp_path: Path) -> None:
    with FileReceiver(tmp_path) as receiver:
        receiver.begin("long", 2, 0o600)
        with pytest.raises(ProtocolError, match="longer"):
            receiver.write(b"abc")
        receiver.abort()
        receiver.begin("short", 2, 0o600)
        with pytest.raises(ProtocolError, match="ended after 0 of 2"):
            receiver.finish()
        receiver.begin("damaged", 1, 0o600)
        receiver.write(b"x")
        with pytest.raises(ProtocolError, match="damaged"):
            receiver.finish(hashlib.sha256(b"y").hexdigest())
        with pytest.raises(ProtocolError, match="before its name"):
            receiver.write(b"x")
        receiver.begin("unfinished", 1, 0o600)
        with pytest.raises(ProtocolError, match="before the last one"):
            receiver.begin("next", 1, 0o600)
    receiver.close()
    assert read_tree(tmp_path) == {}


def test_a_killed_receiver_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom distributed_grid.trees.tree_writer import FileReceiver\n"
        "receiver = FileReceiver(sys.argv[1])\nreceiver.begin('a/b', 10, 0o600)\nreceiver.write(b'half')\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert read_tree(tmp_path) == {"a": None}


def test_where_files_need_a_name_an_unfinished_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_nameless_files(path: bytes, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "as some file systems say")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without_nameless_files)
    with FileReceiver(tmp_path) as receiver:
        send(receiver, "a", b"one")
        send(receiver, "a", b"two")
        receiver.begin("b", 9, 0o600)
        receiver.write(b"half")
        assert len(read_tree(tmp_path)) == 2
    assert read_tree(tmp_path) == {"a": b"two"}


def test_a_full_disk_is_said_and_leaves_nothing(small_disk: Path) -> None:
    with FileReceiver(small_disk) as receiver:
        receiver.begin("big", 3 << 20, 0o600)
        with pytest.raises(StoreFailed, match="big: could not write the file: No space left"):
            receiver.write(bytes(3 << 20))
        receiver.abort()
        send(receiver, "small", b"fits")
    assert read_tree(small_disk) == {"small": b"fits"}


@given(
    paths=st.lists(st.lists(st.sampled_from(["a", "b", "l", "..", ".", "", "/"]), max_size=4).map("/".join), max_size=6)
)
def test_nothing_ever_lands_outside(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> None:
    place = write_tree(
        tmp_path_factory.mktemp("place"), {"outside/a": b"safe", "to/l": "../outside", "to/b/l": "../.."}
    )
    with FileReceiver(place / "to") as receiver:
        for path in paths:
            try:
                send(receiver, path, b"x")
            except GridError:
                receiver.abort()
    assert read_tree(place / "outside") == {"a": b"safe"}
    assert sorted(os.listdir(place)) == ["outside", "to"]
