"""Process inventory of a machine: the pieces of work of this user that the grid did not start, as facts.

`ProcessQueries` answers the control plane's questions about processes and files with it.

One scan reads the process table, then the processes of this user one by one. CPU use is that between two scans, or
since the start of a process where there was none. A scan touches the files that commands name, so it may hang with a
network file system: make it in a thread.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from distributed_grid.adapters.probes.procfs import TICK_MS, OpenSockets, read_open_sockets
from distributed_grid.agent.offloading import proc_entries
from distributed_grid.agent.offloading.proc_entries import ProcDetails, ProcessGone, ProcRow, ReaderIdentity
from distributed_grid.agent.offloading.work_trees import (
    NeededFiles,
    WorkForest,
    is_below,
    is_interactive_shell,
    lineage,
    missing_files,
    needed_secrets,
)
from distributed_grid.domain.processes import MAX_ARGV, MAX_PATHS, MAX_WORD_CHARS, ProcessInfo, StreamKind
from distributed_grid.masking.command_line import CUT_MARGIN_CHARS, mask_secrets
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.supervision import start_logged
from distributed_grid.trees.secret_files import never_shipped_unasked
from distributed_grid.wire import (
    MAX_MESSAGE_BYTES,
    MAX_PROCESSES,
    CheckFiles,
    FilesChecked,
    ListProcesses,
    ProcessListing,
    clipped,
    encode,
)

MAX_ARGV_CHARS, MAX_ENVIRONMENT_CHARS = 32_768, 131_072
MIN_WINDOW_MS = 500
"""Two scans that are closer than this give no rate."""
PSS_FROM_BYTES = 32 << 20
"""Of smaller trees the resident memory is reported: walking page tables takes longer than the rest of a scan."""
PSS_SECONDS = 0.1
"""Time for the shares of the largest trees, in one scan."""
RAY_FOLDERS = ("/ray/_private/", "/ray/dashboard/", "/ray/util/client/")
_SHARED_FOLDER, _SYSV, _MEMFD = "/dev/shm/", "/SYSV", "/memfd:"  # noqa: S108 the kernel's names


class Surroundings(Struct, frozen=True):
    """Facts that only the agent has: its own processes, its attempts by the pid of their shim, GPU memory by pid."""

    own_pids: Collection[int] = ()
    attempts: Mapping[int, str] = {}
    gpu_memory: Mapping[int, int] = {}


NO_SURROUNDINGS = Surroundings()


class ProcessInventory:
    """Scans this user's processes; remembers CPU times from scan to scan."""

    def __init__(self, uid: int | None = None) -> None:
        self._uid = os.getuid() if uid is None else uid
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}

    def scan(
        self,
        surroundings: Surroundings = NO_SURROUNDINGS,
        *,
        pid: int = 0,
        variables: tuple[str, ...] = (),
        measures_memory: bool = True,
    ) -> list[ProcessInfo]:
        """All pieces of work, the largest users first; or the one that begins at `pid`, if it is this user's. Without
        `measures_memory` the resident memory is reported."""
        scan = _InventoryScan(self._uid, surroundings, self._seen)
        return scan.processes(pid, variables, PSS_SECONDS if measures_memory else 0)


class _InventoryScan:
    """One scan: the entries of /proc, each read once, and the trees made of them."""

    def __init__(self, uid: int, surroundings: Surroundings, seen: dict[tuple[int, int], tuple[int, int]]) -> None:
        self._uid = uid
        self._around = surroundings
        self._seen = seen
        self._now_ms = boot_ms()
        self._boot = boot_id()
        self._reader = ReaderIdentity.read()
        self._table = proc_entries.read_table()
        self._details: dict[int, ProcDetails | None] = {}
        self._needed = NeededFiles()
        self._parts: dict[int, tuple[bool, bool]] = {}
        self._jobs: dict[int, str] = {}  # the attempt of this agent that a process belongs to
        for row in self._table.values() if surroundings.attempts else ():
            shims = (member.pid for member in lineage(row, self._table) if member.pid in surroundings.attempts)
            if shim := next(shims, 0):
                self._jobs[row.pid] = surroundings.attempts[shim]
        self._forest = WorkForest(self._table, uid, self._is_left_out, self._is_typed_at, proc_entries.read_cgroup)
        self._sockets = OpenSockets()
        self._pipe_users: dict[str, set[int]] = {}
        self._memory_users: dict[bytes, set[int]] = {}

    def processes(self, pid: int, variables: tuple[str, ...], pss_seconds: float) -> list[ProcessInfo]:
        if pid:
            row = self._table.get(pid)
            roots = [row] if row is not None and row.uid == self._uid and not row.is_kernel and not row.is_dead else []
        else:
            roots = self._forest.roots()
        trees = [self._forest.tree(root, whole=bool(pid)) for root in roots]
        members = {row.pid: row for tree in trees for row in tree}
        for row in members.values():
            self._index(row)
        if not pid or self._pipe_users or self._memory_users:  # others may have a part in these
            for row in self._table.values():
                if row.uid == self._uid and not row.is_kernel and not row.is_dead and row.pid not in members:
                    self._index(row)
        if any(details is not None and details.sockets for details in map(self._read, members.values())):
            self._sockets = read_open_sockets()
        # Memory of each tree by the pid of its root: the shares of the larger ones, as long as there is time.
        pss = {tree[0].pid: sum(row.rss_bytes for row in tree) for tree in trees}
        until = time.monotonic() + pss_seconds
        for tree in sorted(trees, key=lambda tree: -pss[tree[0].pid]):
            if pss[tree[0].pid] < PSS_FROM_BYTES or time.monotonic() >= until:
                break
            pss[tree[0].pid] = sum(proc_entries.read_pss_bytes(row) for row in tree)
        described = (self._describe(tree, pss[tree[0].pid], variables, is_asked_for=bool(pid)) for tree in trees)
        processes = [process for process in described if process is not None]
        # Keep this scan for the next one, and of processes that were scanned a moment ago the earlier one.
        recent = {key: seen for key, seen in self._seen.items() if self._now_ms - seen[0] < MIN_WINDOW_MS}
        own = (row for row in self._table.values() if row.uid == self._uid and not row.is_kernel)
        scanned = {row.key: recent.get(row.key) or (self._now_ms, row.own_ticks) for row in own}
        self._seen.clear()
        self._seen.update(scanned)
        return sorted(processes, key=lambda process: (-process.cpu_milli, -process.pss_bytes, process.pid))

    # ------------------------------------------------------------------ roles of processes

    def _is_left_out(self, row: ProcRow) -> bool:
        """Jobs of this agent, and the agent with all that it has started."""
        own = self._around.own_pids
        return row.pid in self._jobs or any(member.pid in own for member in lineage(row, self._table))

    def _is_typed_at(self, row: ProcRow) -> bool:
        details = self._read(row)
        if details is None:
            return False
        stdin = details.streams[0] if details.streams else None
        terminal = stdin.path if stdin is not None and stdin.kind is StreamKind.TERMINAL else ""
        return is_interactive_shell(row.name, details.argv, terminal)

    def _read(self, row: ProcRow) -> ProcDetails | None:
        if row.pid not in self._details:
            try:
                self._details[row.pid] = proc_entries.read_details(row, self._reader)
            except (ProcessGone, OSError):
                self._details[row.pid] = None
        return self._details[row.pid]

    def _index(self, row: ProcRow) -> None:
        """Remember which pipes and which shared memory a process uses."""
        details = self._read(row)
        if details is None:
            return
        for pipe in details.pipes:
            self._pipe_users.setdefault(pipe, set()).add(row.pid)
        for mapping in details.mappings:
            if mapping.is_shared_writable:
                self._memory_users.setdefault(mapping.file, set()).add(row.pid)

    # ------------------------------------------------------------------ one tree

    def _describe(
        self, tree: list[ProcRow], pss_bytes: int, variables: tuple[str, ...], *, is_asked_for: bool
    ) -> ProcessInfo | None:
        root = tree[0]
        known = [(row, details) for row in tree if (details := self._read(row)) is not None]
        if not known or known[0][0] is not root:
            return None  # it has ended
        try:
            environment = proc_entries.read_environment(root, variables) if variables else ()
            environment_digest = proc_entries.read_environment_digest(root) if is_asked_for else ""
        except (ProcessGone, OSError):
            return None
        first, members = known[0][1], [details for _, details in known]
        argv, has_secret, problem = _shown_argv(first.argv)
        if sum(len(value) for _, value in environment) > MAX_ENVIRONMENT_CHARS:
            environment, problem = (), "the variables that were asked for are too long"
        age_ms = max(self._now_ms - root.start * TICK_MS, 0)
        holds_gpu = any(file.path.startswith("/dev/nvidia") for member in members for file in member.files)
        gpu_bytes = sum(self._around.gpu_memory.get(row.pid, 0) for row in tree)
        others = [row for row in tree if row.uid != self._uid]
        line = list(lineage(root, self._table))
        pids = {row.pid for row, _ in known}
        unknown = sum(row.pid not in pids and not proc_entries.has_ended(row) for row in tree)
        # Connections to processes outside of the tree; those over Unix sockets within it do not count.
        own_sockets = frozenset().union(*(member.sockets for member in members))
        peers = self._sockets.unix_peers
        cpu_milli = 0
        for row in tree:
            before_ms, ticks = self._seen.get(row.key, (0, 0))
            if before_ms and self._now_ms - before_ms >= MIN_WINDOW_MS:
                cpu_milli += max(row.own_ticks - ticks, 0) * TICK_MS * 1000 // (self._now_ms - before_ms)
            else:
                cpu_milli += row.own_ticks * TICK_MS * 1000 // max(self._now_ms - row.start * TICK_MS, TICK_MS)
        return ProcessInfo(
            pid=root.pid,
            pid_start=root.start,
            boot=self._boot,
            ppid=root.ppid,
            uid=root.uid,
            user=_user_name(root.uid),
            name=root.name,
            argv=argv,
            cwd=first.cwd,
            exe=first.exe,
            age_ms=age_ms,
            cpu_milli=cpu_milli,
            cpu_ms=sum(row.own_ticks + row.waited_ticks for row in tree) * TICK_MS,
            pss_bytes=pss_bytes,
            gpu_memory_bytes=max(gpu_bytes, int(holds_gpu)),
            read_bytes=sum(member.read_bytes for member in members),
            written_bytes=sum(member.written_bytes for member in members),
            processes=len(tree),
            threads=sum(row.threads for row in tree),
            streams=first.streams,
            parent=self._forest.waiting_parent(root),
            job=self._jobs.get(root.pid, ""),
            has_secret=has_secret,
            is_grid=any(self._is_part(row)[0] for row in (*line, *tree)),
            is_ray=any(self._is_part(row)[1] for row in (*line, *tree)),
            listening=_first(
                text
                for member in members
                for text in (
                    self._sockets.listening[inode]
                    for inode in sorted(member.sockets)
                    if inode in self._sockets.listening
                )
            ),
            connections=(
                len(own_sockets & self._sockets.connected)
                + sum(1 for inode in own_sockets if inode in peers and peers[inode] not in own_sockets)
            ),
            locks=_first(f"{file.lock} on {file.path}" for member in members for file in member.files if file.lock),
            outside_writes=self._outside_writes(root, known),
            shared_memory=self._shared_memory(known, first.cwd),
            traced=any(member.is_traced for member in members),
            setuid=bool(others) or any(member.is_privileged for member in members),
            foreign_namespace=next((member.foreign for member in members if member.foreign), ""),
            other_sessions=sum(1 for row in self._forest.tree(root, whole=True) if row.session != root.session),
            unreadable=problem
            or next((member.problem for member in members if member.problem), "")
            or (f"{unknown} of its processes could not be read" if unknown else ""),
            needs=self._needed.find(first, members),
            environment=environment,
            cwd_problem=never_shipped_unasked(first.cwd) if first.cwd else "",
            needed_secrets=_first(needed_secrets(first, members)),
            environment_digest=environment_digest,
        )

    def _is_part(self, row: ProcRow) -> tuple[bool, bool]:
        """Membership of a process in the grid, and in Ray."""
        if row.pid not in self._parts:
            details = self._read(row) if row.uid == self._uid else None
            argv, exe = (details.argv, details.exe) if details is not None else ((), "")
            # The grid: its daemon, agents, shims, guards, or `grid` itself.
            is_module = any(word == "-m" and name.startswith("distributed_grid") for word, name in pairwise(argv))
            script = next((word for word in argv[1:] if not word.startswith("-")), "")
            is_grid = is_module or ("python" in exe.rpartition("/")[2] and script.rpartition("/")[2] == "grid")
            is_ray = exe.endswith(("/raylet/raylet", "/gcs/gcs_server")) or "".join(argv[:1]).startswith("ray::")
            is_ray = is_ray or any(folder in word for word in argv[:4] for folder in RAY_FOLDERS)
            self._parts[row.pid] = is_grid, is_ray
        return self._parts[row.pid]

    def _outside_writes(self, root: ProcRow, known: Sequence[tuple[ProcRow, ProcDetails]]) -> tuple[str, ...]:
        """Files open for writing that are not below the working directory of the root, and devices; a foreign pipe that
        only a child has, too. Deleted files, which no other process can open, are left out."""
        cwd, first = known[0][1].cwd, known[0][1]
        terminals = {stream.path for stream in first.streams if stream.kind is StreamKind.TERMINAL}
        paths: dict[str, None] = {}
        for row, member in known:
            for file in member.files:
                is_device = file.path.startswith("/dev/")
                if file.path in terminals or file.path.startswith(("/dev/nvidia", _SHARED_FOLDER)):
                    continue
                if is_device or (
                    file.writes
                    and not is_below(file.path, cwd)
                    and (not file.path.endswith(proc_entries.DELETED) and not file.path.startswith(_MEMFD))
                ):
                    paths[file.path] = None
            pids = {other.pid for other, _ in known}
            for stream in member.streams if row is not root else ():
                is_shared = not self._pipe_users.get(stream.path, set()) <= pids
                if stream.kind is StreamKind.PIPE and is_shared and stream not in first.streams:
                    paths[f"{stream.path} of process {row.pid}"] = None
        return _first(paths)

    def _shared_memory(self, known: Sequence[tuple[ProcRow, ProcDetails]], cwd: str) -> tuple[str, ...]:
        """Memory that others can see: that has a name, or that a process outside of the tree has mapped."""
        pids = {row.pid for row, _ in known}
        paths: dict[str, None] = {}
        for _, member in known:
            for mapping in member.mappings:
                if not mapping.is_shared_writable or mapping.path.startswith("/dev/nvidia"):
                    continue
                path = mapping.path
                is_nameless = path.endswith(proc_entries.DELETED) and not path.startswith(_SYSV)
                if is_below(path, cwd) and not is_nameless:
                    continue
                if not is_nameless or not self._memory_users.get(mapping.file, set()) <= pids:
                    paths[path] = None
            for file in member.files:
                if (
                    file.path.startswith(_SHARED_FOLDER)
                    and file.writes
                    and not file.path.endswith(proc_entries.DELETED)
                ):
                    paths[file.path] = None
        return _first(paths)


def _shown_argv(argv: tuple[str, ...]) -> tuple[tuple[str, ...], bool, str]:
    """The command, masked, as far as a message carries it; whether it holds a secret; the problem if it is cut."""
    size = sum(map(len, argv))
    if len(argv) <= MAX_ARGV and size <= MAX_ARGV_CHARS and all(len(word) <= MAX_WORD_CHARS for word in argv):
        room, problem = MAX_WORD_CHARS, ""
    else:
        room, problem = MAX_ARGV_CHARS // MAX_ARGV, f"its command line is too long ({size} characters)"
        argv = tuple(word[: room + CUT_MARGIN_CHARS] for word in argv[:MAX_ARGV])
    masked, has_secret = mask_secrets(argv)
    return tuple(word[:room] for word in masked), has_secret, problem


def _first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(list(dict.fromkeys(texts))[:MAX_PATHS])


@lru_cache(maxsize=64)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


MAX_QUERIES = 8
PAGE_BYTES = MAX_MESSAGE_BYTES // 4


class ProcessQueries:
    """Answers in threads, one after the other: the disk may be slow, and a table of processes long.

    The processes of the machine are those of the node `typed_on`; of other nodes that it has there are none.
    """

    def __init__(
        self,
        typed_on: str,
        surroundings: Callable[[], Surroundings],
        send: Callable[[ProcessListing | FilesChecked], None],
    ) -> None:
        self._typed_on = typed_on
        self._surroundings = surroundings
        self._send = send
        self._inventory = ProcessInventory()
        self._one_at_a_time = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    def received(self, query: ListProcesses | CheckFiles) -> None:
        """Begin to answer; a failure is sent as the answer."""
        if len(self._under_way) >= MAX_QUERIES:
            problem = f"{MAX_QUERIES} questions about processes are not answered yet: a file system may hang"
            self._send(_failed(query, problem))
            return
        task = start_logged(self._answer(query), "a question about processes")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def close(self) -> None:
        for task in tuple(self._under_way):
            task.cancel()

    async def _answer(self, query: ListProcesses | CheckFiles) -> None:
        async with self._one_at_a_time:
            try:
                if isinstance(query, CheckFiles):
                    missing = await asyncio.to_thread(missing_files, query.files)
                    self._send(FilesChecked(query.stream, tuple(missing)))
                    return
                processes: list[ProcessInfo] = []
                if query.node == self._typed_on:
                    around, pid, names = self._surroundings(), query.pid, query.variables
                    processes = await asyncio.to_thread(self._inventory.scan, around, pid=pid, variables=names)
            except Exception as failure:  # the outermost place of a question: it gets an answer in any case
                self._send(_failed(query, f"the processes could not be read: {failure}"))
                return
        pages = list(pages_of(processes))
        for number, page in enumerate(pages, 1):
            self._send(ProcessListing(query.stream, tuple(page), more=number < len(pages)))


def pages_of(processes: Sequence[ProcessInfo]) -> Iterator[list[ProcessInfo]]:
    """Pages that fit into a message; one that is empty where there is nothing."""
    page: list[ProcessInfo] = []
    size = 0
    for process in processes:
        length = len(encode(ProcessListing(0, (process,))))
        if page and (len(page) >= MAX_PROCESSES or size + length > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(process)
        size += length
    yield page


def _failed(query: ListProcesses | CheckFiles, problem: str) -> ProcessListing | FilesChecked:
    if isinstance(query, CheckFiles):
        return FilesChecked(query.stream, problem=clipped(problem))
    return ProcessListing(query.stream, problem=clipped(problem))
