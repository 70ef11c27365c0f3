"""Alert delivery with real commands and a real web server, also when they misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.config.sections import Alerts
from distributed_grid.config.value_kinds import Secret
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.alert_delivery import (
    AlertCommandFailed,
    AlertDelivery,
    Webhook,
    WebhookFailed,
    run_alert_command,
    split_command,
)
from distributed_grid.monitoring.alerts import Alert

ALERT = Alert("gpu1", "memory", True, 0.8125, 0.75, 1_700_000_000_000, "gpu1: memory at 81 %, above the mark of 75 %")


class Site:
    """A web server of this test; `answers` are the status codes it gives, the last one for ever."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str], Any]] = []
        self.answers = [200]
        site = self

        class Desk(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                site.heard.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(site.answers.pop(0) if len(site.answers) > 1 else site.answers[0])
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Desk)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@contextlib.contextmanager
def a_server_that(behaves: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that takes one connection and misbehaves on it; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as caller:
                behaves(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        thread.join(10)
        assert not thread.is_alive()


def deliver(alerts: Alerts, until: Callable[[], Any], *sent: Alert) -> float:
    """Have alerts delivered until something is so; how long stopping took."""

    async def scenario() -> float:
        delivery = AlertDelivery(alerts, offset_ms=lambda: 5, retry_seconds=(0.01, 0.01))
        await delivery.start()
        await delivery.start()
        for alert in sent or (ALERT,):
            delivery.send(alert)
        async with asyncio.timeout(15):
            while not until():
                await asyncio.sleep(0.01)
        began = time.monotonic()
        await delivery.stop()
        await delivery.stop()
        return time.monotonic() - began

    return asyncio.run(scenario())


def test_a_command_gets_the_alert_on_its_input_and_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    command = f"/bin/sh -c 'cat > {tmp_path}/in; env > {tmp_path}/env.new; mv {tmp_path}/env.new {tmp_path}/env'"
    deliver(Alerts(command=command), (tmp_path / "env").exists)
    assert json.loads((tmp_path / "in").read_text()) == {
        "state": "raised",
        "node_id": "gpu1",
        "resource_type": "memory",
        "value": 0.8125,
        "mark": 0.75,
        "time": "2023-11-14T22:13:20.005Z",
        "message": "gpu1: memory at 81 %, above the mark of 75 %",
    }
    env = (tmp_path / "env").read_text().splitlines()
    assert {"GRID_ALERT_NODE=gpu1", "GRID_ALERT_RESOURCE=memory", "GRID_ALERT_STATE=raised"} <= set(env)
    assert {"GRID_ALERT_VALUE=0.8125", "GRID_ALERT_MARK=0.7500"} <= set(env)
    assert not [line for line in env if "hunter2" in line]


def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    assert split_command("notify 'two words' $(reboot); x") == ("notify", "two words", "$(reboot);", "x")
    deliver(Alerts(command=f"/usr/bin/env touch {tmp_path}/a;b"), (tmp_path / "a;b").exists)


@pytest.mark.parametrize("command", ["notify 'unfinished", "''", "   "])
def test_a_command_that_cannot_be_read_is_refused_at_the_start(command: str) -> None:
    with pytest.raises(BadInput, match=r"alerts\.command"):
        split_command(command)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("ending", ["wait", "exit 0"])
def test_nothing_of_a_command_outlives_it(tmp_path: Path, ending: str) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; {ending}"
    began = time.monotonic()
    with (
        contextlib.nullcontext()
        if ending == "exit 0"
        else pytest.raises(AlertCommandFailed, match=r"ended after 0.5 s")
    ):
        run_alert_command(["sh", "-c", script], b"{}", {}, stopping=threading.Event(), deadline_seconds=0.5)
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while not is_gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(child)


def test_a_command_that_fails_is_logged_with_its_last_words(caplog: pytest.LogCaptureFixture) -> None:
    deliver(Alerts(command="sh -c 'echo first; echo no bus >&2; exit 3'"), lambda: "ended with" in caplog.text)
    assert "the alert command 'sh' ended with 3: 'no bus'" in caplog.text
    deliver(Alerts(command="/nowhere/at/all"), lambda: "cannot be started" in caplog.text)


def test_stopping_does_not_wait_for_a_command(tmp_path: Path) -> None:
    command = f"sh -c 'echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 300'"
    took = deliver(Alerts(command=command), (tmp_path / "pid").exists)
    assert took < 2
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(pid)


def test_a_webhook_is_called_with_the_alert(site: Site) -> None:
    hook = Alerts(webhook=Secret(f"http://ana:pa%3Ass@{site.address}/hooks/1?token=hunter2"))
    deliver(hook, lambda: site.heard)
    path, headers, body = site.heard[0]
    assert path == "/hooks/1?token=hunter2"
    assert headers["Content-Type"] == "application/json"
    assert headers["Host"] == site.address
    assert headers["Authorization"] == "Basic YW5hOnBhOnNz"
    assert (body["node_id"], body["state"], body["message"]) == ("gpu1", "raised", ALERT.detail)


def test_a_webhook_that_is_not_there_yet_is_called_again_and_its_secret_never_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    site.answers = [503, 429, 200]
    hook = Alerts(webhook=Secret(f"http://ana:pass@{site.address}/hooks/hunter2?token=hunter2"))
    deliver(hook, lambda: len(site.heard) == 3)
    assert "answered 503" in caplog.text
    assert site.address in caplog.text
    assert "hunter2" not in caplog.text
    assert "pass" not in caplog.text
    assert "was not called" not in caplog.text


@pytest.mark.parametrize(("answers", "calls"), [([500], 3), ([404], 1), ([302], 1)])
def test_a_webhook_that_says_no_is_given_up(
    site: Site, caplog: pytest.LogCaptureFixture, answers: list[int], calls: int
) -> None:
    site.answers = answers
    deliver(Alerts(webhook=Secret(f"http://{site.address}/x")), lambda: "was not called" in caplog.text)
    assert len(site.heard) == calls


def drip(caller: socket.socket) -> None:
    """Answer a byte at a time, without an end."""
    caller.recv(4096)
    for _ in range(200):
        caller.sendall(b"H")
        time.sleep(0.02)


def say_nothing(caller: socket.socket) -> None:
    while caller.recv(4096):
        pass


def talk_nonsense(caller: socket.socket) -> None:
    caller.recv(4096)
    caller.sendall(b"220 mail here\r\n")


def hang_up(caller: socket.socket) -> None:
    caller.recv(1)


@pytest.mark.parametrize(
    ("behaves", "says"),
    [
        (drip, "no answer within"),
        (say_nothing, "no answer within"),
        (talk_nonsense, "not HTTP"),
        (hang_up, "not HTTP|reset|lost|Broken"),
    ],
)
def test_no_server_holds_a_call_beyond_its_deadline(behaves: Callable[[socket.socket], None], says: str) -> None:
    with a_server_that(behaves) as address:
        began = time.monotonic()
        with pytest.raises(WebhookFailed, match=says) as failed:
            asyncio.run(Webhook(address).post(b"{}", deadline_seconds=0.3))
        assert time.monotonic() - began < 2
        assert failed.value.retryable


@pytest.mark.parametrize(
    "address", ["ftp://x/y", "http:///h", "https:///x", "http://x:99999/", "http://x/\r\nA: b", "a/b"]
)
def test_only_web_addresses_are_called_and_others_not_repeated(address: str) -> None:
    with pytest.raises(BadInput) as refused:
        Webhook(address)
    assert address not in str(refused.value)


def test_too_many_alerts_drop_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        delivery = AlertDelivery(Alerts(command="true"), offset_ms=lambda: 0)
        for place in range(105):
            delivery.send(Alert("n", "memory", True, 0.8, 0.75, 1, f"number {place}."))
        await delivery.stop()

    asyncio.run(scenario())
    assert [place for place in range(105) if f"not delivered: number {place}." in caplog.text] == [0, 1, 2, 3, 4]


def test_without_command_and_webhook_the_alert_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        delivery = AlertDelivery(Alerts(), offset_ms=lambda: 0)
        await delivery.start()
        delivery.send(ALERT)
        await delivery.stop()

    asyncio.run(scenario())
    assert caplog.messages == ["alert raised: gpu1: memory at 81 %, above the mark of 75 %"]
