"""Streams over a link: no side sends more than it was given credit for, and a broken link breaks them in words."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from distributed_grid import wire
from distributed_grid.agent.files.attempt_files import AttemptFileReader
from distributed_grid.control.agent_files import MAX_ANSWERS, MAX_STREAMS, AttemptFiles, ContentSender, RemoteFiles
from distributed_grid.domain.jobs import Attempt
from distributed_grid.errors import GridError, NotFound, ProtocolError, Unreachable
from tests.support import odd_files


class Wire:
    """An agent that reads its files and answers over a wire that counts."""

    nodes = ("gpu2",)

    def __init__(self, root: Path) -> None:
        self.files = RemoteFiles({"gpu2": self})
        self.reading = AttemptFileReader(root, self._answer)
        self.credit = self.sent = 0

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: wire.ToAgent) -> None:
        if isinstance(message, wire.ReadFile | wire.ReadCredit):
            self.credit += message.credit
        assert isinstance(message, wire.ReadFile | wire.ReadCredit | wire.CloseStream | wire.ListFiles)
        asyncio.get_running_loop().call_soon(self.reading.received, message)

    def _answer(self, message: wire.FileChunk | wire.FileListing) -> None:
        assert wire.decode_from_agent(wire.encode(message)) == message
        if isinstance(message, wire.FileChunk):
            assert len(message.data) <= wire.MAX_CHUNK_BYTES
            self.sent += len(message.data)
            assert self.sent <= self.credit, "more than was given credit for"
        self.files.received(message, self)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    work = tmp_path / "a.1" / "work"
    work.mkdir(parents=True)
    (tmp_path / "a.1" / "stdout").write_bytes(bytes(range(256)) * 10_000)
    (work / "model").write_bytes(b"weights")
    (work / "out").symlink_to("/etc/passwd")
    (tmp_path / "secret").write_bytes(b"no")
    return tmp_path


def test_a_large_file_arrives_whole_and_never_beyond_its_credit(root: Path) -> None:
    async def story() -> None:
        link = Wire(root)
        start, data = await link.files.read("gpu2", "a.1", b"stdout", 100, 10_000_000)
        assert (start, data) == (100, (bytes(range(256)) * 10_000)[100:])
        start, tail = await link.files.read("gpu2", "a.1", b"stdout", 10, 100, from_end=True)
        assert (start, tail) == (2_560_000 - 10, bytes(range(246, 256)))

    asyncio.run(story())


def test_what_a_reader_asked_for_is_the_most_it_gets(root: Path) -> None:
    async def story() -> None:
        link = Wire(root)
        _, data = await link.files.read("gpu2", "a.1", b"stdout", 0, 1000)
        assert len(data) == link.sent == link.credit == 1000

    asyncio.run(story())


@pytest.mark.parametrize(
    "name", [b"work/../../secret", b"../secret", b"work/out", b"spec.json", b"work", b"/etc/passwd"]
)
def test_nothing_outside_an_attempts_own_files_can_be_read(root: Path, name: bytes) -> None:
    async def story() -> None:
        with pytest.raises(NotFound, match="gpu2: "):
            await Wire(root).files.read("gpu2", "a.1", name, 0, 1000)

    asyncio.run(story())


@pytest.mark.parametrize("kind", odd_files.KINDS)
@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_whatever_a_job_puts_in_place_of_its_output_hangs_nobody(root: Path, kind: str, local: bool) -> None:
    odd_files.put(kind, root / "a.1" / "stdout")
    odd_files.put(kind, root / "a.1" / "work" / "odd")
    attempt = Attempt(number=1, lease_id="a.1", node="gpu2", fence=1, assigned_at_ms=0)

    async def story() -> None:
        files = AttemptFiles(root, Wire(root).files, lambda node: local)
        for name in (b"stdout", b"work/odd"):
            if kind == "huge file":
                assert await files.read(attempt, name, 5, 100) == (5, bytes(100))
                assert await files.read(attempt, name, 7, 100, from_end=True) == ((1 << 40) - 7, bytes(7))
                continue
            with contextlib.suppress(NotFound):
                assert (await files.read(attempt, name, 0, 100))[1] == b""
        listed = await files.find(attempt, ("**",))
        assert {entry.path for entry in listed.entries} >= {"model"}
        assert (await files.read(attempt, b"work/model", 0, 100))[1] == b"weights"

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_a_working_directory_that_became_a_link_is_not_listed(root: Path, local: bool) -> None:
    (root / "a.1" / "work").rename(root / "a.1" / "moved")
    (root / "a.1" / "work").symlink_to("/etc")
    attempt = Attempt(number=1, lease_id="a.1", node="gpu2", fence=1, assigned_at_ms=0)

    async def story() -> None:
        files = AttemptFiles(root, Wire(root).files, lambda node: local)
        with pytest.raises(NotFound, match="not there any more"):
            await files.find(attempt, ("**",))
        with contextlib.suppress(NotFound):
            assert (await files.read(attempt, b"work/passwd", 0, 100))[1] == b""

    asyncio.run(story())


def test_a_stream_that_is_closed_while_it_is_read_leaves_nothing_open(root: Path) -> None:
    async def story() -> None:
        sent: list[object] = []
        reading = AttemptFileReader(root, sent.append)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(50):
            reading.received(wire.ReadFile(stream=number, lease_id="a.1", name=b"stdout", offset=0, credit=1_000_000))
            if number % 2:
                await asyncio.sleep(0)
            reading.received(wire.ListFiles(stream=number, lease_id="a.1", patterns=("**",)))
            reading.received(wire.CloseStream(number))
        reading.received(wire.ReadFile(stream=99, lease_id="a.1", name=b"stdout", offset=0, credit=1000))
        reading.close()
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(story())


class Liar:
    """An agent that answers each message with whatever it likes."""

    nodes = ("gpu2",)

    def __init__(self, answers: Callable[[wire.ToAgent], Iterable[wire.FileChunk | wire.FileListing]]) -> None:
        self.files = RemoteFiles({"gpu2": self})
        self._answers = answers

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: wire.ToAgent) -> None:
        for answer in self._answers(message):
            self.files.received(answer, self)


def test_an_agent_that_sends_more_than_it_was_asked_for_is_not_believed() -> None:
    def answers(message: wire.ToAgent) -> Iterator[wire.FileChunk]:
        if isinstance(message, wire.ReadFile):
            yield wire.FileChunk(message.stream, b"x" * (message.credit + 1))

    async def story() -> None:
        with pytest.raises(ProtocolError, match="more than it was asked for"):
            await Liar(answers).files.read("gpu2", "a.1", b"stdout", 0, 1000)

    asyncio.run(story())


def test_a_link_that_breaks_breaks_its_streams() -> None:
    class Mute:
        nodes = ("gpu2",)

        def send(self, message: wire.ToAgent) -> None:
            pass

        def close(self, why: str) -> None:
            pass

    async def story() -> None:
        mute = Mute()
        files = RemoteFiles({"gpu2": mute})
        reading = asyncio.create_task(files.read("gpu2", "a.1", b"stdout", 0, 1000))
        await asyncio.sleep(0)
        files.gone(mute)
        with pytest.raises(Unreachable, match="lost"):
            await reading
        with pytest.raises(Unreachable, match="not connected"):
            await files.read("gpu1", "a.1", b"stdout", 0, 1000)

    asyncio.run(story())


def test_a_listing_of_any_length_arrives_in_pages(tmp_path: Path) -> None:
    work = tmp_path / "a.1" / "work"
    folder = work.joinpath(*(letter * 200 for letter in "abcdefghijklmno"))
    folder.mkdir(parents=True)
    names = {f"{number:05}-{'x' * 200}" for number in range(2 * wire.MAX_LISTING_BYTES // 3000)}
    for name in names:
        (folder / name).touch()
    for number in range(250):
        os.mkfifo(work / f"pipe{number}")

    async def story() -> None:
        link = Wire(tmp_path)
        found = await link.files.find("gpu2", "a.1", ("**",))
        assert {entry.path.rpartition("/")[2] for entry in found.entries} == names
        assert len(found.skipped) == 250

    asyncio.run(story())


def test_an_agent_that_answers_without_end_does_not_fill_the_memory() -> None:
    def answers(message: wire.ToAgent) -> Iterator[wire.FileListing]:
        if isinstance(message, wire.ListFiles):
            for _ in range(5 * MAX_ANSWERS):
                yield wire.FileListing(stream=message.stream, more=True)

    async def story() -> None:
        with pytest.raises(ProtocolError, match="more than it was asked for"):
            await Liar(answers).files.find("gpu2", "a.1", ("**",))

    asyncio.run(story())


class Fetcher:
    """An agent that fetches, and keeps what it is sent."""

    nodes = ("gpu2",)

    def __init__(self) -> None:
        self.pieces: list[wire.FetchedChunk] = []

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: wire.ToAgent) -> None:
        assert isinstance(message, wire.FetchedChunk)
        self.pieces.append(message)

    @property
    def size(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)


class Contents:
    """A store with one content, whose readers are counted."""

    def __init__(self) -> None:
        self.opened: list[io.BytesIO] = []

    def open(self, digest: str) -> io.BytesIO:
        if digest != "there":
            raise GridError("no such content")
        self.opened.append(io.BytesIO(b"x" * 1_000_000))
        return self.opened[-1]


def test_content_is_sent_as_far_as_the_credit_goes_and_closed_at_its_end() -> None:
    contents, agent = Contents(), Fetcher()
    supply = ContentSender(contents)
    supply.received(wire.FetchContent(1, "there", 300_000), agent)
    assert agent.size == 300_000
    supply.received(wire.FetchCredit(1, 100_000), agent)
    assert agent.size == 400_000
    supply.received(wire.FetchCredit(1, 10_000_000), agent)
    assert agent.size == 400_000 + wire.STREAM_CREDIT_BYTES, "no more is on its way than a reader has room for"
    supply.received(wire.FetchCredit(1, 400_000), agent)
    assert agent.size == 1_000_000
    assert agent.pieces[-1].data == b""
    assert contents.opened[0].closed


def test_what_is_not_there_or_too_much_at_once_is_said() -> None:
    contents, agent = Contents(), Fetcher()
    supply = ContentSender(contents)
    supply.received(wire.FetchContent(1, "elsewhere", 100), agent)
    assert "not here" in agent.pieces[-1].problem
    for stream in range(2, MAX_STREAMS + 3):
        supply.received(wire.FetchContent(stream, "there", 1), agent)
    assert "too many" in agent.pieces[-1].problem
    supply.gone(agent)
    assert all(reader.closed for reader in contents.opened)
