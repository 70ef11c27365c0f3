"""Entries of /proc, read for an inventory: a short row of every process, and the details of one.

All files of one process are read through one descriptor of its directory: the kernel binds that to the process itself,
so a pid that is used again in between is never mistaken for it. A process that ends while it is read raises
`ProcessGone`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from distributed_grid.adapters.probes.procfs import PAGE_BYTES
from distributed_grid.domain.processes import StandardStream, StreamKind
from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import read_all

MAX_DESCRIPTORS = 4096
MAX_READ_BYTES = 8 << 20
_NAMESPACE_LINKS = tuple(f"ns/{name}" for name in ("mnt", "net", "pid", "user", "ipc", "uts"))
HARMLESS_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
DELETED = " (deleted)"
_KERNEL_THREAD = 0x00200000
_MAPPED = re.compile(
    rb" ([r-][w-][x-][ps]) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+ \d+) +(/(?!usr/|lib)[^\n]*)"  # no files that every system has
)


class ProcessGone(GridError):
    """The process ended while it was read, or is not this user's to read."""


class ProcRow(NamedTuple):
    """One process by its `stat` file; `uid` is the user who may read it, `inode` that of its directory."""

    pid: int
    ppid: int
    start: int
    group: int
    session: int
    tty: int
    foreground: int
    is_dead: bool
    is_kernel: bool
    own_ticks: int
    waited_ticks: int
    threads: int
    rss_bytes: int
    name: str
    uid: int
    inode: int

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start


class OpenFile(NamedTuple):
    """A path that is open: on which descriptor, whether for writing or appending, and the lock on it."""

    fd: int
    path: str
    writes: bool
    appends: bool
    lock: str


class MappedFile(NamedTuple):
    """A mapped file; `file` is its device and inode."""

    path: str
    file: bytes
    is_shared_writable: bool


class ProcDetails(NamedTuple):
    """Facts about one process for the inventory."""

    argv: tuple[str, ...]
    cwd: str = ""
    exe: str = ""
    files: tuple[OpenFile, ...] = ()
    sockets: frozenset[int] = frozenset()
    pipes: frozenset[str] = frozenset()
    streams: tuple[StandardStream, ...] = ()  # descriptors 0 to 2
    mappings: tuple[MappedFile, ...] = ()
    is_traced: bool = False
    is_privileged: bool = False
    foreign: str = ""  # a namespace or root directory that is not the reader's
    read_bytes: int = 0
    written_bytes: int = 0
    problem: str = ""  # the part that could not be read


def read_table() -> dict[int, ProcRow]:
    rows = (read_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def read_row(pid: int) -> ProcRow | None:
    """The process with that pid now; None where there is none."""
    path = f"/proc/{pid}"
    try:
        folder = os.stat(path)
        fd = os.open(path + "/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None
    return _parse_row(text, folder.st_uid, folder.st_ino) if text else None


def _parse_row(text: bytes, uid: int, inode: int) -> ProcRow:
    # The name in parentheses may itself hold spaces and parentheses; after the last one there are only numbers.
    begin, end = text.index(b"("), text.rindex(b")")
    field = text[end + 2 :].split()
    return ProcRow(
        pid=int(text[: begin - 1]),
        ppid=int(field[1]),
        start=int(field[19]),
        group=int(field[2]),
        session=int(field[3]),
        tty=int(field[4]),
        foreground=int(field[5]),
        is_dead=field[0] in b"ZXx" and int(field[17]) <= 1,
        is_kernel=bool(int(field[6]) & _KERNEL_THREAD),
        own_ticks=int(field[11]) + int(field[12]),
        waited_ticks=int(field[13]) + int(field[14]),
        threads=int(field[17]),
        rss_bytes=max(int(field[21]), 0) * PAGE_BYTES,
        name=text[begin + 1 : end].decode(errors="replace"),
        uid=uid,
        inode=inode,
    )


class ReaderIdentity(NamedTuple):
    """The namespaces, the root directory and the capabilities of the reader, to compare others with."""

    namespaces: tuple[str, ...]
    root: str
    capabilities: int

    @classmethod
    def read(cls) -> ReaderIdentity:
        with open_process("self") as folder:
            status = _read_short(folder, "status")
            links = tuple(os.readlink(link, dir_fd=folder) for link in _NAMESPACE_LINKS)
            return cls(links, _link(folder, "root"), int(_status_value(status, b"CapEff") or b"0", 16))


@contextlib.contextmanager
def open_process(name: str | int) -> Iterator[int]:
    """A descriptor of a process's directory; `ProcessGone` where there is none, or it ends meanwhile."""
    try:
        folder = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ProcessGone(f"there is no process {name}") from error
    try:
        yield folder
    except (ProcessLookupError, FileNotFoundError) as error:
        raise ProcessGone(f"process {name} has ended") from error
    finally:
        os.close(folder)


def read_details(row: ProcRow, reader: ReaderIdentity) -> ProcDetails:
    """Details of the process of this row; `ProcessGone` if it is another one by now."""
    with open_process(row.pid) as folder:
        _check_same(folder, row)
        try:
            status = _read_short(folder, "status")
            cmdline, raw_cwd = _read_short(folder, "cmdline"), os.readlink(b"cwd", dir_fd=folder)
            files, sockets, pipes, streams, problem = _descriptors(row.pid, folder)
            if not _is_text(cmdline) or not _is_text(raw_cwd):
                problem = f"the command line or the working directory of process {row.pid} is not UTF-8"
            read = written = b"0"
            if row.own_ticks:  # a process without CPU time has hardly read or written anything
                _, read, _, written, *_ = _read_short(folder, "io").split(maxsplit=4)  # rchar: 5 wchar: 7 ...
            # Privileged: a process that changes its user or group, or has more rights than the reader.
            users, groups = _status_value(status, b"Uid").split(), _status_value(status, b"Gid").split()
            more = int(_status_value(status, b"CapEff") or b"0", 16) & ~reader.capabilities
            mapped: dict[bytes, MappedFile] = {}  # each file once
            for access, file, path in _MAPPED.findall(_read(folder, "maps")):
                is_shared = access.endswith(b"s") and access[1:2] == b"w"
                if is_shared or file not in mapped:
                    mapped[file] = MappedFile(path.decode(errors="replace"), file, is_shared)
            return ProcDetails(
                argv=_words(cmdline),
                cwd=raw_cwd.decode(errors="replace"),
                exe=_link(folder, "exe"),
                files=files,
                sockets=sockets,
                pipes=pipes,
                streams=streams,
                mappings=tuple(mapped.values()),
                is_traced=b"\nTracerPid:\t0\n" not in status,
                is_privileged=(
                    len(set(users)) > 1 or len(set(groups)) > 1 or int(users[0]) != os.getuid() or bool(more)
                ),
                foreign=_foreign(row.pid, folder, reader),
                read_bytes=int(read),
                written_bytes=int(written),
                problem=problem,
            )
        except PermissionError as error:
            if has_ended(row):  # the rest of a dead process is not readable
                raise ProcessGone(f"process {row.pid} has ended") from error
            argv = _words(_read_short(folder, "cmdline"))
            problem = f"process {row.pid} cannot be looked into: {error.strerror}"
            return ProcDetails(argv=argv, problem=problem)


def has_ended(row: ProcRow) -> bool:
    """True if the process of this row has ended; False also if that is unknown."""
    try:
        with open(f"/proc/{row.pid}/stat", "rb") as file:
            now = _parse_row(file.read(), 0, 0)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return now.start != row.start or now.is_dead


def _check_same(folder: int, row: ProcRow) -> None:
    """`ProcessGone` if a directory is not that of the process of this row. The same inode is the same process; the
    kernel may have made another one for it meanwhile, so then its start decides."""
    if os.fstat(folder).st_ino != row.inode and _parse_row(_read_short(folder, "stat"), 0, 0).start != row.start:
        raise ProcessGone(f"process {row.pid} has ended")


def _descriptors(
    pid: int, folder: int
) -> tuple[tuple[OpenFile, ...], frozenset[int], frozenset[str], tuple[StandardStream, ...], str]:
    numbers = sorted(map(int, os.listdir(f"/proc/self/fd/{folder}/fd")))
    problem = f"process {pid} has {len(numbers)} descriptors" if len(numbers) > MAX_DESCRIPTORS else ""
    files: list[OpenFile] = []
    sockets: set[int] = set()
    pipes: set[str] = set()
    standard: dict[int, StandardStream] = {}
    for number in numbers[:MAX_DESCRIPTORS]:
        try:
            link = _text(os.readlink(f"fd/{number}", dir_fd=folder))
        except FileNotFoundError:  # closed meanwhile
            continue
        file: OpenFile | None = None
        if link.startswith("socket:["):
            sockets.add(int(link[8:-1]))
        elif link.startswith("pipe:["):
            pipes.add(link)
        elif link.startswith("/") and link not in HARMLESS_DEVICES:
            file = _open_file(folder, number, link)
            files.append(file)
        if number <= 2:
            standard[number] = _stream(folder, number, link, file)
    streams = tuple(standard.get(number, StandardStream()) for number in range(3))
    return tuple(files), frozenset(sockets), frozenset(pipes), streams, problem


def _open_file(folder: int, number: int, path: str) -> OpenFile:
    try:
        info = _read_short(folder, f"fdinfo/{number}")
    except FileNotFoundError:  # closed meanwhile
        return OpenFile(number, path, False, False, "")
    flags = int(info[info.index(b"flags:") + 6 :].split(maxsplit=1)[0], 8)
    lock = ""
    if (begin := info.find(b"\nlock:")) >= 0:  # lock:  1: FLOCK  ADVISORY  WRITE 359 00:13:11691 0 EOF
        words = info[begin:].split(maxsplit=5)
        lock = f"{words[2].decode()} {words[4].decode()}".lower() if len(words) > 4 else "lock"
    return OpenFile(number, path, bool(flags & os.O_ACCMODE), bool(flags & os.O_APPEND), lock)


def _stream(folder: int, number: int, link: str, file: OpenFile | None) -> StandardStream:
    if link in HARMLESS_DEVICES:
        return StandardStream(StreamKind.NULL)
    if is_terminal(link):
        return StandardStream(StreamKind.TERMINAL, link)
    if file is not None:
        is_fifo = False
        with contextlib.suppress(OSError):
            is_fifo = stat.S_ISFIFO(os.stat(f"fd/{number}", dir_fd=folder).st_mode)
        kind = StreamKind.OTHER if link.startswith("/dev/") or is_fifo else StreamKind.FILE
        return StandardStream(kind, link, file.appends)
    kinds = {"pipe": StreamKind.PIPE, "socket": StreamKind.SOCKET}
    return StandardStream(kinds.get(link.partition(":")[0], StreamKind.OTHER), link)


def is_terminal(path: str) -> bool:
    """True for the path of a terminal, or of the master side of one."""
    return path.startswith(("/dev/pts/", "/dev/tty", "/dev/console", "/dev/ptmx"))


def _foreign(pid: int, folder: int, reader: ReaderIdentity) -> str:
    for link, own in zip(_NAMESPACE_LINKS, reader.namespaces, strict=True):
        if os.readlink(link, dir_fd=folder) != own:
            return f"process {pid} is in another {link[3:]} namespace"
    root = _link(folder, "root")
    return f"process {pid} has {root} as its root directory" if root != reader.root else ""


def read_environment(row: ProcRow, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The variables of these names that a process was started with."""
    wanted = set(names)
    variables: dict[str, str] = {}
    with open_process(row.pid) as folder:
        _check_same(folder, row)
        for pair in _read(folder, "environ").split(b"\0"):
            name, _, value = pair.decode(errors="replace").partition("=")
            if name in wanted:
                variables.setdefault(name, value)
    return tuple(sorted(variables.items()))


def read_environment_digest(row: ProcRow) -> str:
    with open_process(row.pid) as folder:
        _check_same(folder, row)
        return hashlib.sha256(_read(folder, "environ")).hexdigest()


def read_pss_bytes(row: ProcRow) -> int:
    """Memory by share (PSS), each shared page divided by its users; the resident memory if the share is unknown."""
    try:
        with open_process(row.pid) as folder:
            text = _read(folder, "smaps_rollup")
    except (ProcessGone, OSError):
        return row.rss_bytes
    begin = text.find(b"\nPss:")
    return 1024 * int(text[begin + 5 :].split(maxsplit=1)[0]) if begin >= 0 else row.rss_bytes


def read_cgroup(pid: int) -> str:
    """The last part of a process's control group (of systemd's hierarchy where there are several); empty if unknown."""
    try:
        with open_process(pid) as folder:
            lines = _read(folder, "cgroup").decode(errors="replace").splitlines()
    except (ProcessGone, OSError):
        return ""
    own = [line for line in lines if line.startswith("0::") or ":name=systemd:" in line]
    return max((line.rpartition(":")[2].rpartition("/")[2] for line in own), key=len, default="")


def _words(cmdline: bytes) -> tuple[str, ...]:
    return tuple(word.decode(errors="replace") for word in cmdline.rstrip(b"\0").split(b"\0")) if cmdline else ()


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _status_value(status: bytes, name: bytes) -> bytes:
    begin = status.find(b"\n%s:" % name)
    return status[begin + len(name) + 2 : status.find(b"\n", begin + 1)].strip() if begin >= 0 else b""


def _link(folder: int, name: str) -> str:
    try:
        return _text(os.readlink(name, dir_fd=folder))
    except FileNotFoundError:
        return ""


def _text(path: str) -> str:
    """A path as messages can carry it."""
    return path if path.isascii() else path.encode(errors="surrogateescape").decode(errors="replace")


def _read(folder: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return read_all(fd, MAX_READ_BYTES)
    finally:
        os.close(fd)


def _read_short(folder: int, name: str) -> bytes:
    """A file that the kernel writes at once: one read is all of it, if it is not longer than what was asked for."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        text = os.read(fd, 16_384)
        return text if len(text) < 16_384 else text + read_all(fd, MAX_READ_BYTES)
    finally:
        os.close(fd)
