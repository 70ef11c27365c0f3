"""Progress lines on real terminals: no redrawing is wider than the terminal, so none leaves a copy of itself behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.cli.output import display_width
from tests.support.project import PROJECT
from tests.support.terminals import Terminal

DRAWS = """
import time
from distributed_grid.cli.output import ProgressLine

line = ProgressLine()
number = 0
while True:
    number += 1
    line.draw(lambda: f"{number}: a line of \\u8a9e\\u8a9e\\u8a9e much longer than a terminal is " + "wide " * 20)
    time.sleep(0.01)
"""
SETS_UP = f"""
import sys
sys.path.insert(0, {str(PROJECT / "scripts")!r})
import make_venv

with make_venv.progress("first use, making .venv; this takes some seconds (the log is .venv/setup.log)"):
    sys.stdin.readline()
"""
Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_terminal(code: str, columns: int, **env: str) -> Terminal:
        command = [sys.executable, "-c", code]
        opened.append(Terminal(command, tmp_path, {**os.environ, "TERM": "xterm", **env}, columns=columns))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()
        one.wait()


def redraws(shown: bytes) -> list[str]:
    """Texts drawn between two returns of the carriage, without the sequence that clears the rest of a line."""
    return [text.replace("\x1b[K", "") for text in shown.decode().split("\r") if text.strip()]


@pytest.mark.parametrize("columns", [40, 11, 2])
def test_a_progress_line_is_narrower_than_the_terminal(terminal: Open, columns: int) -> None:
    drawn = redraws(terminal(DRAWS, columns).read_until(b"\r", 5))
    assert len(drawn) >= 4
    assert max(map(display_width, drawn)) < columns


def test_a_progress_line_follows_the_size_of_the_window(terminal: Open) -> None:
    shown = terminal(DRAWS, 60)
    shown.read_until(b"\r", 3)
    shown.resize(20)
    before = len(redraws(shown.shown))
    drawn = redraws(shown.read_until(b"\r", shown.shown.count(b"\r") + 4))
    assert max(map(display_width, drawn[before + 1 :])) < 20


def test_a_terminal_that_does_not_say_how_wide_it_is_counts_as_a_usual_one(terminal: Open) -> None:
    drawn = redraws(terminal(DRAWS, 0).read_until(b"\r", 4))
    assert 40 < max(map(display_width, drawn)) < 80


def test_the_set_up_of_a_clone_says_once_what_it_does_and_redraws_a_short_line(terminal: Open) -> None:
    window = terminal(SETS_UP, 40)
    window.read_until(b" packages, ", 5)
    window.type("\n")
    first, *rest = window.read_to_end().decode().replace("\x1b[K", "").split("\r\n", 1)
    assert first.startswith("grid: first use, making .venv")
    drawn = [text for text in "".join(rest).split("\r") if text.strip()]
    assert len(drawn) >= 5
    assert max(map(display_width, drawn)) < 40
    assert window.shown.count(b"first use") == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_the_set_up_of_a_clone_needs_no_standard_error(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "code.py").write_text(SETS_UP)
    script = f'exec "{sys.executable}" code.py {redirection}'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, input=b"\n", stdout=subprocess.PIPE, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"")
