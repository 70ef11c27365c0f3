"""What is remembered of the nodes from one round to the next, and what a round has to look at.

Rule 1: since when a node is beyond a mark is known only while it stays there, and only of nodes that are known.
Rule 2: who has too much comes before who has too little, and then those who work hardest.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from distributed_grid.domain.rebalancing import SPREAD, WATCHED, PressureWatch, RebalanceSchedule, RebalanceState
from distributed_grid.domain.resources import ResourceType
from distributed_grid.scheduling.rebalancing.advice import stands
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, machine_of
from distributed_grid.scheduling.rebalancing.surplus import asked

WAITING = ""
"""The first entry of an agenda: those who wait."""


def watched(look: PressureScan) -> list[RebalanceState]:
    """What is remembered of each node after one more reading; only where that has changed."""
    changed = []
    least = _two_least(look)
    for name in look.ledger.nodes:
        old = look.balance(name)
        new = replace(
            old,
            memory=_watched(look, name, ResourceType.MEMORY, old.memory),
            cpu=_watched(look, name, ResourceType.CPU, old.cpu),
            gpu=_watched(look, name, ResourceType.GPU, old.gpu),
            spread=_spread(look, name, least, old.spread),
            advice=old.advice if old.advice is not None and stands(look, name, old.advice) else None,
        )
        if new != old:
            changed.append(new)
    return changed


def _watched(look: PressureScan, node: str, resource: ResourceType, old: PressureWatch) -> PressureWatch:
    above = below = None
    if look.is_above(node, resource):
        above = look.now if old.above_since_ms is None else old.above_since_ms
    elif look.held[node, resource] and look.is_below(node, resource):
        below = look.now if old.below_since_ms is None else old.below_since_ms
    return PressureWatch(above, below, old.acted_at_ms, old.refused and not look.is_below(node, resource))


def _two_least(look: PressureScan) -> list[tuple[int, str]]:
    """The least loaded node that is known, and the least loaded one of another machine."""
    nodes = look.ledger.nodes
    found: list[tuple[int, str]] = []
    scores = ((look.reading(name).score, name) for name in nodes)
    for score, name in sorted((score, name) for score, name in scores if score is not None):
        if not found:
            found.append((score, name))
        elif machine_of(nodes[name]) != machine_of(nodes[found[0][1]]):
            return [*found, (score, name)]
    return []


def _spread(look: PressureScan, node: str, least: list[tuple[int, str]], old: PressureWatch) -> PressureWatch:
    """Since when a node works so much harder than the least loaded one elsewhere that they should be evened out."""
    score, nodes = look.reading(node).score, look.ledger.nodes
    if not look.rules.evens_out or score is None or not least:
        return PressureWatch()
    lowest, _ = least[0] if machine_of(nodes[least[0][1]]) != machine_of(nodes[node]) else least[1]
    if score - lowest <= look.rules.policy.spread_milli:
        return PressureWatch()
    return PressureWatch(look.now if old.above_since_ms is None else old.above_since_ms)


def agenda_of(look: PressureScan, noted: Iterable[RebalanceState]) -> RebalanceSchedule:
    """Who has to be looked at in this round, by what has just been noted, and who could help."""
    balances = {**look.ledger.balances, **{balance.node: balance for balance in noted}}
    above = {name for name, balance in balances.items() if _is_beyond(balance)}
    holding = dict.fromkeys(lease.request.target for lease in look.leases)
    pressed = sorted((-(look.reading(name).score or 0), name) for name in above)
    calm = sorted((look.reading(name).score or 0, name) for name in look.ledger.nodes if look.is_calm(name))
    return RebalanceSchedule(
        (WAITING, *(name for name in holding if name not in above), *(name for _, name in pressed)),
        tuple(name for _, name in calm) if pressed else (),
        _waited_for(look) if pressed else frozenset(),
    )


def _is_beyond(balance: RebalanceState) -> bool:
    return any(balance.watch(cause).above_since_ms is not None for cause in (*WATCHED, SPREAD))


def _waited_for(look: PressureScan) -> frozenset[str]:
    """The resources that users wait for: the grid does not get in their way."""
    kinds: set[str] = set()
    for _, _, lease_id in look.ledger.waiting:
        ask = look.ledger.leases[lease_id].request.ask
        kinds.update(kind for kind in WATCHED if asked(ask, kind))
        if len(kinds) == len(WATCHED):
            break
    return frozenset(kinds)
