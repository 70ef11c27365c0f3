"""The wire: everything said is understood, nothing else is, and nothing is too large."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid import wire
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.processes import ProcessIdentity, ProcessInfo
from distributed_grid.domain.resources import Capacity, Claim, GpuDevice, GpuShare
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.errors import ProtocolError

ENDPOINT = wire.Endpoint("10.0.0.1", 7000, "ab" * 32, "/run/memory.sock", "life")
CAPACITY = wire.ReportedCapacity.of(Capacity(4000, 2**34, (GpuDevice(0, 2**33, "A"),), (("fpga", 2),)))
FROM_AGENT: list[wire.FromAgent] = [
    wire.AgentHello(
        protocol=1, version="0.2.0", node="gpu1", attempts=("a.1",), capacity=CAPACITY, epoch=7, boot="boot"
    ),
    wire.AttemptsPage("gpu1", ("a.2",), True),
    wire.Heartbeat(
        node="gpu1",
        usage=Usage(
            cpu_busy_milli=10,
            cpu_outside_milli=5,
            memory_bytes=2**30,
            memory_outside_bytes=2**29,
            gpus=(GpuUsage(0, 1, 2, 3, 4),),
        ),
        beat=12,
        generation=3,
        yields=True,
        marks=(wire.CheckpointAge("a.1", 5, 9),),
        outgrown=(wire.HeldMemory("a.1", 5, 2**31),),
    ),
    wire.AttemptStartedReport(seq=1, lease_id="a.1", fence=5, pid=77, cores=(0, 1)),
    wire.AttemptPausedReport(2, "a.1", 5, True, "its owner is back"),
    wire.AttemptEndedReport(seq=3, lease_id="a.1", fence=5, outcome=Outcome(Ending.EXITED, exit_code=3), mark_age_ms=7),
    wire.MoveReport(
        seq=4, move_id="move-1", state=MoveState.FROZEN, detail="stands still", left_ms=9000, files=2, kept=("a",)
    ),
    wire.ProcessListing(
        7,
        (
            ProcessInfo(
                pid=7, pid_start=8, boot="boot", ppid=1, uid=1000, user="ann", name="python", argv=("python", "a.py")
            ),
        ),
        more=True,
    ),
    wire.FilesChecked(8, ("/data/set",)),
    wire.FileChunk(4, b"output", at=9),
    wire.FileListing(stream=5, files=b"files", skipped=("a: a socket",)),
    wire.FetchContent(6, "ab" * 32, 100),
    wire.FetchCredit(6, 50),
    wire.MemoryServedReport(node="gpu1", endpoint=ENDPOINT, key=b"k" * 32, copies=("b1:1",), on_disk=("b2:3",)),
    wire.CopiesPage("gpu1", ("b1:2",), (), True),
    wire.MemoryFailedReport("gpu1", "no space left"),
    wire.CopyMadeReport("b1:1", 2, "refused"),
    wire.CopiesFreedReport(("b1:1",)),
    wire.MemoryReclaimReport("gpu1", 2**30),
    wire.MemoryQuery(1, b"{}"),
]
TO_AGENT: list[wire.ToAgent] = [
    wire.Welcome(
        protocol=1,
        version="0.2.0",
        epoch=4,
        hold_ms=60_000,
        heartbeat_ms=2000,
        owner=wire.OwnerRules(
            cpu_busy_max_milli=300,
            memory_used_max_milli=500,
            memory_min_bytes=2**31,
            gpu_busy_max_milli=200,
            gpu_memory_min_bytes=2**30,
        ),
    ),
    wire.RejectAgent("no"),
    wire.ControlPlaneAddress(("10.0.0.1:7433",), "ab" * 32, "-----BEGIN CERTIFICATE-----", "/state/agents.sock"),
    wire.HeartbeatReply(beat=12, hold_ms=60_000),
    wire.StartAttemptOrder(
        node="gpu1",
        lease_id="a.1",
        fence=5,
        job_id="job",
        command=Command(("true",)),
        claim=Claim(1000, 0, (GpuShare(0, 1000),)),
        hold_ms=60_000,
        beat=12,
        generation=3,
    ),
    wire.StopAttemptOrder("a.1", 5, Ending.CANCELLED, "by ada", 5000),
    wire.PauseAttemptOrder("a.1", 5, True, "gpu1 is degraded"),
    wire.ResizeAttemptOrder("a.1", 5, 2**30, 2**34),
    wire.MoveOrder(
        node="gpu1", move_id="move-1", step=Step.FREEZE, process=ProcessIdentity(7, 8, "boot"), freeze_ms=10_000
    ),
    wire.ListProcesses(7, "gpu1", 7, ("SEED",)),
    wire.CheckFiles(8, (("/data/set", 100),)),
    wire.AcknowledgeMarks(2),
    wire.AcknowledgeReport(3),
    wire.ReadFile(stream=4, lease_id="a.1", name=b"stdout", offset=9, credit=100),
    wire.ReadCredit(4, 100),
    wire.CloseStream(4),
    wire.ListFiles(stream=5, lease_id="a.1", patterns=("out/**",)),
    wire.FetchedChunk(6, b"content"),
    wire.ServeMemoryOrder("gpu1", b"certificate", b"key", "10.0.0.1"),
    wire.MakeCopyOrder("b1:1", 2, ENDPOINT, wire.Ticket(b"claims", b"secret")),
    wire.FreeCopiesOrder(("b1:1",)),
    wire.MemoryReply(1, b"{}"),
]


@pytest.mark.parametrize("message", FROM_AGENT, ids=lambda one: type(one).__name__)
def test_what_an_agent_says_is_understood(message: wire.FromAgent) -> None:
    assert wire.decode_from_agent(wire.encode(message)) == message


@pytest.mark.parametrize("message", TO_AGENT, ids=lambda one: type(one).__name__)
def test_what_an_agent_is_told_is_understood(message: wire.ToAgent) -> None:
    assert wire.decode_to_agent(wire.encode(message)) == message


def test_every_message_is_tested_here() -> None:
    assert {type(one) for one in FROM_AGENT} == set(wire.FromAgent.__args__)
    assert {type(one) for one in TO_AGENT} == set(wire.ToAgent.__args__)


def test_no_secret_is_shown_where_a_message_is_printed() -> None:
    for message in (*FROM_AGENT, *TO_AGENT):
        assert "secret" not in repr(message)
        assert "kkkk" not in repr(message)
        assert "b'key'" not in repr(message)


def test_the_two_directions_are_not_mixed_up() -> None:
    for message in FROM_AGENT:
        with pytest.raises(ProtocolError):
            wire.decode_to_agent(wire.encode(message))
    for order in TO_AGENT:
        with pytest.raises(ProtocolError):
            wire.decode_from_agent(wire.encode(order))


@given(st.binary(max_size=2000))
def test_bytes_that_are_no_message_are_refused_and_nothing_worse(data: bytes) -> None:
    for decode in (wire.decode_from_agent, wire.decode_to_agent):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(st.sampled_from(FROM_AGENT + TO_AGENT), st.data())
def test_a_message_damaged_on_its_way_is_refused_or_still_a_message(message, data) -> None:
    raw = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for candidate in (bytes(raw), cut):
        for decode in (wire.decode_from_agent, wire.decode_to_agent):
            try:
                decode(candidate)
            except ProtocolError:
                pass
        try:
            wire.check_greeting(candidate, mine="one", theirs="the other")
        except ProtocolError:
            pass


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


@given(st.sampled_from([type(one).__name__ for one in FROM_AGENT + TO_AGENT]), st.data())
def test_fields_of_the_wrong_kind_are_refused_and_nothing_worse(name, data) -> None:
    kind = getattr(wire, name)
    fields = {field: data.draw(_values) for field in kind.__struct_fields__ if data.draw(st.booleans())}
    raw = msgspec.msgpack.encode({"type": name, **fields})
    for decode in (wire.decode_from_agent, wire.decode_to_agent):
        try:
            decode(raw)
        except ProtocolError:
            pass


def test_deep_nesting_does_not_exhaust_the_stack() -> None:
    for deep in (b"\x91" * 100_000, b"\x81\xa1a" * 50_000):
        with pytest.raises(ProtocolError):
            wire.decode_from_agent(deep)


def test_a_message_beyond_the_largest_size_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        wire.decode_from_agent(b"\0" * (wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError):
        wire.decode_from_agent(wire.encode(wire.FileChunk(1, b"x" * (wire.MAX_CHUNK_BYTES + 1))))


@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(-1),
        Capacity(2**61),
        Capacity(0, -5),
        Capacity(0, 2**61),
        Capacity(0, 0, (GpuDevice(0, -1),)),
        Capacity(0, 0, (GpuDevice(0), GpuDevice(0))),
        Capacity(0, 0, tuple(GpuDevice(number) for number in range(2000))),
        Capacity(custom=(("tpu", -1),)),
        Capacity(custom=(("tpu", 1), ("tpu", 2))),
    ],
)
def test_a_machine_that_cannot_be_is_refused(capacity: Capacity) -> None:
    with pytest.raises(ProtocolError, match=r"not a message|named twice"):
        wire.decode_from_agent(
            wire.encode(
                wire.AgentHello(
                    protocol=1, version="0", node="gpu1", attempts=(), capacity=wire.ReportedCapacity.of(capacity)
                )
            )
        )


@pytest.mark.parametrize(
    "usage",
    [
        Usage(cpu_busy_milli=1001),
        Usage(cpu_busy_milli=-1),
        Usage(cpu_busy_milli=0, cpu_outside_milli=0, memory_bytes=-1),
        Usage(gpus=(GpuUsage(0, 5000),)),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(usage: Usage) -> None:
    with pytest.raises(ProtocolError, match=r"not a message.*usage"):
        wire.decode_from_agent(wire.encode(wire.Heartbeat(node="gpu1", usage=usage)))


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 2**31},
        {"cores": [-1]},
        {"cores": [2**16]},
        {"cores": [0] * 5000},
        {"fence": 2**61},
        {"mark_age_ms": 2**53 + 1},
        {"outcome": {"ending": "exited", "exit_code": 2**31}},
        {"outcome": {"ending": "exited", "cpu_ms": 2**54}},
        {"outcome": {"ending": "exited", "cpu_ms": -1}},
        {"outcome": {"ending": "exited", "wall_ms": 2**63}},
        {"outcome": {"ending": "exited", "max_memory_bytes": 2**51}},
        {"outcome": {"ending": "exited", "detail": "x" * 8001}},
    ],
    ids=str,
)
def test_an_end_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    end = msgspec.to_builtins(
        wire.AttemptEndedReport(
            seq=3,
            lease_id="a.1",
            fence=5,
            outcome=Outcome(Ending.EXITED, exit_code=3),
            pid=7,
            cores=(0,),
            mark_age_ms=1,
        )
    )
    assert isinstance(wire.decode_from_agent(msgspec.msgpack.encode(end)), wire.AttemptEndedReport)
    with pytest.raises(ProtocolError):
        wire.decode_from_agent(msgspec.msgpack.encode({**end, **change}))


@pytest.mark.parametrize(
    ("command", "claim"),
    [
        (Command(("true",)), Claim(2**50 + 1)),
        (Command(("true",)), Claim(-1)),
        (Command(("true",)), Claim(1000, 2**60)),
        (Command(("true",)), Claim(1000, 0, (GpuShare(-1, 1000),))),
        (Command(("true",)), Claim(1000, custom=(("fpga", -1),))),
        (Command(("true",), timeout_ms=2**63), Claim(1000)),
        (Command(("true",), grace_ms=-1), Claim(1000)),
    ],
)
def test_an_order_that_no_machine_can_carry_out_is_refused(command: Command, claim: Claim) -> None:
    order = wire.StartAttemptOrder(
        node="gpu1", lease_id="a.1", fence=5, job_id="job", command=command, claim=claim, hold_ms=60_000
    )
    with pytest.raises(ProtocolError, match="out of range"):
        wire.decode_to_agent(wire.encode(order))


def test_an_outcome_is_within_its_bounds_whoever_made_it() -> None:
    beyond = Outcome(Ending.EXITED, 2**40, -(2**40), "é" * 100_000, 2**70, 2**70, -1)
    ended = wire.AttemptEndedReport(seq=1, lease_id="a.1", fence=5, outcome=beyond)
    assert wire.decode_from_agent(wire.encode(ended)) == ended
    assert beyond.detail.endswith("…")


def test_a_greeting_and_a_list_of_copies_of_any_length_are_sent_in_pages() -> None:
    for count in (0, 1, wire.MAX_IDS, wire.MAX_IDS + 1, 3 * wire.MAX_IDS):
        ids = tuple(f"job{number}.1" for number in range(count))
        said: list[Any] = [
            wire.decode_from_agent(wire.encode(one))
            for one in wire.greeting(wire.AgentHello(protocol=wire.PROTOCOL, version="0", node="gpu1", attempts=ids))
        ]
        assert [one.more for one in said] == [True] * (len(said) - 1) + [False]
        assert tuple(name for one in said for name in one.attempts) == ids
        report = wire.MemoryServedReport(
            node="gpu1", endpoint=ENDPOINT, key=b"k" * 32, copies=ids, on_disk=ids[: count // 3]
        )
        listed: list[Any] = [wire.decode_from_agent(wire.encode(one)) for one in wire.served_pages(report)]
        assert [one.more for one in listed] == [True] * (len(listed) - 1) + [False]
        assert tuple(name for one in listed for name in one.copies) == ids
        assert tuple(name for one in listed for name in one.on_disk) == ids[: count // 3]


def test_an_agent_from_before_there_were_marks_is_understood() -> None:
    for message in (
        wire.Heartbeat(node="gpu1", usage=Usage(), beat=12),
        wire.AttemptEndedReport(seq=3, lease_id="a.1", fence=5, outcome=Outcome(Ending.LOST)),
    ):
        old = msgspec.msgpack.decode(wire.encode(message))
        for field in ("marks", "mark_age_ms"):
            old.pop(field, None)
        assert wire.decode_from_agent(msgspec.msgpack.encode(old)) == message


def test_another_version_is_told_which_side_to_upgrade() -> None:
    newer = msgspec.msgpack.encode({"type": "Hello", "protocol": wire.PROTOCOL + 1, "version": "9.0", "what": "ever"})
    with pytest.raises(ProtocolError, match=r"version 9\.0.*upgrade this control plane"):
        wire.check_greeting(newer, mine="this control plane", theirs="the agent of gpu1")
    older = msgspec.msgpack.encode({"protocol": wire.PROTOCOL - 1})
    with pytest.raises(ProtocolError, match="upgrade the agent of gpu1"):
        wire.check_greeting(older, mine="this control plane", theirs="the agent of gpu1")
