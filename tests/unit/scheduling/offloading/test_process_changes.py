"""Which differences between the two looks at a process end its move, and how they are named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.processes import ProcessLook, StandardStream, StreamKind
from distributed_grid.scheduling.offloading.process_changes import changes_text, first_look, process_changes
from tests.unit.scheduling.offloading.processes import a_process

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
