"""What `grid offload` prints."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.cli.offload_output import (
    OffloadPicture,
    auto_lines,
    changed_lines,
    move_lines,
    move_text,
    moves_table,
    scan_parts,
)
from tests.support.records import records


def proposal(**changes: Any) -> Any:
    row = {
        "node_id": "gpu-master",
        "pid": 4711,
        "job_id": None,
        "command": "python simulate.py",
        "process_type": "data_processing",
        "user": "ana",
        "cpu_cores": 1.25,
        "memory_gb": 2.0,
        "gpu_memory_gb": 0.0,
        "age_seconds": 60.0,
        "movable": True,
        "recommended": True,
        "way": "process_restart",
        "target_node": "gpu2",
        "confidence": 0.82,
        "reasons": ["memory of gpu-master is at 91 %"],
        "obstacles": [],
        "needs_consent": True,
        "shape": "python simulate.py",
        "process": None,
    }
    return records(row | changes)


def move(**changes: Any) -> Any:
    row = {
        "move_id": "move-0123456789ab",
        "user": "ana",
        "source_node": "gpu-master",
        "target_node": "gpu2",
        "way": "process_restart",
        "state": "frozen",
        "waits_for": "the decision of the guard on gpu-master",
        "reason": "memory of gpu-master is at 91 %",
        "automatic": False,
        "pid": 4711,
        "job_id": None,
        "command": "python simulate.py",
        "requested_at": "2026-05-01T10:00:00+00:00",
        "state_since": "2026-05-01T10:00:05+00:00",
        "shipped_bytes": 5 << 20,
        "left_out_files": [".env: looks like a secret"],
        "frozen_seconds": 0.25,
        "problem": None,
        "end": None,
        "ended_at": None,
        "result": None,
        "returned_files": 0,
        "kept_files": [],
        "notes": [],
    }
    return records(row | changes)


AUTO: dict[str, Any] = {
    "enabled": True,
    "configured": False,
    "set_by": "ana",
    "set_at": "2026-05-01T10:00:00+00:00",
    "stopped": None,
    "failures": 0,
    "last_move_at": None,
    "thresholds": {"cpu": 0.8, "memory": 0.75},
    "check_interval_seconds": 60.0,
    "cooldown_seconds": 300.0,
    "degraded": {},
    "nodes": [],
}


def scan_text(rows: list[Any], node: str = "", *, everything: bool = False, problems: tuple[str, ...] = ()) -> str:
    return "\n\n".join(scan_parts(records({"proposals": rows, "problems": [*problems]}), node, everything=everything))


def test_a_scan_shows_what_can_move_what_cannot_and_what_to_type() -> None:
    stuck = proposal(pid=99, command="vim notes", movable=False, recommended=False, obstacles=["a terminal", "a lock"])
    job = proposal(pid=None, job_id="job-1", way="checkpoint_restart", needs_consent=False, recommended=False)
    text = scan_text([stuck, job, proposal()])
    assert text.index("4711") < text.index("job-1") < text.index("99")
    assert "restart of a process, asks for consent" in text
    assert "82 %" in text
    assert "\nCANNOT MOVE\n99  on gpu-master, data processing: vim notes\n      a terminal\n      a lock\n" in text
    assert "grid offload execute 4711 -n gpu-master --consent" in text
    assert "happens again" in text


def test_a_scan_names_the_heaviest_of_many_that_cannot_move() -> None:
    rows = [proposal(pid=100 + i, cpu_cores=float(i), movable=False, obstacles=["a terminal"]) for i in range(30)]
    text = scan_text(rows)
    assert "129" in text
    assert "105" not in text
    assert "and 20 more that cannot be moved; --all shows them" in text
    assert "105" in scan_text(rows, everything=True)


def test_a_scan_names_the_heaviest_of_many_that_can_move_after_what_is_advised() -> None:
    rows = [proposal(pid=100 + i, cpu_cores=float(i), recommended=i == 0) for i in range(30)]
    text = scan_text(rows)
    assert text.index("100 ") < text.index("129 ") < text.index("128 ")
    assert "105" not in text
    assert "and 10 more that could move; --all shows them" in text
    assert "105" in scan_text(rows, everything=True)


def test_a_scan_of_nothing_says_so() -> None:
    assert scan_text([]) == "no node is above a mark; name one with -n NODE"
    assert scan_text([], "gpu1", problems=("gpu1: not connected",)) == (
        "nothing on gpu1 could run elsewhere\n\ngpu1: not connected"
    )


def test_nothing_from_outside_reaches_the_terminal_as_it_is() -> None:
    evil = "x\x1b]0;owned\x07\ny"
    shown = scan_text([proposal(command=evil, reasons=[evil]), proposal(movable=False, obstacles=[evil])])
    shown += "\n".join(move_lines(move(command=evil, problem=evil, kept_files=[evil], reason=evil)))
    shown += moves_table([move(problem=evil)]) + move_text(move(problem=evil, end="failed"))
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "process 4711 leaves gpu-master for gpu2: frozen, waits for the decision of the guard on gpu-master"),
        (
            {"state": "running", "job_id": "job-1"},
            "process 4711 of gpu-master runs on gpu2; its output: grid jobs logs -f job-1",
        ),
        ({"state": "ended", "end": "done"}, "process 4711 was moved from gpu-master to gpu2"),
        ({"state": "ended", "end": "failed", "problem": "no room"}, "failed, process 4711 was left as it was: no room"),
        ({"state": "ended", "end": "cancelled"}, "cancelled, process 4711 goes on at gpu-master"),
        ({"state": "ended", "end": "not_needed", "pid": None, "job_id": "job-1"}, "job job-1 has ended by itself"),
    ],
)
def test_a_move_in_one_line(changes: dict[str, Any], text: str) -> None:
    assert move_text(move(**changes)) == f"move-0123456789ab: {text}"


def test_everything_about_a_move() -> None:
    lines = move_lines(move(returned_files=3, kept_files=["out/log"]))
    assert "shipped:      5 MB" in lines
    assert "stood still:  0.25 s" in lines
    assert "files back:   3" in lines
    assert lines[-2] == "not shipped: .env: looks like a secret"
    assert lines[-1] == "not replaced, changed at gpu-master since: out/log"
    assert not any(line.startswith("end") for line in lines)


def test_the_job_in_the_place_of_a_process_is_named_once_it_exists() -> None:
    def jobs(**changes: Any) -> list[str]:
        return [line for line in move_lines(move(job_id="moved-1", **changes)) if line.startswith("job:")]

    assert jobs() == jobs(state="ended", end="cancelled") == []
    assert jobs(state="running") == jobs(state="ended", end="done") == jobs(pid=None) == ["job:          moved-1"]


def test_a_move_is_shown_by_a_prefix_that_can_be_typed() -> None:
    assert "move-01234567 " in moves_table([move()])


def test_automatic_offloading_says_by_whose_word_and_why_it_stopped() -> None:
    assert auto_lines(records(AUTO))[0].startswith("automatic offloading is on, set by ana at ")
    assert auto_lines(records(AUTO))[0].endswith("; the config says off")
    assert "relieves nodes above: cpu 80 %, memory 75 %" in auto_lines(records(AUTO))
    look = {"node_id": "gpu2", "at": None, "reason": "memory at 91 %", "jobs": [{"job_id": "a", "reason": "too short"}]}
    stopped = {"set_by": None, "enabled": False, "stopped": "3 moves failed", "failures": 3}
    plain = auto_lines(records(AUTO | stopped | {"degraded": {"gpu1": "full"}, "nodes": [look]}))
    assert plain[0] == "automatic offloading is off, as the config says"
    assert "it has stopped: 3 moves failed; go on with grid offload auto --enable" in plain
    assert plain[-3:] == ["gpu1 is degraded: full", "gpu2 at -: memory at 91 %", "  a: too short"]


def test_a_watch_without_a_terminal_prints_what_changes() -> None:
    def picture(proposals: list[Any], moves: list[Any], pressure: float = 0.9, **auto: Any) -> dict[str, str]:
        nodes = {"nodes": [{"node_id": "gpu-master", "state": "alive", "pressure": pressure}]}
        return OffloadPicture(records(nodes), {}, records(AUTO | auto), proposals, moves).facts()

    first = picture([proposal()], [])
    assert changed_lines({}, first) == [
        "automatic offloading is on",
        "4711 on gpu-master could run on gpu2, 82 % sure: python simulate.py",
    ]
    assert changed_lines(first, picture([proposal()], [], pressure=0.95)) == []
    second = picture([], [move()], degraded={"gpu-master": "no room anywhere"})
    assert changed_lines(first, second) == [
        "gpu-master is degraded: no room anywhere",
        move_text(move()),
        "no longer: 4711 on gpu-master could run on gpu2, 82 % sure: python simulate.py",
    ]
    assert changed_lines(second, picture([], [move(state="ended", end="done")]))[0].endswith(
        "was moved from gpu-master to gpu2"
    )
