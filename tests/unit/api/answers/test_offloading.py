"""Views of offloading."""

from __future__ import annotations

from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.offloading import MAX_COMMAND_CHARS, MoveRow
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.moves import Move, Way
from tests.support.builders import NOW, a_request


def shown_command_of(*argv: str) -> str:
    command = Command(argv)
    move = Move(
        id="move-1",
        user="ada",
        source="gpu1",
        target="gpu2",
        way=Way.RESTART,
        request=a_request("r"),
        requested_at_ms=NOW,
        job="j1",
        command=command,
    )
    return MoveRow.of(Viewer(0), move, lambda node: True).command


def test_secrets_in_the_command_of_a_move_are_masked() -> None:
    assert shown_command_of("docker", "login", "-u", "ada", "-p", "geheim", "hub") == "docker login -u ada -p *** hub"


def test_a_long_command_of_a_move_is_cut() -> None:
    shown = shown_command_of("echo", "x" * 1000)
    assert len(shown) == MAX_COMMAND_CHARS
    assert shown.endswith("x…")
