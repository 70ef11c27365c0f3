"""Views of offloading."""

from __future__ import annotations

from distributed_grid.api.answers.common import Viewer
from distributed_grid.control.offload_views import MAX_COMMAND_CHARS, move_view
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.moves import Move, Way
from tests.support.builders import NOW, a_request


def shown_command_of(*argv: str) -> str:
    command = Command(argv)
    move = Move("move-1", "ada", "gpu1", "gpu2", Way.RESTART, a_request("r"), NOW, job="j1", command=command)
    return move_view(Viewer(0), move, lambda node: True)["command"]


def test_secrets_in_the_command_of_a_move_are_masked() -> None:
    assert shown_command_of("docker", "login", "-u", "ada", "-p", "geheim", "hub") == "docker login -u ada -p *** hub"


def test_a_long_command_of_a_move_is_cut() -> None:
    shown = shown_command_of("echo", "x" * 1000)
    assert len(shown) == MAX_COMMAND_CHARS
    assert shown.endswith("x…")
