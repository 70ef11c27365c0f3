"""Finding our own control group in the kernel's texts, and writing version 2 as it wants to be written."""

from pathlib import Path

from distributed_grid.agent.limits.cgroups import Cgroup, Controller, own_groups

V1_CGROUP = "4:memory:/box/7\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n"
V1_MOUNTS = (
    "25 24 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs mode=755\n"
    "30 25 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def test_version_1_has_a_place_for_each_controller() -> None:
    places = own_groups(V1_CGROUP, V1_MOUNTS)
    assert places["memory"] == Controller(1, "/sys/fs/cgroup/memory/box/7")
    assert places["cpu"] == Controller(1, "/sys/fs/cgroup/cpu,cpuacct/box")
    assert places[""] == Controller(2, "/sys/fs/cgroup/unified")


def test_version_2_has_one_place() -> None:
    mounts = "30 25 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
    own = "0::/user.slice/user-1000.slice/session-2.scope\n"
    assert own_groups(own, mounts) == {"": Controller(2, "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope")}


def test_inside_a_container_the_mount_shows_only_a_part() -> None:
    mounts = "30 25 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert own_groups("4:memory:/docker/abc\n", mounts)["memory"].base == "/sys/fs/cgroup/memory"
    assert own_groups("4:memory:/docker/abc/x\n", mounts)["memory"].base == "/sys/fs/cgroup/memory/x"
    assert own_groups("4:memory:/docker/abcd\n", mounts) == {}
    assert own_groups("4:memory:/../other\n", mounts) == {}


def test_version_2_is_written_and_read_in_its_own_words(tmp_path: Path) -> None:
    group = Cgroup(2, str(tmp_path / "grid-a"))
    group.make()
    for name in ("memory.max", "memory.swap.max", "cpu.weight", "cgroup.procs"):
        (tmp_path / "grid-a" / name).touch()
    group.limit_memory(1 << 30)
    group.weigh_cpu(512)
    group.join()
    (tmp_path / "grid-a/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "grid-a/memory.stat").write_text("anon 100\nfile 900\nshmem 11\nfile_mapped 31\n")
    texts = {path.name: path.read_text() for path in (tmp_path / "grid-a").iterdir()}
    assert (texts["memory.max"], texts["memory.swap.max"], texts["cpu.weight"]) == (str(1 << 30), "0", "50")
    assert (group.kills(), group.held_and_file_bytes()) == (2, (111, 20))


def test_removing_what_is_gone_is_not_an_error(tmp_path: Path) -> None:
    group = Cgroup(1, str(tmp_path / "grid-a"))
    assert group.remove()
    assert (group.kills(), group.members(), group.held_and_file_bytes()) == (0, [], (0, 0))
