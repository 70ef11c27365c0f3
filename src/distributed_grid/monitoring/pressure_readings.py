"""How hard every node works and where that leads, in the thousandths that balancing is decided with."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import WATCHED, Forecast, PressureReading
from distributed_grid.monitoring.history import MINUTE_MS, ClusterHistory
from distributed_grid.monitoring.pressure import cpu_part, gpu_part, memory_part, pressure
from distributed_grid.monitoring.snapshots import fresh_usage


def readings(ledger: Ledger, now: int) -> tuple[PressureReading, ...]:
    """What is known of every node at this moment; a node nobody hears from has no numbers."""
    found = []
    for name, node in ledger.nodes.items():
        usage = fresh_usage(node, ledger.sightings.get(name), now)
        if usage is None:
            found.append(PressureReading(name))
            continue
        has, gpu = node.capacity, gpu_part(usage)
        found.append(
            PressureReading(
                name,
                _milli(pressure(has, usage)),
                memory=_milli(memory_part(has, usage)) if has.memory_bytes else None,
                cpu=_milli(cpu_part(usage)),
                gpu=_milli(gpu) if gpu is not None else None,
            )
        )
    return tuple(found)


def foreseen(reading: PressureReading, past: ClusterHistory, now: int, ahead_ms: int) -> PressureReading:
    """The same reading with what its levels will be at so much later, where enough is known to say."""
    ahead = {}
    for resource in WATCHED:
        if reading.level(resource) is None:
            continue
        trend = past.forecast(reading.node, resource, now, ahead_ms / MINUTE_MS)
        if trend is not None:
            reach = max(trend.forecast - trend.low, trend.high - trend.forecast)
            ahead[f"{resource}_ahead"] = Forecast(_milli(trend.forecast), _milli(reach))
    return replace(reading, **ahead) if ahead else reading


def _milli(part: float) -> int:
    return round(1000 * part)
