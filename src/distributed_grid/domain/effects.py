"""Effects: orders to agents, engines and memory servers, keyed by id and fence; each is safe to repeat."""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.blocks import Block
from distributed_grid.domain.engines import Binding
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease


class StartAttempt(Struct, frozen=True):
    """Run the job's current attempt under its lease."""

    node: str
    job: Job
    lease: Lease


class StopAttempt(Struct, frozen=True):
    """Stop the whole process tree of the job's current attempt."""

    node: str
    job: Job


class BindLease(Struct, frozen=True):
    """Have the engine reserve what the lease claims, under the binding's name."""

    binding: Binding
    lease: Lease


class FreeBinding(Struct, frozen=True):
    """Have nothing of that name in the engine any more."""

    binding: Binding


class ServeMemory(Struct, frozen=True):
    """Let the memory of a node be used."""

    node: str


class MakeCopy(Struct, frozen=True):
    """Make the copy that a block is waiting for, from its source on this node."""

    node: str
    block: Block


class FreeCopies(Struct, frozen=True):
    """Let go of these copies on a node."""

    node: str
    copies: tuple[str, ...]


MemoryEffect = ServeMemory | MakeCopy | FreeCopies
Effect = StartAttempt | StopAttempt
EngineEffect = BindLease | FreeBinding
