"""Alert rules: raised once, cleared once, and never by silence."""

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
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import Alerts
from distributed_grid.config.value_kinds import Secret
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import BadInput
from distributed_grid.monitoring.alerts import (
    CLEARED,
    Alert,
    AlertCommandFailed,
    AlertDelivery,
    AlertRules,
    AlertState,
    AlertThreshold,
    Webhook,
    WebhookFailed,
    alert_thresholds,
    next_state,
    run_alert_command,
    split_command,
)
from tests.support.builders import GB, NOW, a_capacity

MARK = AlertThreshold(0.75, margin=0.05, clear_after_ms=60_000)
SIXTEEN = a_capacity(memory_gb=16)


def alerts_of(text: str) -> AlertRules:
    return AlertRules(alert_thresholds(ClusterConfig.from_text(text).alerts))


class Watched:
    """One node's alerts, given a value every two seconds."""

    def __init__(self, text: str = "name: x", capacity: Capacity = SIXTEEN) -> None:
        self.alerts = alerts_of(text)
        self.capacity = capacity
        self.now = NOW

    def uses(self, *, memory_gb: float = 0, cpu: float = 0, gpu: float | None = None, beats: int = 1) -> list[Alert]:
        gpus = () if gpu is None else (GpuUsage(0, round(1000 * gpu)),)
        usage = Usage(
            cpu_busy_milli=round(1000 * cpu),
            cpu_outside_milli=0,
            memory_bytes=round(memory_gb * GB),
            memory_outside_bytes=0,
            gpus=gpus,
        )
        changes: list[Alert] = []
        for _ in range(beats):
            self.now += 2_000
            changes += self.alerts.observe("gpu1", usage, self.capacity, self.now)
        return changes


def test_memory_above_three_quarters_raises_by_default_and_only_once() -> None:
    node = Watched()
    assert node.uses(memory_gb=12, beats=10) == []
    (alert,) = node.uses(memory_gb=12.5, beats=10)
    assert (alert.node, alert.resource, alert.state, alert.mark) == ("gpu1", "memory", "raised", 0.75)
    assert alert.value == 0.7812
    assert alert.detail == "gpu1: memory at 78 %, above the mark of 75 %"
    assert node.alerts.raised() == [("gpu1", "memory")]


def test_it_is_cleared_only_well_below_the_mark_and_for_a_minute() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    assert node.uses(memory_gb=11.5, beats=100) == []  # 72 %: below the mark, not below the margin
    assert node.uses(memory_gb=10, beats=29) == []
    assert node.uses(memory_gb=11.5) == []  # a relapse: the minute begins anew
    assert node.uses(memory_gb=10, beats=30) == []
    (alert,) = node.uses(memory_gb=10)
    assert (alert.state, alert.detail) == ("cleared", "gpu1: memory at 62 %, back below the mark of 75 %")
    assert node.alerts.raised() == []


def test_busy_cores_and_gpus_raise_only_where_a_mark_is_set_and_when_they_stay_busy() -> None:
    assert Watched().uses(cpu=1.0, gpu=1.0, beats=100) == []
    node = Watched("alerts: {cpu: 0.9, gpu: 0.9, memory: 0.75}")
    assert node.uses(cpu=1.0, gpu=0.5, beats=15) == []
    assert node.uses(cpu=0.2, gpu=1.0, beats=15) == []
    (busy,) = node.uses(cpu=0.2, gpu=1.0)
    assert (busy.resource, busy.detail) == ("gpu", "gpu1: GPU at 100 %, above the mark of 90 %")


def test_unmeasured_resource_raises_no_alert() -> None:
    node = Watched("alerts: {gpu: 0.5}", Capacity())
    assert node.uses(memory_gb=1, beats=50) == []
    assert node.alerts.raised() == []


def test_a_silence_interrupts_the_minute() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    assert node.uses(memory_gb=1, beats=20) == []
    node.now += 3_600_000
    assert node.uses(memory_gb=1, beats=30) == []
    (alert,) = node.uses(memory_gb=1)
    assert alert.state == "cleared"


def test_a_node_that_leaves_takes_its_alerts_with_it() -> None:
    node = Watched()
    node.uses(memory_gb=14)
    (alert,) = node.alerts.forget("gpu1", node.now)
    assert (alert.state, alert.detail) == ("cleared", "gpu1 left the grid")
    assert node.alerts.forget("gpu1", node.now) == []


values = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([2_000, 2_000, 2_000, 5_000, 30_000])), max_size=200)


@given(values, st.sampled_from([0, 10_000]))
def test_raised_and_cleared_take_turns_and_never_come_without_cause(
    changes: list[tuple[float, int]], raise_after_ms: int
) -> None:
    mark = AlertThreshold(0.75, 0.05, raise_after_ms, 20_000)
    standing, at_ms, since_change = CLEARED, NOW, list[tuple[int, float]]()
    for value, step in changes:
        at_ms += step
        since_change.append((at_ms, value))
        before, standing = standing, next_state(standing, mark, value, at_ms)
        if standing.raised is before.raised:
            continue
        dwell = raise_after_ms if standing.raised else mark.clear_after_ms
        begin = later = at_ms
        for when, seen in reversed(since_change):
            if later - when > 6_000 or not (seen > 0.75 if standing.raised else seen <= 0.75 - 0.05):
                break
            begin = later = when
        assert at_ms - begin >= dwell
        since_change = []


@given(st.lists(st.floats(0.7001, 0.75), max_size=100), st.booleans())
def test_between_the_marks_nothing_changes(changes: list[float], raised: bool) -> None:
    standing = AlertState(raised)
    for place, value in enumerate(changes):
        standing = next_state(standing, MARK, value, NOW + 2_000 * place)
    assert standing.raised is raised


ALERT = Alert(
    node="gpu1",
    resource="memory",
    raised=True,
    value=0.8125,
    mark=0.75,
    at_ms=1_700_000_000_000,
    detail="gpu1: memory at 81 %, above the mark of 75 %",
)


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
        deadline_seconds = 0.3 if says == "no answer within" else 10
        with pytest.raises(WebhookFailed, match=says) as failed:
            asyncio.run(Webhook(address).post(b"{}", deadline_seconds=deadline_seconds))
        assert time.monotonic() - began < deadline_seconds + 2
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
            delivery.send(
                Alert(
                    node="n", resource="memory", raised=True, value=0.8, mark=0.75, at_ms=1, detail=f"number {place}."
                )
            )
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
