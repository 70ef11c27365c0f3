"""Kernel files: counters of /proc, read in tens of microseconds, the processor and disks, and the raylets that run."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from distributed_grid.posix.private_files import read_all

TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)  # user nice system, not idle iowait, irq softirq steal
RAYLET_PROGRAM = "/ray/core/src/ray/raylet/raylet"  # where every installed Ray has it


class MemoryInfo(Struct, frozen=True):
    """The machine's memory, regardless of control groups; `available` is what can be used without swapping."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int


def read_memory(root: Path) -> MemoryInfo:
    """The machine's memory now."""
    text = read_kernel_file(root / "proc/meminfo")
    free = sum(_kilobytes(text, name) or 0 for name in (b"MemFree", b"Buffers", b"Cached"))
    available = _kilobytes(text, b"MemAvailable")  # before Linux 3.14 there is none
    return MemoryInfo(
        total_bytes=1024 * (_kilobytes(text, b"MemTotal") or 0),
        available_bytes=1024 * (free if available is None else available),
        swap_total_bytes=1024 * (_kilobytes(text, b"SwapTotal") or 0),
    )


def _kilobytes(text: bytes, name: bytes) -> int | None:
    _, found, rest = (b"\n" + text).partition(b"\n%s:" % name)
    return int(rest.split(maxsplit=1)[0]) if found else None


def read_busy_ms(root: Path, cores: Collection[bytes]) -> int:
    """CPU time used since boot, by anybody, on these cores (`cpu0` …)."""
    ticks = 0
    for line in read_kernel_file(root / "proc/stat").splitlines():
        if not line.startswith(b"cpu"):
            break
        columns = line.split()
        if columns[0] in cores:
            ticks += sum(int(columns[at]) for at in _BUSY_COLUMNS)
    return ticks * TICK_MS


def resident_bytes() -> int:
    """Memory this process has in RAM."""
    return int(read_kernel_file(Path("/proc/self/statm")).split()[1]) * PAGE_BYTES


def read_kernel_file(file: Path) -> bytes:
    """The content of a kernel file; `OSError` when it cannot be read."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_all(fd)
    finally:
        os.close(fd)


class Disk(Struct, frozen=True):
    """A mounted disk; `free_bytes` is what an ordinary user may still write."""

    mountpoint: str
    device: str
    kind: str
    total_bytes: int
    free_bytes: int


def physical_cores(root: Path, cores: Sequence[int]) -> int:
    """How many cores these are when hyper-threads of one core count once; all of them where the topology is unknown."""
    topology = [root / f"sys/devices/system/cpu/cpu{core}/topology" for core in cores]
    whole = {(_read_text(at / "physical_package_id"), _read_text(at / "core_id")) for at in topology}
    return len(cores) if ("", "") in whole else len(whole)


def cpu_model(root: Path) -> str:
    """The processor's name, as its maker writes it; the architecture where it has none."""
    named: dict[str, str] = {}
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        named.setdefault(key.strip(), value.strip())
    return next(
        (named[key] for key in ("model name", "Model", "Hardware", "cpu") if named.get(key)), platform.machine()
    )


def cpu_max_mhz(root: Path) -> int | None:
    """The fastest the processor can run, or runs now; None where it is unknown, as in many virtual machines."""
    khz = _read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if khz.isdigit():
        return int(khz) // 1000
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            return round(float(value))
    return None


def disks() -> tuple[Disk, ...]:
    """The disks with a file system on them, and the one `/` is on, each once. Network file systems are left out."""
    import psutil  # slow to import, and only this needs it

    found: dict[str, Disk] = {}
    mounted = [(part.device, part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=False)]
    for device, mountpoint, kind in sorted(mounted, key=lambda one: len(one[1])):
        if device not in found and Path(mountpoint).is_dir():  # a file can be mounted on, too: containers do it
            found.update(_describe_disk(device, mountpoint, kind))
    if not any(disk.mountpoint == "/" for disk in found.values()):
        found = _describe_disk("/", "/", "") | found
    return tuple(found.values())


def _describe_disk(device: str, mountpoint: str, kind: str) -> dict[str, Disk]:
    import psutil

    try:
        usage = psutil.disk_usage(mountpoint)
    except OSError:  # unmounted meanwhile, or not accessible
        return {}
    return {device: Disk(mountpoint, device, kind, usage.total, usage.free)}


def _read_text(file: Path) -> str:
    try:
        return read_kernel_file(file).decode(errors="replace").strip()
    except OSError:
        return ""


def is_raylet(pid: int, besides: str = "") -> bool:
    """Whether a process runs the raylet of an installed Ray, not below the path `besides`.

    What a process calls itself says nothing. The Ray belongs to root or to this user, or whoever runs it cannot change
    it. A process of another user shows its program to root only.
    """
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        found, runner = os.stat(f"/proc/{pid}/exe"), os.stat(f"/proc/{pid}").st_uid
    except OSError:  # ended, or another user's
        return False
    if besides and program.startswith(os.path.join(os.path.realpath(besides), "")):
        return False
    is_trusted = found.st_uid in (0, os.geteuid()) or found.st_uid != runner
    return program.endswith(RAYLET_PROGRAM) and is_trusted and not found.st_mode & 0o002


def find_raylets() -> Iterator[int]:
    """The pids of all that run on this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and is_raylet(int(name)))
