"""Processes that the grid did not start: type of work, shape of the command, obstacles of a move, changes since.

A shape is the program, its script or subcommand, and the names of options without values; a user consents for a shape.
Programs of the system are named without their folder, others by their path. Two runs that differ only in values have
one shape: `python train.py --epochs 3 --lr 0.1` and `python train.py --lr=0.2 --epochs 9` are both
`python train.py --epochs --lr`. Code on the command line (`-c`) is part of the shape by its digest: a consent for one
piece of code is none for another.

A process is looked at when its move is requested, and again while it is frozen. Compared is everything that the move
relies on: command line, program, working directory, environment, standard streams and needed files of the root, and the
obstacles of the whole tree. CPU time, memory, and the number of its threads and children are not: they change in a
process that works, and each child is looked at for obstacles.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from posixpath import basename, normpath

from msgspec import Struct

from distributed_grid.domain.processes import ProcessInfo, ProcessLook, ProcessType, StreamKind
from distributed_grid.masking.command_line import shown_command

MAX_TOLD = 3
"""Paths or addresses that one obstacle names."""


class ObstacleKind(enum.StrEnum):
    """What keeps work where it is."""

    TERMINAL = "terminal"
    FOREIGN_PIPE = "foreign_pipe"
    LISTENS = "listens"
    CONNECTED = "connected"
    FILE_LOCK = "file_lock"
    OUTSIDE_FILE = "outside_file"
    WITHHELD_FILE = "withheld_file"
    SHARED_MEMORY = "shared_memory"
    TRACED = "traced"
    SETUID = "setuid"
    NAMESPACE = "namespace"
    GPU_CONTEXT = "gpu_context"
    OTHER_SESSION = "other_session"
    PARENT_WAITS = "parent_waits"
    RAY = "ray"
    GRID = "grid"
    MASKED = "masked"
    UNREADABLE = "unreadable"
    WORKING_DIRECTORY = "working_directory"
    MISSING_FILES = "missing_files"
    NOT_DECLARED = "not_declared"
    NOT_RUNNING = "not_running"
    MOVING = "moving"
    GANG = "gang"
    BOUND = "bound"
    NO_TARGET = "no_target"


class Obstacle(Struct, frozen=True):
    """One cause that keeps work where it is, in one line with its path, port or pid."""

    kind: ObstacleKind
    text: str


def process_obstacles(process: ProcessInfo) -> tuple[Obstacle, ...]:
    """Why a process cannot be restarted elsewhere; nothing where it can."""
    sockets: list[tuple[ObstacleKind, str]] = []
    if process.listening:
        sockets.append((ObstacleKind.LISTENS, f"it listens on {_some(process.listening)}"))
    if process.connections > 0:
        many = "connection is" if process.connections == 1 else "connections are"
        sockets.append((ObstacleKind.CONNECTED, f"{process.connections} {many} open, which would break"))
    found = [*_identity(process), *_streams(process), *sockets, *_files(process), *_kernel(process)]
    return tuple(Obstacle(kind, one_line(text)) for kind, text in found)


def one_line(text: str) -> str:
    """A text that is safe to print: whoever starts a process chooses its name, its words and its paths."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


_Found = Iterator[tuple[ObstacleKind, str]]


def _identity(process: ProcessInfo) -> _Found:
    """Whose process it is, and what of it could not be read."""
    if process.job:
        yield ObstacleKind.GRID, f"it belongs to a job of the grid ({process.job}): move the job instead"
    elif process.is_grid:
        yield ObstacleKind.GRID, "it is one of the grid's own processes"
    if process.is_ray:
        yield ObstacleKind.RAY, "it is one of Ray's own processes"
    if process.has_secret:
        yield (
            ObstacleKind.MASKED,
            "its command line seems to hold a secret: give that in a file or a variable, and start it again",
        )
    if process.unreadable:
        yield ObstacleKind.UNREADABLE, process.unreadable
    if not process.argv:
        yield ObstacleKind.UNREADABLE, "its command line cannot be read"
    if not process.unreadable and (process.cwd in ("", "/") or process.cwd.endswith(" (deleted)")):
        where = process.cwd or "unknown"
        yield ObstacleKind.WORKING_DIRECTORY, f"its working directory is {where}: start it in a directory of its own"
    elif process.cwd_problem:
        problem = f"its working directory {process.cwd} {process.cwd_problem}"
        yield ObstacleKind.WORKING_DIRECTORY, f"{problem}: start it in a directory of its own"
    if process.parent:
        hint = "start it with `setsid -f`, or move that instead"
        if process.parent.startswith("systemd"):
            hint = "stop the unit, and run its command with `grid offload wrap`"
        yield ObstacleKind.PARENT_WAITS, f"{process.parent} waits for it: {hint}"


def _streams(process: ProcessInfo) -> _Found:
    for name, stream in zip(("stdin", "stdout", "stderr"), process.streams, strict=False):
        if stream.kind is StreamKind.TERMINAL:
            yield ObstacleKind.TERMINAL, f"{name} is the terminal {stream.path}: start it with nohup and files instead"
        elif stream.kind is StreamKind.PIPE:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is a pipe ({stream.path}) to a process outside of it"
        elif stream.kind is StreamKind.SOCKET:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is a socket ({stream.path})"
        elif stream.kind is StreamKind.OTHER:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is {stream.path}, which does not exist elsewhere"


def _files(process: ProcessInfo) -> _Found:
    if process.locks:
        yield ObstacleKind.FILE_LOCK, f"it holds a lock: {_some(process.locks)}"
    if process.outside_writes:
        where = f"open for writing outside of {process.cwd or 'its working directory'}"
        yield ObstacleKind.OUTSIDE_FILE, f"{where}: {_some(process.outside_writes)}"
    if process.needed_secrets:
        named = f"it needs files that look like secrets and are not shipped: {_some(process.needed_secrets)}"
        yield ObstacleKind.WITHHELD_FILE, f"{named}; an explicit ! line in .gridignore allows them"
    if process.shared_memory:
        yield ObstacleKind.SHARED_MEMORY, f"it shares memory: {_some(process.shared_memory)}"


def _kernel(process: ProcessInfo) -> _Found:
    """What binds it to this kernel."""
    if process.traced:
        yield ObstacleKind.TRACED, "it is traced by a debugger: detach that first"
    if process.setuid:
        yield ObstacleKind.SETUID, "it runs with the rights of another user or group"
    if process.foreign_namespace:
        yield ObstacleKind.NAMESPACE, process.foreign_namespace
    if process.gpu_memory_bytes > 0:
        yield (
            ObstacleKind.GPU_CONTEXT,
            "it uses a GPU, and what is there is lost: run it as a job that marks $GRID_CHECKPOINT",
        )
    if process.other_sessions > 0:
        many = "is" if process.other_sessions == 1 else "are"
        yield ObstacleKind.OTHER_SESSION, f"{process.other_sessions} of its processes {many} in another session"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:MAX_TOLD]) + (f" and {len(texts) - MAX_TOLD} more" if len(texts) > MAX_TOLD else "")


BUSY_MILLI = 500
"""From half a core on something computes."""
QUIET_MILLI = 50
IO_BYTES_PER_CPU_MS = 200_000
"""Who moves 200 MB for each second of CPU moves data, and does little else."""
MIN_IO_BYTES = 64 << 20
OLD_MS = 3_600_000
MAX_WORDS = 40


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORDS: dict[ProcessType, frozenset[str]] = {
    ProcessType.TRAINING: _set(
        "train training trainer finetune fine_tune pretrain fit epochs epoch torchrun deepspeed accelerate lightning"
        " sft lora dpo ppo horovodrun learning_rate lr batch_size"
    ),
    ProcessType.INFERENCE: _set(
        "infer inference predict prediction generate serve_model vllm tritonserver torchserve ollama llama_server"
        " llama server_model text_generation_launcher sglang embed embeddings"
    ),
    ProcessType.DATA_PROCESSING: _set(
        "preprocess preprocessing etl transform convert tokenize dataset dataprep ingest aggregate parquet csv feature"
        " features spark pyspark dask pandas duckdb ffmpeg awk sort jq bcftools samtools bwa imagemagick mogrify"
        " resize extract clean merge"
    ),
    ProcessType.IO: _set(
        "rsync cp mv tar dd scp sftp wget curl rclone backup restore gzip pigz zstd xz zip unzip download upload"
        " sync copy borg restic"
    ),
}
_ORDER = (ProcessType.TRAINING, ProcessType.INFERENCE, ProcessType.DATA_PROCESSING, ProcessType.IO)
_INTERACTIVE = _set(
    "vim vi nvim nano emacs less more man top htop btop ipython gdb pdb mysql psql sqlite3 mc ssh telnet irssi watch"
    " bash zsh fish ksh tcsh tmux screen jupyter-console"
)
_DAEMONS = _set(
    "nginx httpd apache2 postgres mysqld mariadbd redis-server mongod sshd cron crond dockerd containerd rsyslogd"
    " dbus-daemon memcached prometheus node_exporter grafana haproxy envoy caddy gpg-agent ssh-agent jupyter-lab"
    " jupyter-notebook"
)
_SPLIT = re.compile(r"[^a-z0-9]+")


class Classification(Struct, frozen=True):
    """The type of a process, and by which signs."""

    type: ProcessType
    reasons: tuple[str, ...]


def classify(process: ProcessInfo) -> Classification:
    """The most telling sign decides: who types at it, then who asks it, then what it is called, then what it uses."""
    program = basename(process.argv[0]).lstrip("-") if process.argv else process.name
    terminal = next((one.path for one in process.streams[:1] if one.kind is StreamKind.TERMINAL), "")
    kind, word = _by_words(process)
    if terminal and (program in _INTERACTIVE or process.cpu_milli < QUIET_MILLI):
        return Classification(ProcessType.INTERACTIVE, (f"it reads from the terminal {terminal}",))
    if process.listening:
        if kind is ProcessType.INFERENCE:
            return Classification(kind, (f"it listens on {process.listening[0]}", f"its command says {word}"))
        return Classification(ProcessType.DAEMON, (f"it listens on {process.listening[0]}",))
    if program in _DAEMONS or process.name in _DAEMONS:
        return Classification(ProcessType.DAEMON, (f"{program} is a server",))
    if process.parent.startswith("systemd"):
        return Classification(ProcessType.DAEMON, (f"it is run by {process.parent}",))
    if kind is not None:
        return Classification(kind, (f"its command says {word}", *_uses(process)))
    if process.gpu_memory_bytes:
        return Classification(ProcessType.COMPUTE, ("it uses a GPU", *_uses(process)))
    moved_bytes = process.read_bytes + process.written_bytes
    if moved_bytes >= MIN_IO_BYTES and moved_bytes > IO_BYTES_PER_CPU_MS * max(process.cpu_ms, 1):
        moved = moved_bytes / 1e9
        return Classification(ProcessType.IO, (f"it has read and written {moved:.1f} GB with little CPU",))
    if process.cpu_milli >= BUSY_MILLI:
        return Classification(ProcessType.COMPUTE, _uses(process))
    if terminal:
        return Classification(ProcessType.INTERACTIVE, (f"it reads from the terminal {terminal}",))
    has_output = any(stream.kind is StreamKind.FILE for stream in process.streams[1:])
    if process.age_ms >= OLD_MS and process.cpu_ms * 1000 < QUIET_MILLI * process.age_ms and not has_output:
        return Classification(ProcessType.DAEMON, (f"it has run for {process.age_ms // 3_600_000} h and hardly works",))
    return Classification(ProcessType.BATCH, ("nothing else is known of it",))


def classify_command(argv: tuple[str, ...]) -> Classification:
    """The type of a command by its words alone."""
    kind, word = _by_words(ProcessInfo(pid=0, pid_start=0, boot="", ppid=0, uid=0, user="", name="", argv=argv))
    if kind is None:
        return Classification(ProcessType.BATCH, ("nothing else is known of it",))
    return Classification(kind, (f"its command says {word}",))


def _by_words(process: ProcessInfo) -> tuple[ProcessType | None, str]:
    """The kind of work that the words of a command name: its program, script and options, not the values."""
    words = list(_told_words(process))
    for kind in _ORDER:
        found = next((word for word in words if word in _WORDS[kind]), "")
        if found:
            return kind, found
    return None, ""


def _told_words(process: ProcessInfo) -> Iterable[str]:
    names = [basename(process.argv[0])] if process.argv else []
    previous = ""
    for position, word in enumerate(process.argv[1:MAX_WORDS], 1):
        is_told = word.startswith("-") or position == 1 or previous in ("-m", "-jar") or word.endswith((".py", ".sh"))
        if is_told and previous != "-c":
            names.append(word.partition("=")[0].rpartition("/")[2])
        previous = word
    for name in names:
        plain = name.lower().lstrip("-").removesuffix(".py").removesuffix(".sh")
        yield plain.replace("-", "_")
        yield from (part for part in _SPLIT.split(plain) if part)


def _uses(process: ProcessInfo) -> tuple[str, ...]:
    return (f"it uses {process.cpu_milli / 1000:.1f} cores",) if process.cpu_milli >= BUSY_MILLI else ()


MAX_SHAPE_CHARS = 500
_VERSION = re.compile(r"^(python|pypy|node|ruby|perl|lua|php|java|julia)[\d.]*$")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "ash"})
_INTERPRETERS = frozenset({"python", "pypy", "node", "ruby", "perl", "lua", "php", "julia", "Rscript", *_SHELLS})
_CODE_OPTIONS = {"node": ("-e", "--eval", "-p"), "ruby": ("-e",), "perl": ("-e", "-E"), "lua": ("-e",), "php": ("-r",)}
_WITH_VALUE = {
    "python": frozenset({"-W", "-X"}),
    "node": frozenset({"-r", "--require"}),
    "ruby": frozenset({"-r", "-I"}),
}
_LAUNCHERS = frozenset({"nohup", "setsid", "nice", "ionice", "time", "stdbuf", "env", "chrt", "taskset", "timeout"})
_SYSTEM_BIN = ("/usr/", "/bin/", "/sbin/", "/opt/")
_SUBCOMMAND = re.compile(r"^[a-z][a-z0-9_-]{0,30}$")
_OPTION = re.compile(r"^(--?[A-Za-z][\w.-]*)")


def command_shape(argv: Sequence[str], cwd: str = "") -> str:
    """The shape of a command; paths below its working directory are relative to it. Empty for no command."""
    words = list(argv)
    if not words:
        return ""
    program = basename(words[0].lstrip("-")) or words[0]
    if (version := _VERSION.match(program)) is not None:
        program = version[1]
    is_of_system = "/" not in words[0] or words[0].startswith(_SYSTEM_BIN)
    parts = [program if is_of_system or program in _INTERPRETERS or program == "java" else _relative(words[0], cwd)]
    rest = words[1:]
    if program in _INTERPRETERS:
        script, rest = _script(program, rest, cwd)
        parts += script
    elif program == "java":
        script, rest = _jar(rest, cwd)
        parts += script
    elif program in _LAUNCHERS:  # what it launches is what matters, and it is not always told where that begins
        return _cut(" ".join([program, _short_digest(" ".join(rest))]))
    elif rest and _SUBCOMMAND.match(rest[0]):
        parts.append(rest[0])
        rest = rest[1:]
    return _cut(" ".join([*parts, *_option_names(rest)]))


def _script(program: str, words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    """The script, module or code that an interpreter runs, and the words after it."""
    code = ("-c",) if program in ("python", "pypy", *_SHELLS) else _CODE_OPTIONS.get(program, ())
    takes_value = _WITH_VALUE.get(program, frozenset())
    at = 0
    while at < len(words):
        word = words[at]
        if word in code or (program in _SHELLS and re.fullmatch(r"-[a-z]*c", word)):
            return ["-c", _short_digest(words[at + 1] if at + 1 < len(words) else "")], words[at + 2 :]
        if word == "-m" and program in ("python", "pypy"):
            return ["-m", *words[at + 1 : at + 2]], words[at + 2 :]
        if word in takes_value:
            at += 2
        elif word.startswith(("-", "+")):
            at += 1
        else:
            return [_relative(word, cwd)], words[at + 1 :]
    return [], words


def _jar(words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    for at, word in enumerate(words):
        if word == "-jar":
            return ["-jar", *(_relative(path, cwd) for path in words[at + 1 : at + 2])], words[at + 2 :]
        if not word.startswith("-") and (not at or words[at - 1] not in ("-cp", "-classpath", "--class-path")):
            return [word], words[at + 1 :]
    return [], words


def _relative(path: str, cwd: str) -> str:
    whole = normpath(path if path.startswith("/") or not cwd else f"{cwd}/{path}")
    return whole[len(cwd) + 1 :] if cwd and whole.startswith(cwd + "/") else whole


def _option_names(words: Sequence[str]) -> list[str]:
    """Each option once, sorted: the order in which they are given does not matter."""
    found = set()
    for word in words:
        if word == "--":
            break
        name = _OPTION.match(word.partition("=")[0])
        if name is not None:
            found.add(name[1] if word.startswith("--") else name[1].rstrip("0123456789."))
    return sorted(found)


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


def _cut(shape: str) -> str:
    """A shape that can be shown and stored; one that had to be changed for that is told apart by its digest."""
    shown = one_line(shape)
    if shown == shape and len(shape) <= MAX_SHAPE_CHARS:
        return shape
    return f"{shown[: MAX_SHAPE_CHARS - 13]} {_short_digest(shape)}"


DIGEST_CHARS = 32
MAX_COMMAND_CHARS = 120
MAX_NAMED_CHANGES = 3


def first_look(process: ProcessInfo) -> ProcessLook:
    """The facts of a process to compare with later ones."""
    return ProcessLook(
        command=_digest(process.argv),
        program=_digest((process.exe,)),
        directory=_digest((process.cwd,)),
        environment=process.environment_digest,
        streams=tuple(_digest((stream.kind, stream.path, str(stream.appends))) for stream in process.streams),
        needs=tuple(_digest((path, str(size))) for path, size in process.needs),
        obstacles=tuple(_digest((obstacle.kind, obstacle.text)) for obstacle in process_obstacles(process)),
    )


def process_changes(first: ProcessLook, process: ProcessInfo) -> tuple[str, ...]:
    """The differences of a process from its first look, each as one line; nothing where a move may go on."""
    return tuple(one_line(text) for text in _changes(first, process))


def changes_text(changes: tuple[str, ...]) -> str:
    """The reason for which a move ends; empty where nothing has changed."""
    if not changes:
        return ""
    more = f"; and {len(changes) - MAX_NAMED_CHANGES} more" if len(changes) > MAX_NAMED_CHANGES else ""
    return f"it has changed since the request: {'; '.join(changes[:MAX_NAMED_CHANGES])}{more}"


def _changes(first: ProcessLook, process: ProcessInfo) -> Iterable[str]:
    now = first_look(process)
    if now.command != first.command:
        yield f"its command line is `{shown_command(process.argv, MAX_COMMAND_CHARS)}`"
    if now.program != first.program:
        yield f"its program is {process.exe or 'unknown'}"
    if now.directory != first.directory:
        yield f"its working directory is {process.cwd or 'unknown'}"
    if now.environment != first.environment:
        yield "its environment is another one"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if now.streams[number : number + 1] != first.streams[number : number + 1]:
            stream = process.streams[number] if number < len(process.streams) else None
            yield f"{name} is {stream.path or stream.kind if stream is not None else 'unknown'}"
    for digest, (path, _) in zip(now.needs, process.needs, strict=True):
        if digest not in first.needs:
            yield f"it needs {path}, which was not compared with the target"
    for digest, obstacle in zip(now.obstacles, process_obstacles(process), strict=True):
        if digest not in first.obstacles:
            yield obstacle.text


def _digest(texts: Iterable[str]) -> str:
    text = "".join(f"{text}\0" for text in texts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARS]
