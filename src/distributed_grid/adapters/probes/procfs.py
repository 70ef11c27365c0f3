"""Kernel files: counters of /proc, the processor and disks, raylets that run, and open sockets with their peers."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from distributed_grid.posix.private_files import read_all

TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)  # user nice system, not idle iowait, irq softirq steal
RAYLET_PROGRAM = "/ray/core/src/ray/raylet/raylet"  # where every installed Ray has it


class MemoryInfo(Struct, frozen=True):
    """The machine's memory, regardless of control groups; `available` bytes can be used without swapping."""

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
    _, key_found, rest = (b"\n" + text).partition(b"\n%s:" % name)
    return int(rest.split(maxsplit=1)[0]) if key_found else None


def read_busy_ms(root: Path, cores: Collection[bytes]) -> int:
    """CPU time used since boot, by anybody, on these cores (`cpu0` …)."""
    ticks = 0
    for line in read_kernel_file(root / "proc/stat").splitlines():
        if not line.startswith(b"cpu"):
            break
        columns = line.split()
        if columns[0] in cores:
            ticks += sum(int(columns[column]) for column in _BUSY_COLUMNS)
    return ticks * TICK_MS


def resident_bytes() -> int:
    return int(read_kernel_file(Path("/proc/self/statm")).split()[1]) * PAGE_BYTES


def read_kernel_file(file: Path) -> bytes:
    """The content of a kernel file; `OSError` when it cannot be read."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_all(fd)
    finally:
        os.close(fd)


class Disk(Struct, frozen=True):
    """A mounted disk; an ordinary user may still write `free_bytes`."""

    mountpoint: str
    device: str
    kind: str
    total_bytes: int
    free_bytes: int


def physical_cores(root: Path, cores: Sequence[int]) -> int:
    """Cores, with hyper-threads of one core counted once; all of them if the topology is unknown."""
    topology = [root / f"sys/devices/system/cpu/cpu{core}/topology" for core in cores]
    whole = {(_read_text(folder / "physical_package_id"), _read_text(folder / "core_id")) for folder in topology}
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

    disks_by_device: dict[str, Disk] = {}
    mounted = [(part.device, part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=False)]
    for device, mountpoint, kind in sorted(mounted, key=lambda one: len(one[1])):
        if (
            device not in disks_by_device and Path(mountpoint).is_dir()
        ):  # a file can be mounted on, too: containers do it
            disks_by_device.update(_describe_disk(device, mountpoint, kind))
    if not any(disk.mountpoint == "/" for disk in disks_by_device.values()):
        disks_by_device = _describe_disk("/", "/", "") | disks_by_device
    return tuple(disks_by_device.values())


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
    """True if a process runs the raylet of an installed Ray, not below the path `besides`.

    The name that a process shows proves nothing. The Ray belongs to root or to this user, or the user of the
    process cannot change it. A process of another user shows its program to root only.
    """
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        status, runner = os.stat(f"/proc/{pid}/exe"), os.stat(f"/proc/{pid}").st_uid
    except OSError:  # ended, or another user's
        return False
    if besides and program.startswith(os.path.join(os.path.realpath(besides), "")):
        return False
    is_trusted = status.st_uid in (0, os.geteuid()) or status.st_uid != runner
    return program.endswith(RAYLET_PROGRAM) and is_trusted and not status.st_mode & 0o002


def find_raylets() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and is_raylet(int(name)))


MAX_TABLE_BYTES = 16 << 20
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 4, 20, 2, 3
_REQUEST_DUMP = 0x301
_SHOW_PEER, _UNIX_DIAG_PEER, _ANY = 0x4, 2, 0xFFFFFFFF
_HEADER, _MESSAGE = struct.Struct("=IHHII"), struct.Struct("=BBBBIII")
_TCP_LISTEN, _NO_CONNECTION = b"0A", frozenset({b"07", b"06"})  # closed, and waiting for late packets
_UNIX_LISTENS, _UNIX_CONNECTED = 0x10000, b"03"


@dataclass(slots=True)
class OpenSockets:
    """The sockets of this machine by inode.

    `listening` has their addresses in words. Of `unix_peers` the value is the inode at the other end, or None where the
    kernel does not say it.
    """

    listening: dict[int, str] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    unix_peers: dict[int, int | None] = field(default_factory=dict)


def read_open_sockets(proc: str = "/proc") -> OpenSockets:
    """All sockets now. A table that this kernel does not have is empty."""
    sockets = OpenSockets()
    for name in ("tcp", "tcp6"):
        for state, local, remote, inode in _inet_rows(f"{proc}/net/{name}"):
            if state == _TCP_LISTEN:
                sockets.listening[inode] = f"tcp {_address(local)}"
            elif state not in _NO_CONNECTION and not remote.endswith(b":0000"):
                sockets.connected.add(inode)
    for name in ("udp", "udp6"):
        for _, local, remote, inode in _inet_rows(f"{proc}/net/{name}"):
            if not remote.endswith(b":0000"):
                sockets.connected.add(inode)
            elif not local.endswith(b":0000"):
                sockets.listening[inode] = f"udp {_address(local)}"
    peers = _unix_peers()
    for line in _lines(f"{proc}/net/unix"):
        columns = line.split(maxsplit=7)
        inode = int(columns[6])
        path = columns[7].decode(errors="replace") if len(columns) > 7 else ""
        if int(columns[3], 16) & _UNIX_LISTENS:
            sockets.listening[inode] = f"unix {path}".rstrip()
        elif columns[5] == _UNIX_CONNECTED:
            sockets.unix_peers[inode] = peers.get(inode)
    return sockets


def _inet_rows(path: str) -> list[tuple[bytes, bytes, bytes, int]]:
    """State, local and remote address, and inode; sockets without an inode have no owner."""
    rows = (line.split(maxsplit=10) for line in _lines(path))
    return [(row[3], row[1], row[2], int(row[9])) for row in rows if row[9] != b"0"]


def _lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TABLE_BYTES).splitlines()[1:]
    except OSError:
        return []


def _address(text: bytes) -> str:
    """An address of the kernel's tables in words: words of 32 bits in the machine's own order, and the port."""
    host, _, port = text.decode().partition(":")
    words = (int(host[start : start + 8], 16) for start in range(0, len(host), 8))
    address = ip_address(b"".join(struct.pack("=I", word) for word in words))
    shown = "*" if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{int(port, 16)}"


def _unix_peers() -> dict[int, int]:
    """The other ends of connected Unix sockets; none where the kernel has no such dump."""
    peers: dict[int, int] = {}
    ask = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ANY, 0, _SHOW_PEER, _ANY, _ANY)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(1.0)
            link.send(_HEADER.pack(_HEADER.size + len(ask), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + ask)
            while _take_peers(link.recv(1 << 18), peers):
                pass
    except OSError:
        return {}
    return peers


def _take_peers(data: bytes, peers: dict[int, int]) -> bool:
    """Take in one datagram of a dump; True if more will come."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, offset)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
            return False
        if kind == _SOCK_DIAG_BY_FAMILY:
            inode = _MESSAGE.unpack_from(data, offset + _HEADER.size)[4]
            part = offset + _HEADER.size + _MESSAGE.size
            while part + 4 <= offset + length:
                size, name = struct.unpack_from("=HH", data, part)
                if name == _UNIX_DIAG_PEER and size >= 8:
                    peers[inode] = struct.unpack_from("=I", data, part + 4)[0]
                part += max((size + 3) & ~3, 4)
        offset += (length + 3) & ~3
    return True
