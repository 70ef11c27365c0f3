"""What kind of work a process does, and why that is thought."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.processes import ProcessLook, ProcessType, StandardStream, StreamKind
from distributed_grid.scheduling.offloading.processes import (
    MAX_SHAPE_CHARS,
    changes_text,
    classify,
    classify_command,
    command_shape,
    first_look,
    process_changes,
    process_obstacles,
)
from tests.unit.scheduling.offloading.processes import FILES, a_process, a_stream

TERMINAL = (a_stream("terminal", "/dev/pts/3"),) * 3


@pytest.mark.parametrize(
    ("command", "facts", "expected", "reason"),
    [
        ("python train.py --epochs 3", {"cpu_milli": 1800}, "training", "train"),
        ("torchrun --nproc 4 main.py", {}, "training", "torchrun"),
        ("python -m vllm.entrypoints.api", {"listening": ("tcp *:8000",)}, "inference", "vllm"),
        ("python predict.py", {}, "inference", "predict"),
        ("ffmpeg -i a.mp4 b.mp4", {"cpu_milli": 2000}, "data_processing", "ffmpeg"),
        ("python scripts/preprocess_images.py", {}, "data_processing", "preprocess"),
        ("rsync -a a b", {}, "io", "rsync"),
        ("./simulate 4", {"read_bytes": 9 * 10**9, "cpu_ms": 1000}, "io", "9.0 GB"),
        ("./simulate 4", {"cpu_milli": 1500}, "compute", "1.5 cores"),
        ("./simulate 4", {"gpu_memory_bytes": 10**9}, "compute", "GPU"),
        ("./simulate 4", {}, "batch", "nothing else"),
        ("vim notes.txt", {"streams": TERMINAL}, "interactive", "/dev/pts/3"),
        ("python", {"streams": TERMINAL}, "interactive", "/dev/pts/3"),
        ("python train.py", {"streams": TERMINAL, "cpu_milli": 900}, "training", "train"),
        ("python app.py", {"listening": ("tcp *:80",)}, "daemon", "tcp *:80"),
        ("nginx", {}, "daemon", "nginx"),
        ("./agent", {"parent": "systemd, as x.service"}, "daemon", "x.service"),
        ("./agent", {"age_ms": 5 * 3_600_000, "streams": (a_stream("null"),) * 3}, "daemon", "5 h"),
    ],
)
def test_classification(command: str, facts: dict[str, Any], expected: str, reason: str) -> None:
    found = classify(a_process(*command.split(), **facts))
    assert found.type is ProcessType(expected)
    assert reason in " ".join(found.reasons)


def test_values_of_options_say_nothing() -> None:
    assert classify_command(("./solve", "--output", "train")).type is ProcessType.BATCH
    assert classify_command(("python", "-c", "train")).type is ProcessType.BATCH
    assert classify_command(()).type is ProcessType.BATCH


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("python train.py --epochs 3 --lr 0.1", "python train.py --epochs --lr"),
        ("/usr/bin/python3.11 -u train.py --lr=0.2 --epochs 9 data.csv", "python train.py --epochs --lr"),
        ("python3 /srv/alice/work/train.py", "python train.py"),
        ("python3 ../other/train.py", "python /srv/alice/other/train.py"),
        ("venv/bin/python -W ignore -X dev train.py -v", "python train.py -v"),
        ("python -m torch.distributed.run --nproc-per-node 4 x.py", "python -m torch.distributed.run --nproc-per-node"),
        ("git clone https://host/x", "git clone"),
        ("sleep 100", "sleep"),
        ("make -j8 all", "make -j"),
        ("java -Xmx4g -jar sim.jar --seed 4", "java -jar sim.jar --seed"),
        ("./solve -n5 -5 --tol=1e-3 -- --not-an-option", "solve --tol -n"),
        ("/home/bob/solve 3", "/home/bob/solve"),
        ("/usr/bin/ffmpeg -i in.mp4 out.mp4", "ffmpeg -i"),
    ],
)
def test_shape(command: str, shape: str) -> None:
    assert command_shape(command.split(), "/srv/alice/work") == shape


def test_code_on_the_command_line_is_part_of_the_shape() -> None:
    one, other = (command_shape(["sh", "-c", code]) for code in ("make data", "rm -r data"))
    assert one != other
    assert "data" not in one
    assert command_shape(["python", "-c", "x"]) != command_shape(["python", "-c", "y"])
    assert command_shape(["sh", "-c", "a\nb"]) != command_shape(["sh", "-c", "a?b"])
    assert command_shape(["./a\nb"]) != command_shape(["./a?b"])
    assert command_shape(["timeout", "9", "make"]) != command_shape(["timeout", "9", "rm"])


def test_no_command_has_no_shape() -> None:
    assert command_shape([]) == ""


@given(st.lists(st.text(max_size=300), max_size=20), st.sampled_from(["", "/", "/srv/alice"]))
def test_every_command_has_a_bounded_shape_that_stays_the_same(words: list[str], cwd: str) -> None:
    shape = command_shape(words, cwd)
    assert len(shape) <= MAX_SHAPE_CHARS
    assert shape == command_shape(words, cwd)


def test_a_process_with_files_of_its_own_has_no_obstacle() -> None:
    assert process_obstacles(a_process()) == ()


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        ({"streams": (a_stream("terminal", "/dev/pts/3"), *FILES[1:])}, "terminal", "stdin is the terminal /dev/pts/3"),
        (
            {"streams": (FILES[0], a_stream("pipe", "pipe:[9]"), FILES[2])},
            "foreign_pipe",
            "stdout is a pipe (pipe:[9])",
        ),
        ({"streams": (*FILES[:2], a_stream("socket", "socket:[9]"))}, "foreign_pipe", "stderr is a socket"),
        ({"streams": (a_stream("other", "/run/fifo"), *FILES[1:])}, "foreign_pipe", "/run/fifo"),
        ({"listening": ("tcp *:80", "tcp *:81", "tcp *:82", "tcp *:83")}, "listens", "tcp *:82 and 1 more"),
        ({"connections": 2}, "connected", "2 connections are open"),
        ({"locks": ("flock write on /data/x.lock",)}, "file_lock", "/data/x.lock"),
        ({"outside_writes": ("/data/log",)}, "outside_file", "outside of /srv/alice/work: /data/log"),
        ({"shared_memory": ("/dev/shm/x",)}, "shared_memory", "/dev/shm/x"),
        ({"traced": True}, "traced", "debugger"),
        ({"setuid": True}, "setuid", "another user"),
        ({"foreign_namespace": "process 7 is in another net namespace"}, "namespace", "net namespace"),
        ({"gpu_memory_bytes": 1}, "gpu_context", "$GRID_CHECKPOINT"),
        ({"other_sessions": 1}, "other_session", "1 of its processes is in another session"),
        ({"parent": "make (pid 12)"}, "parent_waits", "make (pid 12) waits for it"),
        ({"parent": "systemd, as x.service"}, "parent_waits", "grid offload wrap"),
        ({"is_ray": True}, "ray", "Ray's own"),
        ({"is_grid": True}, "grid", "the grid's own"),
        ({"job": "j1.1"}, "grid", "j1.1"),
        ({"has_secret": True}, "masked", "secret"),
        ({"unreadable": "process 7 cannot be looked into"}, "unreadable", "process 7"),
        ({"cwd": "/"}, "working_directory", "is /"),
        (
            {"cwd_problem": "is a home directory"},
            "working_directory",
            "/srv/alice/work is a home directory: start it in",
        ),
        ({"needed_secrets": (".env", "a.key")}, "withheld_file", ".env, a.key; an explicit ! line in .gridignore"),
        ({"cwd": "/tmp/x (deleted)"}, "working_directory", "deleted"),
    ],
)
def test_obstacle(facts: dict[str, Any], kind: str, cause: str) -> None:
    (found,) = process_obstacles(a_process(**facts))
    assert found.kind == kind
    assert cause in found.text
    assert "\n" not in found.text


def test_all_causes_are_named_at_once() -> None:
    kinds = {one.kind for one in process_obstacles(a_process(traced=True, connections=1, parent="make (pid 1)"))}
    assert kinds == {"traced", "connected", "parent_waits"}


NULL = StandardStream(StreamKind.NULL)
SEEN = replace(
    a_process("python3", "sim.py", "--n", "4"),
    streams=(NULL, StandardStream(StreamKind.FILE, "/data/out.log", True), NULL),
    needs=(("/usr/bin/python3", 0), ("/srv/input", 7)),
    environment_digest="before",
)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"argv": ("python3", "other.py")}, "its command line is `python3 other.py`"),
        ({"exe": "/opt/other"}, "its program is /opt/other"),
        ({"cwd": "/elsewhere"}, "its working directory is /elsewhere"),
        ({"environment_digest": "after"}, "its environment is another one"),
        ({"streams": (NULL, NULL, NULL)}, "stdout is null"),
        ({"streams": (NULL, replace(SEEN.streams[1], appends=False), NULL)}, "stdout is /data/out.log"),
        ({"streams": (NULL, SEEN.streams[1])}, "stderr is unknown"),
        ({"needs": (*SEEN.needs, ("/srv/new", 1))}, "it needs /srv/new, which was not compared with the target"),
        ({"needs": (("/srv/input", 8),)}, "it needs /srv/input, which was not compared with the target"),
        ({"locks": ("flock write on /data/lock",)}, "it holds a lock: flock write on /data/lock"),
        ({"listening": ("tcp 127.0.0.1:80",)}, "it listens on tcp 127.0.0.1:80"),
        ({"connections": 1}, "1 connection is open, which would break"),
        ({"outside_writes": ("/srv/out",)}, "/srv/out"),
        ({"shared_memory": ("/dev/shm/x",)}, "it shares memory: /dev/shm/x"),
        ({"traced": True}, "it is traced by a debugger"),
        ({"setuid": True}, "it runs with the rights of another user"),
        ({"foreign_namespace": "process 1 is in another net namespace"}, "another net namespace"),
        ({"gpu_memory_bytes": 1}, "it uses a GPU"),
        ({"other_sessions": 1}, "in another session"),
        ({"parent": "make (pid 1)"}, "make (pid 1) waits for it"),
        ({"needed_secrets": (".env",)}, ".env"),
        ({"unreadable": "process 7 cannot be looked into"}, "process 7 cannot be looked into"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], cause: str) -> None:
    (found,) = process_changes(first_look(SEEN), replace(SEEN, **change))
    assert cause in found


def test_progress_is_no_difference() -> None:
    later = replace(
        SEEN,
        age_ms=9,
        cpu_milli=5,
        cpu_ms=99,
        pss_bytes=1 << 30,
        processes=7,
        threads=40,
        read_bytes=5,
        written_bytes=6,
        needs=SEEN.needs[:1],
        ppid=1,
        name="worker",
    )
    assert process_changes(first_look(SEEN), later) == ()
    assert changes_text(()) == ""


def test_an_obstacle_that_was_there_at_the_request_is_no_difference_and_another_one_is() -> None:
    held = replace(SEEN, locks=("flock write on /data/a",))
    assert process_changes(first_look(held), held) == ()
    (change,) = process_changes(first_look(held), replace(held, locks=("flock write on /data/b",)))
    assert "/data/b" in change


def test_an_empty_first_look_is_different_from_every_process() -> None:
    assert process_changes(ProcessLook(), SEEN)


def test_many_differences_are_counted_and_what_a_process_chooses_is_printable() -> None:
    changed = replace(SEEN, argv=("a\nb",), exe="/x\x1b[2J", cwd="/y", environment_digest="", locks=("l",))
    text = changes_text(process_changes(first_look(SEEN), changed))
    assert text.startswith("it has changed since the request: ")
    assert text.endswith("; and 2 more")
    assert text.isprintable()


WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5), max_size=4)


@given(WORDS, WORDS)
def test_two_command_lines_are_equal_only_word_by_word(one: list[str], other: list[str]) -> None:
    changes = process_changes(first_look(replace(SEEN, argv=tuple(one))), replace(SEEN, argv=tuple(other)))
    assert bool(changes) == (one != other)


def test_no_value_of_a_process_is_in_its_look() -> None:
    stored = msgspec.json.encode(first_look(SEEN))
    assert not [word for word in (b"sim.py", b"/data", b"/srv/input") if word in stored]
