"""Other hosts' memory, across real hosts: bytes come back as they were, whatever is killed, cut or wanted back."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from distributed_grid.errors import BadInput, BlockLost, GridError, NotFound, Refused
from distributed_grid.memory.client.block_client import BlockClient
from tests.lab.clusters import Cluster, agent_of
from tests.lab.lab import Lab
from tests.lab.memory_pools import MB, Pool, pattern, server_of, shared_memory, traffic
from tests.lab.shared_machine import OWNER
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
HOLD = 20
HOG = """
import mmap, sys, time
held = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("full", flush=True)
time.sleep(120)
"""


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts with agents and a short hold; connections are encrypted."""
    made = Cluster(shared_lab, tmp_path_factory.mktemp("memory"), top={"hold_seconds": HOLD})
    made("cluster", "start", check=0, timeout=120)
    yield made
    made.close()
    assert made.clear_leftovers() == {}


@pytest.fixture
def pool(cluster: Cluster, shared_lab: Lab) -> Iterator[Pool]:
    for name in ("gpu-master", "gpu1", "gpu2"):
        wait_until(lambda name=name: cluster.is_alive(name), 60)
    before = {host.name: shared_memory(host) for host in shared_lab}
    made = Pool(cluster)
    yield made
    shared_lab.mend()
    made.close()
    assert {host.name: shared_memory(host) for host in shared_lab} == before


@pytest.mark.parametrize("megabytes", [256, pytest.param(2048, marks=pytest.mark.chaos)])
def test_all_of_a_large_block_comes_back_byte_for_byte(pool: Pool, megabytes: int) -> None:
    size, piece = megabytes * MB, 32 * MB
    block = pool.allocate(size, "gpu1")
    assert pool.nodes(block) == ["gpu1"]
    for number in range(size // piece):
        pool.blocks.write(block, pattern(piece, number), number * piece)
    for number in range(size // piece):
        wanted = xxhash.xxh3_128_digest(pattern(piece, number))
        assert xxhash.xxh3_128_digest(pool.blocks.read(block, piece, number * piece)) == wanted
    with pytest.raises(BadInput):
        pool.blocks.read(block, 2, size - 1)
    with pytest.raises(BadInput):
        pool.blocks.write(block, b"x", -1)


def test_a_killed_memory_server_costs_a_delay_and_nothing_else(pool: Pool, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    block = pool.allocate(24 * MB, "gpu1")
    with traffic(pool, block, 24 * MB) as busy:
        for _ in range(2):
            before = server_of(host)
            host.kill(before, signal.SIGKILL)
            busy.more()
            assert server_of(host) not in (0, before)


def test_a_killed_agent_costs_nothing(pool: Pool, cluster: Cluster, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    block = pool.allocate(24 * MB, "gpu1")
    with traffic(pool, block, 24 * MB) as busy:
        server = server_of(host)
        host.kill(agent_of(host), signal.SIGKILL)
        busy.more()
        wait_until(lambda: agent_of(host), 30)
        wait_until(lambda: cluster.is_alive("gpu1"), 30)
        busy.more()
        assert server_of(host) == server


def test_a_killed_control_plane_costs_nothing_and_knows_every_block_again(pool: Pool, cluster: Cluster) -> None:
    block = pool.allocate(24 * MB, "gpu2", name="after the crash")
    with traffic(pool, block, 24 * MB) as busy:
        cluster.kill_daemon()
        busy.more(rounds=1)  # the next one has to be there before the hold is over, on a busy machine as well
        cluster("status", check=0)
        wait_until(lambda: cluster.is_alive("gpu2"), 60)
        busy.more()
    assert pool.view(block)["name"] == "after the crash"


def test_a_cut_that_is_shorter_than_the_hold_is_a_delay(pool: Pool, cluster: Cluster, shared_lab: Lab) -> None:
    block = pool.allocate(32 * MB, "gpu2")
    with traffic(pool, block, 32 * MB) as busy:
        shared_lab.cut("gpu2")
        wait_until(lambda: cluster.node("gpu2")["state"] == "suspect", 20)
        shared_lab.heal("gpu2")
        busy.more(3, 90)


def test_a_lender_with_all_its_processes_killed_loses_nothing_that_has_two_copies(pool: Pool, shared_lab: Lab) -> None:
    block = pool.allocate(64 * MB, copies=2)
    first, second = pool.nodes(block)
    with traffic(pool, block, 64 * MB) as busy:
        host = shared_lab.host(first)
        for pid in (agent_of(host), server_of(host)):
            host.kill(pid, signal.SIGKILL)
        busy.more(5, 120)
        wait_until(lambda: len(pool.nodes(block)) == 2 and pool.view(block)["state"] == "ready", 60)
    assert second in pool.nodes(block)


def test_block_without_a_copy_is_reported_lost_with_its_lender(pool: Pool, cluster: Cluster, shared_lab: Lab) -> None:
    block = pool.allocate(MB, "gpu1", name="dear")
    pool.blocks.write(block, b"x" * MB)
    host = shared_lab.host("gpu1")
    for pid in (agent_of(host), server_of(host)):
        host.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.is_alive("gpu1"), 60)
    with pytest.raises(BlockLost, match=r"1,048,576 bytes, 'dear'\) is lost with gpu1"):
        pool.blocks.read(block, 10)
    pool.desk.call("free_block", block_id=block)
    with pytest.raises(NotFound):
        pool.desk.find_block(block_id=block)


def test_an_owner_who_needs_the_memory_has_it_within_ten_seconds(pool: Pool, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    small = pool.allocate(24 * MB, "gpu1")
    large = pool.allocate(300 * MB, "gpu1")
    filled = bytes(pattern(50 * MB, 1))
    for at in range(0, 300, 50):
        pool.blocks.write(large, filled, at * MB)
    group = host.groups.path_of("memory")
    limit = int((group / "memory.limit_in_bytes").read_text())

    def free() -> int:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - int(stat["total_rss"]) - int(stat["total_shmem"])

    must_be_free = limit * 15 // 100
    with traffic(pool, small, 24 * MB) as busy:
        hog = host.popen(["python3", "-S", "-c", HOG, str(2300 * MB)], user=OWNER, stdout=-1)
        try:
            assert hog.stdout.readline() == b"full\n"
            wait_until(lambda: free() > must_be_free, 10)
            busy.more()
            wait_until(lambda: "gpu1" not in pool.nodes(large), 20)
        finally:
            hog.kill()
            hog.communicate()
    for at in range(0, 300, 100):
        assert pool.blocks.read(large, 50 * MB, at * MB) == filled


def test_a_node_that_cools_down_gives_every_block_to_others_or_to_the_borrowers_disk(
    pool: Pool, cluster: Cluster
) -> None:
    blocks = [pool.allocate(24 * MB, "gpu2") for _ in range(3)]
    data = bytes(pattern(24 * MB, 7))
    for block in blocks:
        pool.blocks.write(block, data)
    for name in ("gpu1", "gpu-master"):
        cluster("resource-sharing", "cooldown", "--node", name, check=0, timeout=90)
    try:
        cluster("resource-sharing", "cooldown", "--node", "gpu2", check=0, timeout=90)
        assert [pool.view(block)["on_disk"] for block in blocks] == [True] * 3
        spilled = list(cluster.host_dir.glob("memory/spill/*.block"))
        assert len(spilled) == 3
        assert {path.stat().st_mode & 0o777 for path in spilled} == {0o600}
        for block in blocks:
            assert pool.blocks.read(block, len(data)) == data
    finally:
        for name in ("gpu1", "gpu-master", "gpu2"):
            cluster("resource-sharing", "cooldown", "--node", name, "--off", check=0)
    wait_until(lambda: all(pool.nodes(block) for block in blocks), 90)
    assert pool.blocks.read(blocks[0], len(data)) == data
    assert not list(cluster.host_dir.glob("memory/spill/*.block"))


def test_sixty_four_programs_at_once_get_their_own_bytes(pool: Pool, cluster: Cluster) -> None:
    size = 3 * MB // 4
    names = [pool.allocate(size, copies=1 + number % 2) for number in range(64)]

    def use(number: int) -> None:
        mine = BlockClient(pool.desk)
        try:
            data = bytes(pattern(size, number))
            mine.write(names[number], data)
            for _ in range(3):
                assert mine.read(names[number], size) == data
                mine.write(names[number], data[:5000], 100)
                data = data[:100] + data[:5000] + data[5100:]
        finally:
            mine.close()

    with ThreadPoolExecutor(64) as threads:
        for done in [threads.submit(use, number) for number in range(64)]:
            done.result(120)


def test_a_ticket_with_a_wrong_secret_opens_nothing(pool: Pool) -> None:
    block = pool.allocate(MB, "gpu1")
    pool.blocks.write(block, b"y" * MB)
    found = pool.desk.call("find_block", block_id=block)
    for place in found["places"]:
        place["secret"] = "AAAA" * 10 + "AAA="

    class Liar:
        def find_block(self, *, block_id: str) -> object:
            return found

    stranger = BlockClient(Liar(), retry_seconds=3)
    with pytest.raises(GridError):
        stranger.read(block, 10)
    stranger.close()
    assert pool.blocks.read(block, 10) == b"y" * 10


def test_a_program_on_another_node_uses_a_block_by_its_id(pool: Pool, cluster: Cluster) -> None:
    block = pool.allocate(4 * MB, "gpu1")
    pool.blocks.write(block, b"from outside")
    script = (
        "from distributed_grid.orchestration.distributed_memory_pool import open_pool\n"
        "with open_pool() as pool:\n"
        f"    print(pool.read('{block}', 12).decode())\n"
        f"    pool.write('{block}', b'from a node ')\n"
        "    mine = pool.allocate(1024 * 1024)\n"
        "    pool.write(mine, b'its own')\n"
        "    print(mine)\n"
    )
    done = cluster(
        *("run-shared", "--strategy", "node_specific", "-n", "gpu2", "--workdir", "none"),
        *("sh", "-c", 'exec "$GRID_PYTHON" -c "$0"', script),
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    said, mine = done.stdout.split("\n")[:2]
    assert said == "from outside"
    assert pool.blocks.read(block, 12) == b"from a node "
    assert pool.blocks.read(mine, 7) == b"its own"
    assert "gpu2" not in pool.nodes(mine)
    pool.desk.call("free_block", block_id=mine)


def test_a_size_that_no_node_has_is_refused_node_by_node(pool: Pool) -> None:
    with pytest.raises(Refused, match="No available nodes for memory allocation: gpu-master: "):
        pool.allocate(100 * 1024 * MB)


def test_a_node_that_is_stopped_gives_its_blocks_away_and_leaves_no_memory_server(
    pool: Pool, cluster: Cluster, shared_lab: Lab
) -> None:
    host, data = shared_lab.host("gpu2"), bytes(pattern(24 * MB, 3))
    block = pool.allocate(24 * MB, "gpu2")
    pool.blocks.write(block, data)
    cluster("cluster", "stop", "gpu2", check=0, timeout=90)
    assert server_of(host) == 0
    assert pool.blocks.read(block, 24 * MB) == data
    first = pool.nodes(block)[0]
    cluster("cluster", "stop", first, "--force", check=0, timeout=90)
    assert server_of(shared_lab.host(first)) == 0
    cluster("cluster", "start", check=0, timeout=120)
    with contextlib.suppress(BlockLost):  # nobody waited for it to be moved; it may have been all the same
        assert pool.blocks.read(block, 24 * MB) == data
