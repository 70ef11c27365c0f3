"""Lies of an agent: every field is lied about, and what is said fits on the wire."""

from __future__ import annotations

from random import Random

import pytest
from msgspec import structs

from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.simulation.lies import Liar
from distributed_grid.wire import (
    PROTOCOL,
    AgentHello,
    AnnouncedEnd,
    AttemptEndedReport,
    AttemptPausedReport,
    AttemptStartedReport,
    CheckpointAge,
    FromAgent,
    Heartbeat,
    ReportedCapacity,
    decode_from_agent,
    encode,
)

MESSAGES: list[FromAgent] = [
    AgentHello(PROTOCOL, "1", "ash", ("job1.1",), ReportedCapacity.of(Capacity(4000, 1 << 34)), 3, "boot"),
    Heartbeat(
        "ash",
        Usage(),
        5_000,
        2,
        marks=(CheckpointAge("job1.1", 9, 100),),
        capacity=ReportedCapacity.of(Capacity(4000, 1 << 34)),
        end=AnnouncedEnd("spot notice", 120_000),
    ),
    AttemptStartedReport(1, "job1.1", 9, 123, (0, 1)),
    AttemptPausedReport(2, "job1.1", 9, True, "why"),
    AttemptEndedReport(3, "job1.1", 9, Outcome(Ending.EXITED, exit_code=0)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_is_lied_about_within_the_types_of_the_wire(message: FromAgent) -> None:
    liar = Liar(Random(1), ("birch", "job2.1"))
    changed = set()
    for _ in range(400):
        said = liar.lie(message)
        assert decode_from_agent(encode(said)) == said
        assert type(said) is type(message)
        differs = [name for name, value in structs.asdict(said).items() if value != getattr(message, name)]
        assert len(differs) <= 1
        changed.update(differs)
    assert changed == set(message.__struct_fields__)
