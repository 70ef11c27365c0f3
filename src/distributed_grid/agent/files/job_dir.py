"""The directories of an attempt and its journal. Standard library only.

Below the root, mode 0700 (files 0600):

    .control/                 written by agent, spawner and shims only: no job's directory is in it, and no descriptor
                              or variable of a job points into it
        .host.lock            held by the one `AttemptHost` of this root and by its spawner
        .watch.lock           held by the process that ends attempts whose shim is stopped at the end of their hold
        .throttled            exists while attempts may be stopped or confined because the owner needs the machine
        .hold                 the hold deadline of all attempts that have a hold; made with the root and then written
                              in place, which a full disk has room for
        .machine              a name for this root, made with it
        .live/<attempt id>    a link to .host.lock; exists from before the launch until the end has been acknowledged
        <attempt id>/
            spec.json         everything needed to run it, its first cores included; there before the shim
            shim.lock         made before a shim gets it, locked while that shim lives. Holds the shim's boot id, pid
                              and start time, written first of all: without them nothing ever ran. Then, that the
                              command runs: its pid and start time, when, on which cores
            exit.json         its end; written once
            cores.json        the cores it was moved to, once it was
            fence.json        with the nonce: a fence newer than the one in spec.json, once one was seen
            memory.json       with the nonce: the present size of its lease, and its limit
            groups.json       control groups made for it, so that leftover ones can be found and removed
            stop.json         the request to stop it: ending, detail, when to kill
            output.json       bytes dropped at the head of stdout and stderr, once some were
            home              it ran on another machine, and its files were brought here
            age               the age of this machine when its end was first seen; it is removed a month later
            output_home       it ran on another machine, and its output was brought here, but not its files
    <attempt id>/             the job's: nothing in it is trusted
        notice                reason and time of a coming stop. The command knows the path as $GRID_NOTICE
        checkpoint            written by the command, as $GRID_CHECKPOINT, whenever it has marked a checkpoint
        stdout, stderr        output of the command
        work/                 the command's own: $GRID_JOB_DIR
        checkpoints/          the job's, as $GRID_CHECKPOINT_DIR: the next attempt gets the files left here

spec.json, shim.lock and exit.json are names of one file, the journal: making a file may cost more than writing it.
Where there are no hard links they are files of their own. The journal is appended to: its first line is the spec, and
each later line is a JSON object with the key `shim`, `started` or `ended`, and with the attempt's nonce, which is also
in the spec: a line without it counts as absent. Its blocks are reserved when it is made, so an end needs no room. Every
line begins by ending the one before, so a line cut short by a crash or a full disk counts as absent and hides none that
follows. Nothing is written twice unless it is the same.

Any other file is written aside and renamed, so a reader never sees half of anything. Names come from outside: they are
checked, and opened relative to an open directory, through no link. A file is read only if it is a regular one, without
ever blocking, and up to a size; anything else in its place counts as damaged, which is to a reader as if it was absent.
A lock belongs to the file, not to the name: a journal is locked as shim.lock only, and no file in .live is. exit.json
appears when the end is in the journal; an end in the journal of a shim that died before it showed it counts as well. It
is on the disk when the control plane has not acknowledged it within a moment (`sync_end`), or when no agent was there
to report it: an acknowledged end is in the control plane's store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from typing import TYPE_CHECKING, Any

from distributed_grid.posix.file_blocks import reserve_blocks
from distributed_grid.posix.private_files import DAMAGE, open_regular, read_regular, replace_file, try_lock, write_all

if TYPE_CHECKING:
    from types import TracebackType


CONTROL = ".control"
HOST_LOCK = f"{CONTROL}/.host.lock"
HOLD = f"{CONTROL}/.hold"
WATCH_LOCK = f"{CONTROL}/.watch.lock"
THROTTLED = f"{CONTROL}/.throttled"
SPAWNER_LOG = f"{CONTROL}/.spawner.log"
LIVE = f"{CONTROL}/.live"
MACHINE = f"{CONTROL}/.machine"
SPEC, CORES, FENCE, LOCK, GROUPS = "spec.json", "cores.json", "fence.json", "shim.lock", "groups.json"
MEMORY = "memory.json"
STARTED, STOP, EXIT, HOME, OUTPUT_HOME, AGE = "started", "stop.json", "exit.json", "home", "output_home", "age"
STDOUT, STDERR, WORK, NOTICE, CHECKPOINT = "stdout", "stderr", "work", "notice", "checkpoint"
CHECKPOINT_DIR = "checkpoints"
DROPPED_OUTPUT = "output.json"
MAX_JOURNAL_BYTES = 64 << 20  # a spec is at most one message of 4 MiB, as JSON with every character escaped
MAX_FILE_BYTES = 1 << 20
RECORD_BYTES = 16 << 10
"""For what shim and host append to a journal: who the shim is, the start with its cores, the end."""

# The files that may hold each part of the journal, and its key there; EXIT may be a file of its own.
_JOURNAL_PARTS = {LOCK: ((LOCK, SPEC), "shim"), STARTED: ((LOCK,), "started"), EXIT: ((EXIT,), "ended")}
MAX_HOLD_BYTES = 200
HOLD_READS = 1000  # until none was cut in two by the agent that wrote meanwhile
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_safe_name(name: str) -> bool:
    return _SAFE_NAME.fullmatch(name) is not None


class JobDir:
    """The open control directory of an attempt; `path` is the job's own directory beside it."""

    __slots__ = ("attempt_id", "fd", "path")

    def __init__(self, root: str, attempt_id: str) -> None:
        """Open it. `FileNotFoundError` when there is none, `ValueError` for a name that is not safe."""
        if not is_safe_name(attempt_id):
            raise ValueError(f"not a safe attempt id: {attempt_id!r}")
        self.attempt_id = attempt_id
        self.path = f"{root}/{attempt_id}"
        self.fd = os.open(f"{root}/{CONTROL}/{attempt_id}", _DIRECTORY)

    @classmethod
    def make(cls, root: str, attempt_id: str) -> JobDir:
        """Open it, made if need be, and list it as live. A second call changes nothing."""
        if not is_safe_name(attempt_id):
            raise ValueError(f"not a safe attempt id: {attempt_id!r}")
        live = f"{root}/{LIVE}/{attempt_id}"
        try:
            os.link(f"{root}/{HOST_LOCK}", live, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError:  # no hard links here, or too many of them
            os.close(os.open(live, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        own = f"{root}/{attempt_id}"
        for path in (f"{root}/{CONTROL}/{attempt_id}", own, f"{own}/{WORK}", f"{own}/{CHECKPOINT_DIR}"):
            _make_directory(path)
        return cls(root, attempt_id)

    def __enter__(self) -> JobDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    def open(self, name: str, flags: int) -> int:
        """Descriptor of one of the control files; raises `OSError` for anything but a regular file."""
        return open_regular(name, flags, self.fd)

    def open_job_file(self, name: str, flags: int) -> int:
        """A descriptor of one of the files that the job may have touched; `OSError` where it is no regular file."""
        folder = os.open(self.path, _DIRECTORY)
        try:
            return open_regular(name, flags, folder)
        finally:
            os.close(folder)

    @property
    def is_removed(self) -> bool:
        """True if the directory was removed: no reader will ever find its files."""
        return os.fstat(self.fd).st_nlink == 0

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> Any:
        """The content of a JSON file, or of its part of the journal; None when it is absent, cut short or damaged."""
        if name == SPEC:
            return first_entry(self._contents(SPEC))
        if name not in _JOURNAL_PARTS:
            return parse_json(self._contents(name))
        files, key = _JOURNAL_PARTS[name]
        nonce = self.nonce()
        values = (find_entry(text, key, nonce) for text in map(self._contents, files))
        return next((entry for entry in values if entry is not None), None)

    def nonce(self) -> str:
        """Mark on all records of the attempt's shim and host; empty if the spec is damaged."""
        spec = self.read(SPEC)
        nonce = spec.get("nonce") if isinstance(spec, dict) else None
        return nonce if isinstance(nonce, str) else ""

    def read_end(self) -> Any:
        """Recorded end; None before it. A record of a dead shim that is not shown yet is shown first."""
        record = self.read(EXIT)
        if record is not None or self.is_locked():
            return record
        file = LOCK if self.has(LOCK) else SPEC
        record = find_entry(self._contents(file), "ended", self.nonce())
        if record is not None:
            with contextlib.suppress(OSError):  # no room: it will be found again as it was found now
                fd = self.open(file, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self._show_end(file, record)
        return record or self.read(EXIT)

    def write_end(self, lock: int, record: Any, nonce: str = "") -> None:
        """Put the end into the journal, then show it; after an `OSError` it may be repeated."""
        append_entry(lock, journal_entry("ended", record, nonce))
        self._show_end(LOCK, record)

    def sync_end(self) -> None:
        """Have the end that is shown on the disk before this returns; where none is shown this does nothing."""
        try:
            fd = self.open(EXIT, os.O_RDONLY)
        except OSError as error:
            if error.errno in DAMAGE:
                return
            raise
        try:
            os.fsync(fd)  # and with it, on ext4, xfs and btrfs, the names of a file this new
        finally:
            os.close(fd)

    def _show_end(self, file: str, record: Any) -> None:
        try:
            os.link(file, EXIT, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            self.write_exit(record)

    def write_exit(self, record: Any) -> None:
        """Write the end into a file of its own, durably: no shim has written it."""
        self.write(EXIT, {"ended": record, "nonce": self.nonce()}, durable=True)

    def _contents(self, name: str) -> bytes:
        """Content of a file; empty if it is missing, or no regular file of plausible size."""
        return read_regular(name, self.fd, MAX_JOURNAL_BYTES if name in (SPEC, LOCK, EXIT) else MAX_FILE_BYTES)

    def write(self, name: str, content: Any, *, durable: bool = False) -> None:
        """Put `content` there as JSON, whole; when `durable` it is on the disk before this returns."""
        replace_file(name, json.dumps(content).encode(), self.fd, durable=durable)

    def write_spec(self, spec: Any) -> None:
        """Begin the journal with the spec. It has blocks for all that follows, so that on a full disk the start and
        the end of the attempt are recorded nevertheless."""
        content = json.dumps(spec).encode()
        replace_file(SPEC, content, self.fd)
        fd = self.open(SPEC, os.O_WRONLY)
        try:
            reserve_blocks(fd, len(content), RECORD_BYTES)
        except OSError as error:  # a file system that cannot reserve blocks works without them
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def take_lock(self) -> int | None:
        """The shim's lock as a descriptor that holds it for as long as anybody has it open, and that appends.

        None if it is or was locked: the file is removed only when it is certain that nothing ran.
        """
        try:
            try:
                os.link(SPEC, LOCK, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
            except OSError:  # no hard links here
                os.close(self.open(LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        fd = self.open(LOCK, os.O_RDWR | os.O_APPEND)
        if try_lock(fd, exclusive=True):
            return fd
        os.close(fd)
        return None

    def is_locked(self) -> bool:
        """True if the shim is alive."""
        try:
            fd = self.open(LOCK, os.O_RDWR)
        except OSError as error:
            if error.errno in DAMAGE:
                return False
            raise
        try:
            return not try_lock(fd, exclusive=False)
        finally:
            os.close(fd)


def open_job_folder(root: str, attempt_id: str) -> int:
    """Descriptor of the job's own directory of an attempt; errors as those of `JobDir`."""
    if not is_safe_name(attempt_id):
        raise ValueError(f"not a safe attempt id: {attempt_id!r}")
    return os.open(f"{root}/{attempt_id}", _DIRECTORY)


def open_attempt_directory(root: str, attempt_id: str, name: str) -> int:
    """A descriptor of a directory of an attempt; `FileNotFoundError` where there is none, or a link in its place."""
    folder = open_job_folder(root, attempt_id)
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except NotADirectoryError as error:  # or a link
        raise FileNotFoundError(error.errno, error.strerror, name) from error
    finally:
        os.close(folder)


def has_checkpoint(root: str, attempt_id: str) -> bool:
    """True unless the checkpoint directory of an attempt is known to be empty."""
    try:
        folder = open_attempt_directory(root, attempt_id, CHECKPOINT_DIR)
    except (OSError, ValueError):
        return True
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return True
    finally:
        os.close(folder)


def mark_home(root: str, attempt_id: str, *, only_output: bool = False) -> None:
    """Note that the files of an attempt of another machine are all here, or only its output; they are kept as long as
    those of an own."""
    if not is_safe_name(attempt_id):
        raise ValueError(f"not a safe attempt id: {attempt_id!r}")
    path = f"{root}/{CONTROL}/{attempt_id}"
    _make_directory(path)
    folder = os.open(path, _DIRECTORY)
    try:
        for name in (EXIT, OUTPUT_HOME if only_output else HOME):  # in this order: the second marks it as complete
            replace_file(name, b"{}", folder, durable=True)
    finally:
        os.close(folder)


def dropped_output(root: str, attempt_id: str, name: str) -> int:
    """Bytes at the head of an output file that were dropped; 0 where none were."""
    try:
        with JobDir(root, attempt_id) as job:
            sizes = job.read(DROPPED_OUTPUT)
    except (OSError, ValueError):
        return 0
    dropped = sizes.get(name) if isinstance(sizes, dict) else None
    return dropped if type(dropped) is int and dropped > 0 else 0


def record_dropped_output(root: str, attempt_id: str, name: str, dropped: int) -> None:
    """Note that the copy of an output file begins with a hole; it is no part of the output."""
    if not is_safe_name(attempt_id):
        raise ValueError(f"not a safe attempt id: {attempt_id!r}")
    _make_directory(f"{root}/{CONTROL}/{attempt_id}")
    sizes = {other: dropped_output(root, attempt_id, other) for other in (STDOUT, STDERR)} | {name: dropped}
    with JobDir(root, attempt_id) as job:
        job.write(DROPPED_OUTPUT, sizes)


def is_home(root: str, attempt_id: str) -> bool:
    """True if the files of an attempt of another machine were brought here."""
    return is_safe_name(attempt_id) and os.path.exists(f"{root}/{CONTROL}/{attempt_id}/{HOME}")


def is_output_home(root: str, attempt_id: str) -> bool:
    """True if the output of an attempt of another machine was brought here, with or without its files."""
    folder = f"{root}/{CONTROL}/{attempt_id}"
    return is_safe_name(attempt_id) and (os.path.exists(f"{folder}/{OUTPUT_HOME}") or is_home(root, attempt_id))


def machine_name(root: str, machine: str) -> str:
    """A name for this machine and this very root, the same for as long as both last."""
    path, fresh = f"{root}/{MACHINE}", os.urandom(12).hex()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, fresh.encode())
        finally:
            os.close(fd)
    except OSError:  # it is there, or there is no room: then it lasts as long as this process
        pass
    stored = read_regular(path, None, MAX_FILE_BYTES).decode("ascii", "replace")
    return f"{machine}-{stored if len(stored) == len(fresh) else fresh}"


def make_hold(root: str) -> None:
    """Reserve a file for the hold deadline of the root, so that writing one needs no room; an existing one stays."""
    if not read_regular(f"{root}/{HOLD}", None, MAX_FILE_BYTES):
        _replace_hold(root, _hold_record(0, ""))


def write_hold(root: str, until_boot_ms: int, key: str) -> None:
    """Write the hold deadline of everything below the root, in place."""
    record = _hold_record(until_boot_ms, key)
    try:
        fd = open_regular(f"{root}/{HOLD}", os.O_WRONLY)
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        _replace_hold(root, record)
        return
    try:
        os.pwrite(fd, record, 0)
        os.ftruncate(fd, len(record))
    finally:
        os.close(fd)


def _replace_hold(root: str, record: bytes) -> None:
    folder = os.open(f"{root}/{CONTROL}", _DIRECTORY)
    try:
        replace_file(HOLD.rpartition("/")[2], record, folder, durable=True)
    finally:
        os.close(folder)


def read_hold(root: str, key: str) -> int:
    """Hold deadline of the root; 0 if none was written with this key, that of the attempts of a boot."""
    until, written_key = read_hold_record(root)
    return until if written_key == key else 0


def read_hold_record(root: str) -> tuple[int, str]:
    """The hold deadline that is written and its key, whichever that is; (0, "") where none is."""
    for _ in range(HOLD_READS):
        words = read_regular(f"{root}/{HOLD}", None, MAX_FILE_BYTES)[:MAX_HOLD_BYTES].decode("ascii", "replace").split()
        if len(words) != 3 or words[0] == words[2]:
            return (int(words[0]), words[1]) if len(words) == 3 and words[0].isdecimal() else (0, "")
    return 0, ""


def _hold_record(until_boot_ms: int, key: str) -> bytes:
    """The deadline twice, with the key in between: a reader during the write sees that they differ."""
    return f"{until_boot_ms:020} {key or '-':<40.40} {until_boot_ms:020}\n".encode()


def _make_directory(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def make_root(root: str) -> None:
    os.makedirs(root, 0o700, exist_ok=True)
    for name in (CONTROL, LIVE):
        _make_directory(f"{root}/{name}")


def live_shim_locks(root: str) -> list[str]:
    """The lock files of the shims of all live attempts."""
    try:
        return [f"{root}/{CONTROL}/{attempt_id}/{LOCK}" for attempt_id in os.listdir(f"{root}/{LIVE}")]
    except FileNotFoundError:
        return []


def journal_entry(key: str, content: Any, nonce: str = "") -> bytes:
    """One line, for `append_entry` or for the channel to the host."""
    return json.dumps({key: content, "nonce": nonce}).encode() + b"\n"


def append_entry(fd: int, line: bytes) -> None:
    """Append the line to a journal opened with O_APPEND; after an `OSError` it may simply be repeated."""
    write_all(fd, b"\n" + line)


def find_entry(text: bytes, key: str, nonce: str = "") -> Any:
    """Value of `key` in a journal; None if no whole line has it together with the nonce."""
    start = f'{{"{key}": '.encode()
    entries = (parse_json(line) for line in text.split(b"\n") if line.startswith(start))
    return next((line[key] for line in entries if line is not None and line.get("nonce") == nonce), None)


def first_entry(text: bytes) -> Any:
    """First line; None when it was cut short."""
    return parse_json(text.partition(b"\n")[0])


def parse_json(text: bytes) -> Any:
    """The JSON value; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
