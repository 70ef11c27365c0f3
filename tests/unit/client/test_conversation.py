"""The protocol of a client, without a socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed_grid.api.framing import JSON, STDOUT, BrokenFrame, frame
from distributed_grid.client.conversation import (
    LOST,
    MAX_LOSSES,
    UNREADABLE,
    ClientConfig,
    Conversation,
    HandedOver,
    JsonObject,
    ReconnectBackoff,
    answer_of,
    digest_of,
    encode,
    hello,
    is_last,
)
from distributed_grid.client.operations import keeps_config
from distributed_grid.errors import BadInput, Unreachable


def test_parts_come_out_whole_however_the_bytes_arrive() -> None:
    conversation = Conversation()
    sent = frame(STDOUT, b"output") + encode({"done": True})
    found = []
    for place in range(len(sent)):
        conversation.receive(sent[place : place + 1])
        while (part := conversation.next_part()) is not None:
            found.append(part)
    assert found == [(STDOUT, b"output"), (JSON, {"done": True})]
    assert [is_last(part) for _, part in found] == [False, True]


def test_an_error_in_an_answer_is_raised_as_its_class() -> None:
    conversation = Conversation()
    conversation.receive(encode({"error": {"type": "BadInput", "message": "no such node"}}))
    with pytest.raises(BadInput, match="no such node"):
        conversation.next_part()
    assert conversation.next_part() is None, "the frame is used up"


def test_the_end_of_the_connection_is_a_loss() -> None:
    with pytest.raises(LOST):
        Conversation().receive(b"")
    with pytest.raises(BrokenFrame):
        Conversation().receive(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_control_plane_that_hands_over_is_left() -> None:
    conversation = Conversation()
    with pytest.raises(HandedOver):
        conversation.accept_welcome(JsonObject(handing_over=True))
    conversation.accept_welcome(JsonObject(pid=1))
    assert conversation.welcome == {"pid": 1}
    assert issubclass(HandedOver, LOST), "the request is sent again to the next one"


def test_only_a_config_that_was_named_is_insisted_on(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: one\n")
    assert hello(ClientConfig(str(path)))["config"] is None
    named = hello(ClientConfig(str(path), explicit=True))
    assert (named["config"], named["config_path"]) == (digest_of(b"name: one\n"), str(path))
    assert hello(ClientConfig(str(path), explicit=True), any_config=True)["config"] is None
    missing = hello(ClientConfig(str(tmp_path / "missing.yaml"), explicit=True))
    assert missing["config"] == UNREADABLE, "the control plane knows whether the command can do without it"


def test_only_the_variables_that_a_config_names_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: ${GRID_TEST_NAME}\n")
    monkeypatch.setenv("GRID_TEST_NAME", "lab")
    monkeypatch.setenv("GRID_TEST_OTHER", "secret")
    assert hello(ClientConfig(str(path), explicit=True))["config_variables"] == {"GRID_TEST_NAME": "lab"}
    path.write_text("name: lab\n")
    assert "config_variables" not in hello(ClientConfig(str(path), explicit=True)), "an older one does not know it"


def test_none_is_this_machine_alone_and_a_file_of_that_name_is_reached_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("name: one\n")
    named = hello(ClientConfig("none", explicit=True))
    assert (named["config"], named["config_path"]) == ("none", "none")
    assert hello(ClientConfig("./none", explicit=True))["config_path"] == str(tmp_path / "none")


@pytest.mark.parametrize("op", ["cancel_job", "release_lease", "get_status", "read_logs", "terminate_workers"])
def test_a_look_or_a_return_does_with_any_config(op: str) -> None:
    assert keeps_config(op)


@pytest.mark.parametrize("op", ["submit_job", "request_lease", "create_workers", "manage_cluster", "keep_running"])
def test_a_request_that_starts_something_needs_the_config(op: str) -> None:
    assert not keeps_config(op)


def test_an_answer_is_a_json_message() -> None:
    assert answer_of(JsonObject(job=1)) == {"job": 1}
    assert answer_of(json.dumps({"job": 1}).encode()) == {"job": 1}


def test_the_backoff_grows_gives_up_and_is_reset_by_anything_received() -> None:
    backoff, loss = ReconnectBackoff(), Unreachable("gone")
    delays = [backoff.delay_after(loss) for _ in range(MAX_LOSSES)]
    assert delays == sorted(set(delays))
    with pytest.raises(Unreachable):
        backoff.delay_after(loss)
    backoff.reset()
    assert backoff.delay_after(loss) == delays[0]
