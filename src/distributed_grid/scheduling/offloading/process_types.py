"""Types of processes: what kind of work one does, and by which signs that was recognised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from posixpath import basename

from msgspec import Struct

from distributed_grid.domain.processes import ProcessInfo, ProcessType, StreamKind

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
    if _moves_data(process):
        moved = (process.read_bytes + process.written_bytes) / 1e9
        return Classification(ProcessType.IO, (f"it has read and written {moved:.1f} GB with little CPU",))
    if process.cpu_milli >= BUSY_MILLI:
        return Classification(ProcessType.COMPUTE, _uses(process))
    if terminal:
        return Classification(ProcessType.INTERACTIVE, (f"it reads from the terminal {terminal}",))
    if process.age_ms >= OLD_MS and process.cpu_ms * 1000 < QUIET_MILLI * process.age_ms and not _has_output(process):
        return Classification(ProcessType.DAEMON, (f"it has run for {process.age_ms // 3_600_000} h and hardly works",))
    return Classification(ProcessType.BATCH, ("nothing else is known of it",))


def classify_command(argv: tuple[str, ...]) -> Classification:
    """The type of a command by its words alone."""
    kind, word = _by_words(ProcessInfo(0, 0, "", 0, 0, "", "", argv))
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


def _moves_data(process: ProcessInfo) -> bool:
    moved = process.read_bytes + process.written_bytes
    return moved >= MIN_IO_BYTES and moved > IO_BYTES_PER_CPU_MS * max(process.cpu_ms, 1)


def _has_output(process: ProcessInfo) -> bool:
    return any(one.kind is StreamKind.FILE for one in process.streams[1:])
