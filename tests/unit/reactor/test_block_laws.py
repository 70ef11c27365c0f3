"""Blocks under random scripts: the ledger stays right, and whatever is released goes."""

from __future__ import annotations

import random

import pytest

from distributed_grid.domain.events import BlockReleased, CopyMade, LeaseLost, MemoryReclaimRequested
from distributed_grid.errors import Refused
from distributed_grid.reactor.effects import MakeCopy
from tests.support.builders import GB, Scenario
from tests.unit.reactor.block_pool import LENDERS, a_pool, ask, effects, freed, served


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_ledger_stays_right_and_everything_released_goes(seed):
    """A random script of asks, moves, losses and releases, with the ledger held against its laws after every step."""
    chance = random.Random(seed)
    scenario = a_pool(*LENDERS)
    lives = dict.fromkeys(LENDERS, 1)
    for number in range(120):
        action = chance.randrange(10)
        name = chance.choice(LENDERS)
        blocks = list(scenario.ledger.blocks)
        try:
            if action <= 2:
                ask(
                    scenario,
                    f"b{number}",
                    gb=chance.randint(1, 3),
                    copies=chance.randint(1, 3),
                    home=chance.choice(["", name]),
                )
            elif action == 3 and blocks:
                scenario.handle(BlockReleased(chance.choice(blocks), "ann"))
            elif action == 4:
                scenario.handle(MemoryReclaimRequested(name, chance.randint(1, 4) * GB))
            elif action == 5:
                lives[name] += 1
                served(scenario, name, life=f"life{lives[name]}", on_disk=tuple(_on_disk(scenario)))
            elif action == 6 and scenario.ledger.leases:
                scenario.handle(LeaseLost(chance.choice(list(scenario.ledger.leases)), "gone"))
            elif action == 7:
                for effect in effects(scenario, MakeCopy):
                    moving = effect.block.moving
                    scenario.handle(
                        CopyMade(moving.source, moving.generation, chance.choice(["", "", "no"]), (effect.node,))
                    )
            elif action == 8:
                freed(scenario)
            scenario.advance(chance.choice([0.01, 3, 40]))
        except Refused:
            pass  # no room, or no such block any more: nothing may have changed
        scenario.ledger.check()
    for block in list(scenario.ledger.blocks):
        scenario.handle(BlockReleased(block, "ann"))
    served(scenario, "", on_disk=tuple(_on_disk(scenario)))
    freed(scenario)
    assert not scenario.ledger.blocks
    assert not scenario.ledger.leases


def _on_disk(scenario: Scenario) -> list[str]:
    return [place.copy for block in scenario.ledger.blocks.values() for place in block.places if place.on_disk]
