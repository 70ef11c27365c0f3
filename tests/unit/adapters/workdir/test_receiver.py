"""Files from elsewhere land whole, below the target, or not at all."""

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

from distributed_grid.adapters.workdir import Receiver
from distributed_grid.errors import GridError, ProtocolError, Refused, StoreFailed
from tests.unit.adapters.workdir.trees import look, plant


def send(receiver: Receiver, path: str, content: bytes, mode: int = 0o600) -> None:
    receiver.begin(path, len(content), mode)
    receiver.write(content[:3])
    receiver.write(content[3:])
    receiver.finish(hashlib.sha256(content).hexdigest())


def test_files_arrive_with_their_parents_and_x_bits_and_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with Receiver(tmp_path / "new" / "to") as receiver:
            send(receiver, "a", b"one")
            send(receiver, "out/deep/run", b"#! two", 0o700)
            send(receiver, "out/caf\udce9", b"")
    finally:
        os.umask(before)
    to = tmp_path / "new" / "to"
    assert look(to) == {"a": b"one", "out": None, "out/deep": None, "out/deep/run": b"#! two", "out/caf\udce9": b""}
    assert [(to / path).stat().st_mode & 0o777 for path in ("a", "out/deep/run")] == [0o640, 0o750]


def test_a_file_of_that_name_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    plant(tmp_path, {"a": b"old"})
    with Receiver(tmp_path) as receiver:
        receiver.begin("a", 3, 0o600)
        receiver.write(b"ne")
        assert look(tmp_path) == {"a": b"old"}
        receiver.write(b"w")
        receiver.finish()
    assert look(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a\0b", "a/", "x" * 300])
def test_a_path_that_is_not_below_the_target_is_refused(tmp_path: Path, path: str) -> None:
    with Receiver(tmp_path / "to") as receiver, pytest.raises(ProtocolError):
        receiver.begin(path, 1, 0o600)
    assert look(tmp_path) == {"to": None}


@pytest.mark.parametrize("link", ["../outside", "/", "inside", "."])
def test_a_link_among_the_parents_is_refused_even_if_it_stays_inside(tmp_path: Path, link: str) -> None:
    plant(tmp_path, {"outside": None, "to/inside": None, "to/sub": link})
    with Receiver(tmp_path / "to") as receiver, pytest.raises(Refused, match="sub: is a link"):
        receiver.begin("sub/x", 1, 0o600)
    assert look(tmp_path) == {"outside": None, "to": None, "to/inside": None, "to/sub": link}


def test_whatever_but_a_file_stands_under_the_name_is_refused_and_stays(tmp_path: Path) -> None:
    plant(tmp_path, {"secret": b"safe", "to/link": "../secret", "to/dir": None, "to/file": b""})
    os.mkfifo(tmp_path / "to" / "fifo")
    with Receiver(tmp_path / "to") as receiver:
        for path, reason in [
            ("link", "is a link"),
            ("dir", "is a directory"),
            ("fifo", "no ordinary file"),
            ("file/x", "is a file"),
        ]:
            with pytest.raises(Refused, match=reason):
                receiver.begin(path, 1, 0o600)
        send(receiver, "other", b"goes on")
    assert (tmp_path / "secret").read_bytes() == b"safe"
    assert (tmp_path / "to" / "link").is_symlink()


def test_a_link_that_appears_meanwhile_is_not_written_through(tmp_path: Path) -> None:
    plant(tmp_path, {"secret": b"safe", "to": None})
    with Receiver(tmp_path / "to") as receiver:
        receiver.begin("a", 1, 0o600)
        receiver.write(b"x")
        (tmp_path / "to" / "a").symlink_to("../secret")
        with pytest.raises(Refused, match="is a link"):
            receiver.finish()
    assert look(tmp_path) == {"secret": b"safe", "to": None, "to/a": "../secret"}


def test_a_file_that_is_not_as_announced_is_dropped(tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
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
        with pytest.raises(ProtocolError, match="before the name"):
            receiver.write(b"x")
        receiver.begin("unfinished", 1, 0o600)
        with pytest.raises(ProtocolError, match="before the last one"):
            receiver.begin("next", 1, 0o600)
    receiver.close()
    assert look(tmp_path) == {}


def test_a_killed_receiver_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom distributed_grid.adapters.workdir import Receiver\n"
        "receiver = Receiver(sys.argv[1])\nreceiver.begin('a/b', 10, 0o600)\nreceiver.write(b'half')\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert look(tmp_path) == {"a": None}


def test_where_files_need_a_name_an_unfinished_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_nameless_files(path: bytes, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "as some file systems say")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without_nameless_files)
    with Receiver(tmp_path) as receiver:
        send(receiver, "a", b"one")
        send(receiver, "a", b"two")
        receiver.begin("b", 9, 0o600)
        receiver.write(b"half")
        assert len(look(tmp_path)) == 2
    assert look(tmp_path) == {"a": b"two"}


def test_a_full_disk_is_said_and_leaves_nothing(small_disk: Path) -> None:
    with Receiver(small_disk) as receiver:
        receiver.begin("big", 3 << 20, 0o600)
        with pytest.raises(StoreFailed, match="big: could not write the file: No space left"):
            receiver.write(bytes(3 << 20))
        receiver.abort()
        send(receiver, "small", b"fits")
    assert look(small_disk) == {"small": b"fits"}


@given(
    paths=st.lists(st.lists(st.sampled_from(["a", "b", "l", "..", ".", "", "/"]), max_size=4).map("/".join), max_size=6)
)
def test_nothing_ever_lands_outside(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> None:
    place = plant(tmp_path_factory.mktemp("place"), {"outside/a": b"safe", "to/l": "../outside", "to/b/l": "../.."})
    with Receiver(place / "to") as receiver:
        for path in paths:
            try:
                send(receiver, path, b"x")
            except GridError:
                receiver.abort()
    assert look(place / "outside") == {"a": b"safe"}
    assert sorted(os.listdir(place)) == ["outside", "to"]
