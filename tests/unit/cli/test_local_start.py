"""What `offload wrap` does before anything is loaded: its words, and the messages that it writes out by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api import framing
from distributed_grid.api.requests import AdviseCommand, ClientHello, parse
from distributed_grid.cli import local_start
from distributed_grid.cli.local_start import plain_command


@pytest.mark.parametrize(
    ("words", "command", "reads_input"),
    [
        (["make", "-j4"], ["make", "-j4"], True),
        (["--", "make", "--json"], ["make", "--json"], True),
        (["--no-input", "--", "make"], ["make"], False),
        (["--no-input", "make"], ["make"], False),
        (["make", "--no-input"], ["make", "--no-input"], True),
        (["--", "-odd-name"], ["-odd-name"], True),
        (["--state-dir", "x", "make"], [], True),
        (["--help"], [], True),
        (["-e", "A=1", "make"], [], True),
        (["--"], [], True),
        ([], [], True),
    ],
)
def test_only_a_plain_command_is_understood(words: list[str], command: list[str], reads_input: bool) -> None:
    assert plain_command(words) == (command, reads_input)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_therequest_frames_are_those_that_the_control_plane_reads(argv: list[str]) -> None:
    frames = list(framing.Unpacker().feed(local_start.request_frames(argv)))
    assert [kind for kind, _ in frames] == [framing.JSON, framing.JSON]
    hello, question = (parse(body) for _, body in frames)
    assert isinstance(hello, ClientHello)
    assert (hello.protocol, hello.query_only, hello.config) == (framing.PROTOCOL, True, None)
    assert isinstance(question, AdviseCommand)
    assert list(question.argv) == argv


@given(st.text())
def test_no_text_in_an_answer_is_taken_for_the_advice(reason: str) -> None:
    for text in (reason, '"elsewhere":true', f'{reason}"elsewhere":true'):
        answer = json.dumps({"elsewhere": False, "target_node": None, "reason": text}, separators=(",", ":"))
        assert local_start.ELSEWHERE not in answer.encode()
    yes = json.dumps({"elsewhere": True, "target_node": "n", "reason": reason}, separators=(",", ":"))
    assert local_start.ELSEWHERE in yes.encode()
