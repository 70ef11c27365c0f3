"""A keeper and its memory server, each killed in turn: acknowledged content survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.errors import TimedOut
from distributed_grid.memory.client.block_client import BlockClient
from distributed_grid.memory.client.server_connection import ServerConnection
from distributed_grid.memory.protocol.control_messages import JOURNAL
from distributed_grid.memory.protocol.frames import CHUNK_BYTES, READ, WRITE, StatusError
from distributed_grid.memory.supervisor.supervisor import ServerSupervisor
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import CopiesFreedReport, MemoryFailedReport, MemoryServedReport, ServeMemoryOrder, Ticket
from tests.component.memory.memory_servers import FakeDirectory, Lender, end, lenders, wait_for

MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ("a-folder-deeper-than-a-socket-may-be-" * 3) / "memory"


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@pytest.fixture
def blocks(directory: FakeDirectory) -> Iterator[BlockClient]:
    blocks = BlockClient(directory, retry_seconds=30)
    yield blocks
    blocks.close()


@pytest.fixture
def lender(folder: Path) -> Iterator[Lender]:
    with lenders(folder) as (one,):
        yield one


def test_what_is_served_is_told_again_when_asked_again(lender: Lender) -> None:
    first = lender.served
    assert lender.open() == first
    assert first.endpoint.port > 0
    assert len(first.key) >= 32


def test_nothing_but_its_owner_gets_in(lender: Lender) -> None:
    assert lender.folder.stat().st_mode & 0o777 == 0o700
    for name in ("memory.sock", "control.sock", "memory.log", "supervisor.lock", "server.lock"):
        assert (lender.folder / name).stat().st_mode & 0o077 == 0, name
    assert lender.served.key.hex() not in (lender.folder / "memory.log").read_text()
    assert lender.served.key.hex() not in repr(lender.served) + repr(lender.supervisor.ready)
    key: bytes = lender.served.key
    assert key.hex().encode() not in Path(f"/proc/{lender.pid}/cmdline").read_bytes()


def test_the_server_is_a_process_that_needs_nobody(lender: Lender) -> None:
    assert os.getsid(lender.pid) == lender.pid
    assert os.readlink(f"/proc/{lender.pid}/cwd") == "/"


def test_a_killed_server_loses_nothing_and_the_writer_only_waits(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    size = 8 * MIB
    directory.allocate("b", size, lender)
    life, port = lender.served.endpoint.incarnation, lender.served.endpoint.port
    acknowledged: list[tuple[int, bytes]] = []
    enough = threading.Event()

    def write_on() -> None:
        number = 0
        while not enough.is_set():
            at = (number * 700_001) % (size - 300_000)
            data = number.to_bytes(4, "big") * 75_000
            blocks.write("b", data, at)
            acknowledged.append((at, data))
            number += 1

    writer = threading.Thread(target=write_on)
    writer.start()
    for _ in range(4):
        seen = len(acknowledged)
        wait_for(lambda seen=seen: len(acknowledged) > seen + 5)
        lender.kill_server()
        wait_for(lambda: lender.served)
    enough.set()
    writer.join(30)
    assert not writer.is_alive()
    model = bytearray(size)
    for at, data in acknowledged:
        model[at : at + len(data)] = data
    assert blocks.read("b", size) == model
    assert lender.served.endpoint.incarnation == life
    assert lender.served.endpoint.port == port
    assert lender.served.copies == ("b:1",)


def test_a_reader_sees_a_killed_server_as_a_delay(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    directory.use_path = False
    directory.allocate("b", 16 * MIB, lender)
    data = os.urandom(MIB) * 16
    blocks.write("b", data)
    for _ in range(3):
        killer = threading.Thread(target=lender.kill_server)
        killer.start()
        assert blocks.read("b", 16 * MIB) == data
        killer.join()
        assert blocks.read("b", 100, 5) == data[5:105]


def test_a_new_keeper_adopts_the_server_that_outlived_the_last(
    directory: FakeDirectory, blocks: BlockClient, folder: Path, lender: Lender
) -> None:
    directory.allocate("b", 3 * CHUNK_BYTES, lender)
    blocks.write("b", b"kept" * 1000)
    before, pid = lender.served, lender.pid
    lender.leave()
    assert blocks.read("b", 4) == b"kept", "it serves on without a keeper"
    lender.run(lender.supervisor.start())
    assert lender.served.endpoint == before.endpoint
    assert lender.served.key == before.key
    assert lender.served.copies == ("b:1",)
    assert lender.pid == pid
    lender.kill_server()
    wait_for(lambda: lender.served)
    assert blocks.read("b", 8) == b"keptkept", "the descriptors came along"


def test_a_server_that_holds_nothing_ends_with_its_keeper(lender: Lender) -> None:
    pid = lender.pid
    lender.leave()
    lender.leave()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


def test_when_both_are_gone_it_is_another_life_and_only_disk_copies_are_left(
    directory: FakeDirectory, folder: Path, blocks: BlockClient, lender: Lender
) -> None:
    directory.allocate("ram", CHUNK_BYTES, lender)
    directory.allocate("disk", 2 * CHUNK_BYTES + 5, lender, on_disk=True)
    blocks.write("ram", b"r" * CHUNK_BYTES)
    blocks.write("disk", b"d" * (2 * CHUNK_BYTES + 5))
    blocks.write("disk", b"over", 7)
    life, pid = lender.served.endpoint.incarnation, lender.pid
    assert lender.served.on_disk == ("disk:1",)
    lender.leave()
    end(pid)
    lender.run(lender.supervisor.start())
    assert lender.served is None
    served = lender.open()
    assert served.endpoint.incarnation != life
    assert (served.copies, served.on_disk) == ((), ("disk:1",))
    assert blocks.read("disk", 2 * CHUNK_BYTES + 5) == b"d" * 7 + b"over" + b"d" * (2 * CHUNK_BYTES - 6)
    lender.free("disk:1")
    assert not list((folder / "spill").glob("*.block"))


AGENT = """
import asyncio, sys, time
from pathlib import Path
from distributed_grid.memory.supervisor.supervisor import ServerSupervisor
from distributed_grid.wire import ServeMemoryOrder

async def main():
    supervisor = ServerSupervisor(Path(sys.argv[1]), report=lambda report: None)
    await supervisor.start()
    await supervisor.serve(ServeMemoryOrder("gpu1"))
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_agent_leaves_its_server_to_the_next(
    directory: FakeDirectory, folder: Path, blocks: BlockClient
) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(folder)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"ready\n"
    lender = None
    try:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        lender = Lender(folder)
        assert lender.served is not None, "it was not adopted"
        pid = lender.pid
        assert lender.open().endpoint.port == lender.served.endpoint.port
        assert lender.pid == pid
        directory.allocate("b", CHUNK_BYTES, lender)
        blocks.write("b", b"x" * 10)
        assert blocks.read("b", 12) == b"x" * 10 + b"\0\0"
    finally:
        agent.stdout.close()
        if lender is not None:
            lender.close()


def test_a_second_supervisor_reports_that_the_folder_is_in_use(folder: Path, lender: Lender) -> None:
    reports: list[object] = []

    async def second() -> None:
        other = ServerSupervisor(folder, report=reports.append)
        try:
            await other.serve(ServeMemoryOrder("gpu2"))
        finally:
            await other.stop()

    lender.run(second())
    (report,) = reports
    assert isinstance(report, MemoryFailedReport)
    assert "another agent" in report.problem
    assert lender.served is not None


def test_frees_that_come_together_are_told_together(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    names = [f"b{number}" for number in range(200)]
    for name in names:
        directory.allocate(name, 4096, lender)
    blocks.write_many([(name, name.encode(), 0) for name in names])
    assert len(lender.served.copies) == 200

    def free_each() -> None:
        for name in (*names, "never-there"):
            lender.supervisor.free_copies((f"{name}:1",))

    lender.call(free_each)
    wait_for(lambda: sum(len(one.copies) for one in lender.reports if isinstance(one, CopiesFreedReport)) == 201)
    assert sum(isinstance(one, CopiesFreedReport) for one in lender.reports) <= 5
    assert lender.served.copies == ()
    assert lender.supervisor._held.descriptors.keys() == {JOURNAL}


def test_a_hold_that_runs_out_lets_go_of_memory_and_begins_another_life(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    directory.allocate("b", 4 * MIB, lender)
    directory.allocate("d", CHUNK_BYTES, lender, on_disk=True)
    blocks.write("b", b"x" * 4 * MIB)
    blocks.write("d", b"y" * CHUNK_BYTES)
    wait_for(lambda: lender.supervisor.resident_bytes >= 4 * MIB)
    life = lender.served.endpoint.incarnation
    lender.call(lambda: lender.supervisor.extend_hold(boot_ms() + 60_000))
    lender.call(lambda: lender.supervisor.extend_hold(boot_ms() + 100))
    wait_for(lambda: lender.served.endpoint.incarnation != life)
    assert (lender.served.copies, lender.served.on_disk) == ((), ("d:1",))
    report = [one for one in lender.reports if isinstance(one, MemoryServedReport)][-1]
    assert report.endpoint.incarnation == lender.served.endpoint.incarnation
    wait_for(lambda: lender.supervisor.resident_bytes == 0)
    assert blocks.read("d", 3) == b"yyy"


def test_a_server_without_a_keeper_keeps_its_hold_too(directory: FakeDirectory, lender: Lender) -> None:
    directory.allocate("b", MIB, lender)
    impatient = BlockClient(directory, retry_seconds=0.2)
    impatient.write("b", b"x" * MIB)
    pid = lender.pid
    before = directory.find_block(block_id="b")
    lender.call(lambda: lender.supervisor.extend_hold(boot_ms() + 300))
    lender.leave()

    class StillTheSame:
        def find_block(self, *, block_id: str) -> dict[str, object]:
            return before

    outside = BlockClient(StillTheSame(), retry_seconds=0.1)

    def is_let_go() -> bool:
        try:
            outside.read("b", 10)
        except TimedOut as error:
            return "wrong_incarnation" in str(error) or "moved" in str(error)
        return False

    wait_for(is_let_go)
    outside.close()
    impatient.close()
    lender.run(lender.supervisor.start())
    assert lender.served.copies == ()
    assert lender.pid == pid


def test_a_server_that_nobody_comes_for_lets_go_of_what_has_ended_and_then_of_itself(
    directory: FakeDirectory, folder: Path, blocks: BlockClient
) -> None:
    with lenders(folder, unsupervised_ms=100) as (lender,):
        directory.ends_boot_ms = boot_ms() + 600
        directory.allocate("ending", CHUNK_BYTES, lender)
        blocks.write("ending", b"e")
        pid = lender.pid
        lender.leave()
        assert blocks.read("ending", 1) == b"e"
        wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
        assert boot_ms() >= directory.ends_boot_ms


def test_a_server_that_nobody_comes_for_keeps_what_has_not_ended(
    directory: FakeDirectory, folder: Path, blocks: BlockClient
) -> None:
    with lenders(folder, unsupervised_ms=50) as (lender,):
        directory.allocate("kept", CHUNK_BYTES, lender)
        blocks.write("kept", b"k")
        directory.ends_boot_ms = boot_ms() + 300
        directory.allocate("ending", CHUNK_BYTES, lender)
        blocks.write("ending", b"e")
        pid = lender.pid
        lender.leave()
        wait_for(lambda: boot_ms() > directory.ends_boot_ms + 700)
        lender.run(lender.supervisor.start())
        assert lender.pid == pid
        assert lender.served.copies == ("kept:1",)


def test_a_server_that_cannot_listen_says_why(folder: Path) -> None:
    lender = Lender(folder, host="203.0.113.7")
    try:
        lender.run(lender.supervisor.serve(ServeMemoryOrder("gpu1", host="203.0.113.7")))
        (report,) = lender.reports
        assert isinstance(report, MemoryFailedReport)
        assert "cannot start" in report.problem
    finally:
        lender.close()


def test_numbers_say_what_was_done(directory: FakeDirectory, blocks: BlockClient, lender: Lender) -> None:
    directory.allocate("b", MIB, lender)
    blocks.write("b", b"x" * MIB)
    blocks.read("b", MIB)
    numbers = wait_for(lambda: (found := lender.call(lender.supervisor.stats))["reads"] >= 4 and found)
    assert numbers["writes"] == 4
    assert numbers["bytes_in"] == numbers["bytes_out"] == MIB
    assert MIB <= numbers["resident_bytes"] <= MIB + 65536
    assert numbers["copies"] == 1


def test_nothing_is_left_in_shared_memory_or_running(
    folder: Path, directory: FakeDirectory, blocks: BlockClient
) -> None:
    before = set(os.listdir("/dev/shm"))
    with lenders(folder) as (lender,):
        directory.allocate("b", MIB, lender)
        blocks.write("b", b"x" * MIB)
        pid = lender.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "grid" in name]


def test_a_server_is_ended_whatever_it_holds_when_its_node_is_stopped(tmp_path: Path) -> None:
    with lenders(tmp_path / "memory") as (lender,):
        directory = FakeDirectory()
        blocks = BlockClient(directory)
        directory.allocate("b1", 1000, lender)
        blocks.write("b1", b"x" * 1000)
        blocks.close()
        pid = lender.pid
        lender.run(lender.supervisor.terminate())
        lender.run(lender.supervisor.terminate())
        assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/cmdline").read_bytes() == b""


def test_a_block_that_was_never_used_is_there_under_the_next_server(tmp_path: Path) -> None:
    """The first server ends because it holds nothing; an unused grant is as good as before."""
    with lenders(tmp_path / "memory") as (lender,):
        directory = FakeDirectory()
        directory.use_path = False
        found = directory.allocate("b1", 1000, lender)
        lender.leave()
        lender.run(lender.supervisor.start())
        lender.open()
        blocks = BlockClient(directory)
        blocks.add_location(found)
        assert blocks.read("b1", 10) == bytes(10)
        assert directory.find_block(block_id="b1")["places"][0]["incarnation"] == found["places"][0]["incarnation"]
        blocks.close()


def _answer_to(lender: Lender, ticket: Ticket) -> str:
    """The name of the status with which the server answers this ticket."""
    wait_for(lambda: lender.served)
    connection = ServerConnection.connect(lender.served.endpoint, seconds=5)
    try:
        connection.open(ticket)
    except StatusError as answer:
        return answer.status.name
    finally:
        connection.close()
    return "OK"


def test_ticket_of_a_freed_block_opens_nothing_after_the_server_was_killed(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    directory.allocate("freed", 4 * MIB, lender)
    directory.allocate("disk", CHUNK_BYTES, lender, on_disk=True)
    directory.allocate("living", CHUNK_BYTES, lender)
    directory.allocate("untouched", CHUNK_BYTES, lender)
    for name in ("freed", "disk", "living"):
        blocks.write(name, b"x" * CHUNK_BYTES)
    old = directory.ticket("freed", lender, "freed:1", False, 1, READ | WRITE)
    old_on_disk = directory.ticket("disk", lender, "disk:1", True, 1, READ | WRITE)
    untouched = directory.ticket("untouched", lender, "untouched:1", False, 1, READ | WRITE)
    lender.free("freed:1", "disk:1")
    assert _answer_to(lender, old) == "MOVED"
    for _ in range(2):
        lender.kill_server()
        assert _answer_to(lender, old) == "MOVED"
        assert _answer_to(lender, old_on_disk) == "MOVED"
    assert lender.served.copies == ("living:1",)
    assert lender.served.on_disk == ()
    assert _answer_to(lender, untouched) == "OK", "a ticket of a living block stays valid"
    assert blocks.read("living", 3) == b"xxx"


def test_server_killed_during_frees_leaves_no_freed_block_open(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    names = [f"b{number}" for number in range(192)]
    for name in names:
        directory.allocate(name, 4096, lender)
    blocks.write_many([(name, name.encode(), 0) for name in names])
    tickets = {name: directory.ticket(name, lender, f"{name}:1", False, 1, READ | WRITE) for name in names}
    for start in range(0, len(names), 64):
        freed = [f"{name}:1" for name in names[start : start + 64]]
        pid = lender.pid
        lender.call(lambda freed=freed: lender.supervisor.free_copies(freed))
        wait_for(lambda pid=pid, start=start: _killed_once_freeing(lender, pid, 128 - start))
        wait_for(lambda pid=pid: lender.supervisor.ready is not None and lender.supervisor.ready.pid != pid)
        lender.free(*freed)
        lender.kill_server()
        for copy in freed:
            assert _answer_to(lender, tickets[copy.removesuffix(":1")]) == "MOVED", copy
    wait_for(lambda: lender.served and lender.served.copies == ())


def _killed_once_freeing(lender: Lender, pid: int, remaining: int) -> bool:
    """Kill the server as soon as it has closed the first of the copies, wherever it is then."""
    if _descriptors(pid, "grid-b") >= remaining + 64:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def test_ticket_of_a_freed_block_opens_nothing_in_a_server_that_continues_an_empty_one(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    directory.allocate("b", CHUNK_BYTES, lender)
    blocks.write("b", b"x")
    old = directory.ticket("b", lender, "b:1", False, 1, READ | WRITE)
    life = lender.served.endpoint.incarnation
    lender.free("b:1")
    lender.leave()
    lender.run(lender.supervisor.start())
    assert lender.open().endpoint.incarnation == life
    assert _answer_to(lender, old) == "MOVED"
    lender.kill_server()
    assert _answer_to(lender, old) == "MOVED"
    directory.allocate("new", CHUNK_BYTES, lender)
    blocks.write("new", b"y")
    assert lender.served.copies == ("new:1",)


def test_restarted_server_holds_each_copy_once_so_a_free_gives_its_memory_back(
    directory: FakeDirectory, blocks: BlockClient, lender: Lender
) -> None:
    directory.allocate("b", 4 * MIB, lender)
    blocks.write("b", b"x" * 4 * MIB)
    lender.kill_server()
    wait_for(lambda: lender.served)
    assert _descriptors(lender.pid, "grid-b:1") == 1
    lender.free("b:1")
    assert _descriptors(lender.pid, "grid-b:1") == 0
    assert _descriptors(os.getpid(), "grid-b:1") == 0


def _descriptors(pid: int, name: str) -> int:
    held = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held += name in os.readlink(f"/proc/{pid}/fd/{fd}")
    return held
