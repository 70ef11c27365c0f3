"""The memory pool as a person uses it, on the shipped config: the shell, Python, crashes, moves, interruptions."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed_grid.client.client import Client
from distributed_grid.errors import BadInput, NotFound, Refused
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool, MemoryPool, open_pool
from distributed_grid.state_dir import StateDir
from tests.support.processes import is_running
from tests.support.project import copy_configs
from tests.support.shell import GRID, Shell, wait_until

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
BIG = 192 * MIB
"""Takes long enough for another process to see that it has begun."""
ENDLESS = 4096 * MIB
"""Takes long enough to be interrupted, even where this process does not run for a second."""


@pytest.fixture(scope="module")
def cluster(shared_grid: Shell) -> Shell:
    """The shipped three local nodes; every test frees what it allocates."""
    copy_configs(shared_grid.cwd / "config")
    return shared_grid


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        cluster: Shell = request.getfixturevalue("cluster")
        with Client(StateDir(cluster.state_dir)) as client:
            for block in client.call("list_blocks")["blocks"]:
                client.call("free_block", block_id=block["block_id"])


@pytest.fixture
def pool(cluster: Shell) -> Iterator[MemoryPool]:
    cluster("status", check=0)  # starts the control plane with the shipped config
    with open_pool(state_dir=cluster.state_dir) as pool:
        yield pool


def blocks(cluster: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.json("memory", "list")
    return found


def in_another_process(cluster: Shell, program: str, *words: str) -> str:
    """Output of a program that shares only the state directory with this process."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=cluster.cwd,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def until_there_is_a_block(cluster: Shell) -> dict[str, Any]:
    with Client(StateDir(cluster.state_dir)) as client:
        found: list[dict[str, Any]] = wait_until(lambda: client.call("list_blocks")["blocks"], pause=0.002)
    return found[0]


def is_gone(pool: MemoryPool, block_id: str) -> bool:
    """Whether a block cannot be read any more: the ledger ends it first, and then its node frees it."""
    try:
        pool.read(block_id, 1)
    except NotFound:
        return True
    return False


def a_big_file(cluster: Shell, size: int = BIG) -> Path:
    path = cluster.cwd / "big.bin"
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_file_is_stored_and_comes_back_byte_for_byte(cluster: Shell) -> None:
    content = os.urandom(20 * MIB + 12345)
    (cluster.cwd / "data.bin").write_bytes(content)
    stored = cluster("memory", "store", "data", "data.bin", "--node", "gpu2", "--copies", "2", check=0)
    assert re.match(r"block [0-9a-f]{32}\n20.01 MB on gpu2, gpu1 as data, until ", stored.stdout)
    done = cluster("memory", "retrieve", "data", "-o", "back.bin", check=0)
    assert "wrote back.bin: 20.01 MB" in done.stdout
    assert (cluster.cwd / "back.bin").read_bytes() == content
    (row,) = blocks(cluster)
    assert (row["name"], row["size"], row["nodes"], row["copies"]) == ("data", len(content), ["gpu2", "gpu1"], 2)
    by_prefix = subprocess.run(
        [*GRID, "memory", "retrieve", row["block_id"][:6]], cwd=cluster.cwd, env=cluster.env, capture_output=True
    )
    assert by_prefix.stdout == content
    shown = cluster("memory", "list", check=0).stdout
    assert re.split(r"  +", shown.splitlines()[0]) == ["ID", "KEY", "SIZE", "NODES", "COPIES", "STATE", "EXPIRES IN"]
    assert re.search(r"data +20.01 MB +gpu2, gpu1 +2 +ready +24 h$", shown, re.MULTILINE)
    stats = cluster("memory", "stats", check=0).stdout
    assert stats.startswith("1 block, 20.01 MB\n")
    assert re.search(r"gpu2 +1 +20.01 MB +27.5[67] GB", stats)
    freed = cluster("memory", "deallocate", "data", check=0)
    assert freed.stdout == f"block {row['block_id']} as data: freed\n"
    assert blocks(cluster) == []


def test_what_comes_through_a_pipe_can_be_stored_too_and_so_can_nothing(cluster: Shell) -> None:
    script = f"head -c 3000000 /dev/zero | {GRID[0]} memory store piped - && {GRID[0]} memory retrieve piped | wc -c"
    script += f"; {GRID[0]} memory store none - < /dev/null && {GRID[0]} memory retrieve none | wc -c"
    done = subprocess.run(["bash", "-ec", script], cwd=cluster.cwd, env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["3000000", "0"]
    assert "0 bytes on gpu2 as none" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_store_leaves_nothing_behind_and_the_old_value_in_place(cluster: Shell, how: int) -> None:
    (cluster.cwd / "old.txt").write_text("old")
    cluster("memory", "store", "key", "old.txt", check=0)
    storing = cluster.start("memory", "store", "key", str(a_big_file(cluster, ENDLESS)))
    with Client(StateDir(cluster.state_dir)) as client:
        wait_until(lambda: len(client.call("list_blocks")["blocks"]) == 2, pause=0.002)
    storing.send_signal(how)
    assert storing.wait(20) == 128 + how
    assert [row["name"] for row in blocks(cluster)] == ["key"]
    assert cluster("memory", "retrieve", "key", check=0).stdout == "old"


def test_a_store_whose_file_becomes_shorter_leaves_nothing_behind(cluster: Shell) -> None:
    path = a_big_file(cluster, ENDLESS)
    storing = cluster.start("memory", "store", "key", str(path))
    until_there_is_a_block(cluster)
    storing.send_signal(signal.SIGSTOP)
    os.truncate(path, 5)
    storing.send_signal(signal.SIGCONT)
    _, said = storing.communicate(timeout=20)
    assert storing.returncode == 1
    assert "became shorter while it was read; nothing was stored" in said.decode()
    assert blocks(cluster) == []


def test_a_store_that_is_killed_leaves_a_block_without_a_name_for_a_minute_at_most(cluster: Shell) -> None:
    storing = cluster.start("memory", "store", "key", str(a_big_file(cluster, ENDLESS)))
    until_there_is_a_block(cluster)
    storing.kill()
    storing.wait(10)
    (row,) = blocks(cluster)
    assert row["name"] == ""
    left = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
    assert left.total_seconds() <= 60


def test_a_transfer_needs_little_memory_and_an_interrupted_retrieve_leaves_the_file_as_it_was(cluster: Shell) -> None:
    def with_little_memory(words: str) -> None:
        script = f"ulimit -d {BIG * 2 // 3 // 1024}; exec {GRID[0]} memory {words}"
        done = subprocess.run(["bash", "-c", script], cwd=cluster.cwd, env=cluster.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    cluster("status", check=0)  # the control plane itself is started without that limit
    with_little_memory(f"store big {a_big_file(cluster)}")
    folder = cluster.cwd / "target"
    folder.mkdir()
    (folder / "file").write_text("as it was")
    taking = cluster.start("memory", "retrieve", "big", "-o", "target/file")
    wait_until(lambda: len(list(folder.iterdir())) == 2, pause=0.002)
    taking.terminate()
    assert taking.wait(20) == 128 + signal.SIGTERM
    assert [path.read_text() for path in folder.iterdir()] == ["as it was"]
    with_little_memory("retrieve big -o target/file")
    assert (folder / "file").stat().st_size == BIG
    (folder / "file").unlink()


def test_wrong_usage_is_one_line_and_exits_2_and_changes_nothing(cluster: Shell) -> None:
    for words in (
        ("allocate", "5XB"),
        ("allocate", "1MB", "--ttl", "nan"),
        ("allocate", "1MB", "--copies", "0"),
        ("store", "", "config/my-cluster.yaml"),
        ("retrieve", "x", "-o", "config"),
        ("retrieve", "x", "--json"),
    ):
        done = cluster("memory", *words, check=2)
        assert done.stdout == "", words
        assert len(done.stderr.splitlines()) == 1, done.stderr
    for words in (
        ("deallocate", "nobody"),
        ("retrieve", "nobody"),
        ("store", "k", "no-such-file"),
        ("allocate", "1MB", "--node", "nobody"),
    ):
        assert len(cluster("memory", *words, check=1).stderr.splitlines()) == 1
    assert blocks(cluster) == []


def test_deallocating_several_frees_all_or_none(cluster: Shell) -> None:
    one = cluster.json("memory", "allocate", "1MB")["block_id"]
    cluster("memory", "allocate", "512KB", "--key", "two", check=0)
    cluster("memory", "deallocate", one, "two", "three", check=1)
    assert len(blocks(cluster)) == 2
    freed = cluster.json("memory", "deallocate", one[:8], "two", one)
    assert [row["size"] for row in freed] == [MIB, 512 * 1024]
    assert blocks(cluster) == []


def test_a_request_that_no_node_can_meet_says_why_node_by_node(cluster: Shell, pool: MemoryPool) -> None:
    done = cluster("memory", "allocate", "100GB", check=1)
    assert done.stderr.startswith("grid: No available nodes for memory allocation: gpu-master: ")
    assert all(f"{node}: " in done.stderr for node in ("gpu1", "gpu2"))
    with pytest.raises(Refused, match=r"^No available nodes for memory allocation: ") as no:
        pool.allocate(100 * 1024**3)
    assert len(no.value.reasons) == 3
    with pytest.raises(Refused, match=r"^No available nodes for memory allocation: "):
        pool.allocate(13 * 1024**3, copies=3)  # gpu1 lends 12 GB at most


def test_a_node_whose_memory_cannot_be_served_says_so_and_works_again_when_that_is_mended(grid: Shell) -> None:
    copy_configs(grid.cwd / "config")
    grid("status", check=0)
    in_the_way = grid.host_dir / "memory" / "node-gpu2" / "memory.sock"
    in_the_way.mkdir()
    done = grid("memory", "allocate", "1MB", check=1)
    assert re.match(r"grid: Failed to allocate memory block: .*\n$", done.stderr)
    assert grid.json("memory", "list") == []
    in_the_way.rmdir()
    grid("memory", "allocate", "1MB", "--key", "mended", check=0)
    grid("memory", "deallocate", "mended", check=0)


def test_bounds_unknown_ids_and_negative_sizes_are_clear_errors_and_change_nothing(pool: MemoryPool) -> None:
    block_id = pool.allocate(1000)
    pool.write(block_id, b"x" * 1000)
    for wrong in (
        lambda: pool.read(block_id, 1001),
        lambda: pool.read(block_id, 1, offset=1000),
        lambda: pool.read(block_id, -1),
        lambda: pool.read(block_id, 1, offset=-1),
        lambda: pool.write(block_id, b"y" * 1001),
        lambda: pool.write(block_id, b"yy", offset=999),
        lambda: pool.write(block_id, b"y", offset=-1),
        lambda: pool.write(block_id, "text"),  # type: ignore[arg-type]
        lambda: pool.allocate(-5),
        lambda: pool.allocate(0),
        lambda: pool.allocate(1.5),  # type: ignore[arg-type]
        lambda: pool.allocate(10, ttl=-1),
        lambda: pool.allocate(10, copies=9),
    ):
        with pytest.raises(BadInput):
            wrong()
    for deed in (pool.read, pool.deallocate, pool.array, pool.find, pool.get_array):
        with pytest.raises(NotFound):
            deed(uuid.uuid4().hex)
    assert pool.read(block_id) == b"x" * 1000
    assert pool.read(block_id[:8], 3) == b"xxx"
    assert len(pool.list_blocks()) == 1
    pool.deallocate(block_id)
    with pytest.raises(NotFound):
        pool.read(block_id, 1)
    with pytest.raises(NotFound):
        pool.deallocate(block_id)


def test_a_block_outlives_the_program_that_made_it_and_works_in_any_other(cluster: Shell, pool: MemoryPool) -> None:
    block_id = in_another_process(
        cluster,
        "import numpy as np\n"
        "from distributed_grid.orchestration.distributed_memory_pool import open_pool\n"
        "pool = open_pool()\n"
        "print(pool.put_array(np.arange(12.0).reshape(3, 4)))\n",
    )
    assert pool.get_array(block_id).tolist() == np.arange(12.0).reshape(3, 4).tolist()
    pool.array(block_id)[1, 1] = 50
    again = (
        "import sys\n"
        "from distributed_grid.orchestration.distributed_memory_pool import open_pool\n"
        "with open_pool() as pool:\n"
        "    print(pool.array(sys.argv[1])[1].tolist())\n"
    )
    assert in_another_process(cluster, again, block_id) == "[4.0, 50.0, 6.0, 7.0]"


def test_a_block_ends_with_its_time(pool: MemoryPool) -> None:
    block_id = pool.allocate(MIB, ttl=1.0)
    pool.write(block_id, b"for a moment")
    assert pool.find(block_id)["session"] is False
    wait_until(lambda: is_gone(pool, block_id))
    with pytest.raises(NotFound):
        pool.find(block_id)
    kept = pool.allocate(MIB)
    assert pool.find(kept)["session"] is True
    assert pool.find(kept)["term_seconds"] == 3600


def test_a_pool_is_a_mapping_of_names(cluster: Shell, pool: MemoryPool) -> None:
    assert (len(pool), list(pool), "a" in pool, pool.__contains__(3)) == (0, [], False, False)
    pool["a"] = b"one"
    first = pool.find(name="a")["block_id"]
    pool["a"] = bytearray(b"another")
    pool["b/ü 2"] = memoryview(b"two")
    pool["none"] = b""
    assert (pool["a"], pool["b/ü 2"], pool["none"]) == (b"another", b"two", b"")
    assert sorted(pool) == ["a", "b/ü 2", "none"]
    assert dict(pool.items())["none"] == b""
    wait_until(lambda: is_gone(pool, first))
    assert len(pool.list_blocks()) == 3
    assert cluster("memory", "retrieve", "a", check=0).stdout == "another"
    with pytest.raises(Refused):
        pool.store("a", b"never", "no-such-node")
    with pytest.raises(BadInput):
        pool[""] = b"x"
    assert pool["a"] == b"another"
    assert len(pool.list_blocks()) == 3
    del pool["a"]
    for wrong in (pool.__getitem__, pool.__delitem__):
        with pytest.raises(KeyError):
            wrong("a")
    assert pool.get("a") is None
    assert pool == pool
    assert pool


def test_values_of_keys_are_compressed_where_they_are_stored_and_the_ledger_holds_only_that(
    cluster: Shell, pool: MemoryPool
) -> None:
    value = b"".join(b"line %d of a log that says much the same every time\n" % number for number in range(200_000))

    def held() -> int:
        with Client(StateDir(cluster.state_dir)) as client:
            leases = client.call("get_status")["allocations"]
        return sum(round(lease["amount"] * 1024**3) for lease in leases if lease["resource_type"] == "memory")

    before = held()
    with open_pool(state_dir=cluster.state_dir, compression="lz4") as packing:
        block_id = packing.store("log", value, copies=2, ttl=600)
        packing["noise"] = noise = os.urandom(MIB)
        packing["nothing"] = b""
        assert (packing["log"], packing["noise"], packing["nothing"]) == (value, noise, b"")
        array = packing.array(packing.put_array(np.zeros((1000, 100)), name="array"))
        array[5] = 1.0  # an array can be changed in place: it is stored as it is
        assert packing.get_array(name="array")[4:6].sum() == 100
        with pytest.raises(Refused, match="compressed value, which cannot be changed in place: store it again"):
            packing.write(block_id, b"x")
        assert packing.mapped(block_id) is None
    row = pool.find(name="log")
    assert row["size"] < len(value) / 3
    assert pool.find(name="noise")["size"] == MIB
    others = MIB + 1 + 1000 * 100 * 8
    assert abs(held() - before - 2 * row["size"] - others) < 3 * 2**20, "as the answer rounds"
    middle = len(value) // 2
    assert (pool["log"], pool.read(block_id, 100, middle)) == (value, value[middle : middle + 100])
    assert pool.read(block_id) == value
    buffer = bytearray(300_000)
    pool.read_into(block_id, buffer, 77)
    assert buffer == value[77:300_077]
    with pytest.raises(BadInput, match=f"it has {len(value)}"):
        pool.read(block_id, 1, len(value))
    assert in_another_process(cluster, READ_KEY, str(cluster.state_dir), "log") == str(len(value))
    cluster("memory", "retrieve", "log", "-o", "log.txt", check=0)
    assert (cluster.cwd / "log.txt").read_bytes() == value
    assert re.search(r"log +10\.\d+ MB \(holds [\d.]+ [KM]B\) ", cluster("memory", "list", check=0).stdout)
    cluster.kill_daemon()
    assert pool["log"] == value
    pool["log"] = b"plain again"
    assert (pool["log"], pool.find(name="log")["size"]) == (b"plain again", 11)


READ_KEY = """
import sys
from distributed_grid.orchestration.distributed_memory_pool import open_pool
with open_pool(state_dir=sys.argv[1]) as pool:
    print(len(pool[sys.argv[2]]))
"""


def test_any_array_can_be_stored(pool: MemoryPool) -> None:
    arrays = (
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(100, dtype=">i2")[::7],
        np.zeros((0, 5), "f4"),
        np.array(7.5),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([("x", 1)], [("name", "U3"), ("n", "i4")]),
    )
    for array in arrays:
        block_id = pool.put_array(array)
        found = pool.get_array(block_id)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        pool.deallocate(block_id)
    pool.put_array([[1, 2], [3, 4]], name="list")
    assert pool.get_array(name="list").tolist() == [[1, 2], [3, 4]]
    with pytest.raises(BadInput, match="objects"):
        pool.put_array(np.array([{}]))
    with pytest.raises(BadInput, match="holds no array"):
        pool.get_array(pool.allocate(10))


def test_the_pool_of_a_program_with_an_event_loop(cluster: Shell, pool: MemoryPool) -> None:
    async def story() -> None:
        async with DistributedMemoryPool(state_dir=cluster.state_dir) as far:
            ids = await asyncio.gather(*(far.allocate(MIB, preferred_node="gpu1") for _ in range(20)))
            assert {(await far.find(block_id))["nodes"][0] for block_id in ids} == {"gpu1"}
            await asyncio.gather(*(far.write(block_id, block_id.encode()) for block_id in ids))
            found = await asyncio.gather(*(far.read(block_id, 32) for block_id in ids))
            assert [text.decode() for text in found] == ids
            with open_pool(state_dir=cluster.state_dir) as here:  # as in a notebook, whose loop runs
                assert here.read(ids[0], 32) == ids[0].encode()
            remote = await far.array(await far.put_array(np.eye(3)))
            assert remote[1].tolist() == [0, 1, 0]
            await far.store("key", b"value")
            assert (await far.retrieve("key"), far["key"], len(far)) == (b"value", b"value", 1)
            assert (await far.stats())["blocks"] == 22
            await asyncio.gather(*(far.deallocate(block_id) for block_id in ids))
        for late in (far.read(ids[0], 1), far.allocate(5)):
            with pytest.raises(Refused, match="not initialized, or is shut down"):
                await late
        await far.shutdown()
        await far.initialize()
        assert await far.retrieve("key") == b"value"
        await far.shutdown()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert sorted(block["size"] for block in pool.list_blocks()) == [5, 72]


def test_an_allocation_that_nobody_waits_for_any_more_is_undone(cluster: Shell, pool: MemoryPool) -> None:
    async def story() -> None:
        async with DistributedMemoryPool(state_dir=cluster.state_dir) as far:
            asking = asyncio.create_task(far.allocate(MIB))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while [block for block in await far.list_blocks() if block["state"] != "freeing"]:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_pool_is_of_no_use_in_a_forked_process(cluster: Shell, pool: MemoryPool) -> None:
    program = (
        "import os\n"
        "from distributed_grid.orchestration.distributed_memory_pool import open_pool\n"
        "pool = open_pool()\n"
        "block_id = pool.allocate(10)\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        pool.read(block_id, 1)\n"
        "    except Exception as no:\n"
        "        print(type(no).__name__, no, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert "Refused this memory pool belongs to the process" in in_another_process(cluster, program)


def test_blocks_outlive_the_control_plane_however_it_ends(cluster: Shell, pool: MemoryPool) -> None:
    content = os.urandom(MIB + 7)
    pool["kept"] = content
    block_id = pool.allocate(5 * MIB)
    pool.write(block_id, b"here", offset=4 * MIB)
    cluster("daemon", "stop", check=0)
    kept = cluster.start("memory", "retrieve", "kept")
    assert kept.communicate(timeout=30)[0] == content
    cluster("daemon", "stop", check=0)
    assert pool["kept"] == content
    cluster.kill_daemon()
    assert pool.read(block_id, 4, offset=4 * MIB) == b"here"  # nobody had to be asked
    assert pool["kept"] == content
    cluster.kill_daemon()
    pool.write(block_id, b"still", offset=0)
    cluster("memory", "retrieve", block_id, "-o", "kept.bin", check=0)
    assert (cluster.cwd / "kept.bin").read_bytes().startswith(b"still")
    assert pool["kept"] == content


def test_reading_and_writing_go_on_while_the_memory_server_is_killed(cluster: Shell, pool: MemoryPool) -> None:
    block_id = pool.allocate(MIB)
    pool.write(block_id, b"before")
    log = str(cluster.host_dir / "memory" / "node-gpu2" / "memory.log")

    def server() -> int:
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if (
                    os.readlink(path) == log
                    and b"distributed_grid.memory" in (path.parents[1] / "cmdline").read_bytes()
                ):
                    return int(path.parents[1].name)
            except OSError:
                continue
        return 0

    pid = wait_until(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert pool.read(block_id, 6) == b"before"
    pool.write(block_id, b"after")
    assert pool.read(block_id, 6) == b"aftere"


def test_cooling_a_node_down_moves_its_blocks_while_they_are_used(
    cluster: Shell, pool: MemoryPool, caplog: pytest.LogCaptureFixture
) -> None:
    content = os.urandom(32 * MIB)
    block_id = pool.allocate(len(content), preferred_node="gpu2")
    pool.write(block_id, content)
    wrong: list[object] = []
    reads = 0
    cooled = threading.Event()

    def read_on() -> None:
        nonlocal reads
        while not cooled.is_set():
            try:
                if pool.read(block_id, MIB, offset=5 * MIB) != content[5 * MIB : 6 * MIB]:
                    wrong.append("other bytes")
                pool.write(block_id, content[:100], offset=0)
                reads += 1
            except Exception as failure:
                wrong.append(failure)
                return

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        cluster("resource-sharing", "cooldown", "--node", "gpu2", check=0)
        other = cluster("memory", "allocate", "1MB", "--node", "gpu2", "--key", "other", check=0)
        assert re.fullmatch(r"grid: gpu\S+ lends it: gpu2 has no room for it\n", other.stderr)
        with caplog.at_level("WARNING", "distributed_grid.client.memory.pool"):
            pool.deallocate(pool.allocate(1000, "gpu2"))
        assert "lends it: gpu2 has no room for it" in caplog.text
        cluster("memory", "deallocate", "other", check=0)
    finally:
        cooled.set()
        reader.join()
        cluster("resource-sharing", "cooldown", "--node", "gpu2", "--off", check=0)
    assert wrong == []
    assert reads
    found = pool.find(block_id)
    assert found["nodes"] in (["gpu1"], ["gpu-master"])
    assert pool.read(block_id) == content


def test_a_closed_pool_leaves_its_blocks_alone(cluster: Shell, pool: MemoryPool) -> None:
    other = open_pool(state_dir=cluster.state_dir)
    block_id = other.allocate(100)
    other.write(block_id, b"left")
    other.close()
    other.close()
    with pytest.raises(Refused, match="shut down"):
        other.read(block_id, 4)
    with pytest.raises(Refused, match="shut down"):
        other.list_blocks()
    assert pool.read(block_id, 4) == b"left"
