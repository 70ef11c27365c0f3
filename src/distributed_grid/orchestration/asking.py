"""From what people write (`cpu`, 1.5) to what the ledger counts (1500 millicores): the border of units."""

from __future__ import annotations

import math
from collections.abc import Collection

from distributed_grid.domain.resources import Amounts, ResourceType
from distributed_grid.errors import BadInput

GB = 1024**3


def amounts_of(resource_type: str, amount: float, custom: Collection[str] = ()) -> Amounts:
    """The integers that "this much of that" means; refuses what is no amount of anything."""
    if not math.isfinite(amount) or amount <= 0:
        raise BadInput(f"the amount must be more than zero, not {amount:g}")
    kind = resource_type.lower()
    if kind == ResourceType.CPU:
        return Amounts(cpu_milli=_milli(amount, "cores"))
    if kind == ResourceType.GPU:
        return Amounts(gpu_milli=_milli(amount, "GPUs"))
    if kind == ResourceType.MEMORY:
        return Amounts(memory_bytes=_whole(amount * GB, "memory"))
    names = {name.lower(): name for name in custom}
    if kind not in names:
        known = ", ".join([*(kind.value for kind in ResourceType), *sorted(names.values())])
        raise BadInput(f"no resource is called {resource_type!r}: there is {known}")
    if amount != int(amount):
        raise BadInput(f"{names[kind]} can only be asked for in whole numbers, not {amount:g}")
    return Amounts(custom=((names[kind], _whole(amount, names[kind])),))


def together(*parts: Amounts) -> Amounts:
    """Several asks as one; asking twice for the same is refused."""
    total = Amounts()
    for part in parts:
        names = [name for name in _SUMMED if getattr(part, name) and getattr(total, name)]
        if names or {name for name, _ in part.custom} & {name for name, _ in total.custom}:
            raise BadInput("a resource is asked for twice")
        total = Amounts(
            **{name: getattr(part, name) or getattr(total, name) for name in _SUMMED},
            custom=tuple(sorted(total.custom + part.custom)),
            gpu_models=total.gpu_models + part.gpu_models,
        )
    return total


_SUMMED = ("cpu_milli", "memory_bytes", "gpu_milli", "gpu_memory_bytes")


def _milli(amount: float, of: str) -> int:
    return _whole(amount * 1000, of)


def _whole(number: float, of: str) -> int:
    if number > 2**60:
        raise BadInput(f"no machine has that much: {of} {number:g}")
    if round(number) == 0:
        raise BadInput(f"that is too little {of} to lend")
    return round(number)
