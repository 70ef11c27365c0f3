"""A grid whose nodes lend memory to blocks, and what was done for them."""

from __future__ import annotations

from typing import Any

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.events import BlockAsked, CopiesFreed, MemoryServed
from distributed_grid.reactor.effects import FreeCopies, memory_effects
from tests.support.builders import GB, Scenario, a_node

HOUR = 3_600_000
LENDERS = ("gpu1", "gpu2", "gpu3")


def served(scenario: Scenario, *names: str, life: str = "life1", on_disk: tuple[str, ...] = ()) -> None:
    for name in names:
        lender = MemoryServerRow(
            node=name, host="10.0.0.1", port=7000, incarnation=f"{name}-{life}", key_bytes=b"k" * 32
        )
        scenario.handle(MemoryServed(lender, on_disk))


def a_pool(*names: str, memory: int = 8) -> Scenario:
    scenario = Scenario(*(a_node(name, memory_gb=memory) for name in names or LENDERS))
    served(scenario, *(names or LENDERS), "")
    return scenario


def ask(scenario: Scenario, name: str = "b1", gb: int = 2, *, copies: int = 1, user: str = "ann", **more: Any) -> Block:
    scenario.handle(BlockAsked(id=name, user=user, size_bytes=gb * GB, term_ms=HOUR, copies=copies, **more))
    return scenario.ledger.blocks[name]


def effects(scenario: Scenario, kind: type) -> list:
    return [effect for effect in memory_effects(scenario.ledger) if isinstance(effect, kind)]


def freed(scenario: Scenario) -> None:
    for effect in effects(scenario, FreeCopies):
        scenario.handle(CopiesFreed(effect.copies, (effect.node,)))
    scenario.ledger.check()
