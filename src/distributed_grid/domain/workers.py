"""Workers: machines that a provider starts for the grid, and what they cost. Money is in millionths of a dollar.

A worker is a row before anything is asked of its provider. Its id is the idempotency key of the call, the name and tag
of the machine, and the name of the node that it becomes. It leaves the ledger only when it is proven gone: until then
it counts as spending.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.states import WorkerState


class WorkerResources(Struct, frozen=True, omit_defaults=True):
    """How much of everything a worker has, or is asked to have."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_count: int = 0


class Worker(Struct, frozen=True, omit_defaults=True):
    """One machine of a provider, from the intent to its end.

    `worker_type` is its kind (`cpu`, `gpu`), `offer` the provider's own name of what is started, `price_micro` what an
    hour of it costs (None: not known). `instance` is the provider's id of it, once that was heard. `by` asked for it;
    `why` says why it is in its state. `problem` is the last error of its provider. `used_at_ms` is when its last lease
    ended; a `spare` one drains because nobody needs it.
    """

    kind: ClassVar[str] = "worker"

    id: str
    provider: str
    worker_type: str
    resources: WorkerResources
    created_at_ms: int
    offer: str = ""
    price_micro: int | None = None
    state: WorkerState = WorkerState.WANTED
    instance: str = ""
    by: str = ""
    why: str = ""
    asked_at_ms: int = 0
    booted_at_ms: int = 0
    joined_at_ms: int = 0
    terminate_at_ms: int = 0
    ended_at_ms: int = 0
    problem: str = ""
    used_at_ms: int = 0
    spare: bool = False

    @property
    def key(self) -> str:
        return self.id

    @property
    def node(self) -> str:
        """The name of the node that it is once it has joined."""
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is WorkerState.GONE

    @property
    def is_on_its_way(self) -> bool:
        """Whether it will be capacity soon, as far as anybody knows."""
        return self.state in (WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING)
