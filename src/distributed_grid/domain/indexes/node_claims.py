"""Sum of the claims on one node, device by device, and the claim that a request would get there.

Whole-GPU shares need an unused device, fractions of a device never exceed 1000, and an exclusive device is only lent
whole. Adding and removing the same claim leaves the sums as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim, GpuDevice, GpuShare, is_model

K = TypeVar("K")


class NodeClaims:
    """The running sum of the claims on one node."""

    __slots__ = ("cpu_milli", "custom", "gpu_memory", "gpu_milli", "memory_bytes")

    def __init__(self, claims: Iterable[Claim] = ()) -> None:
        self.cpu_milli = 0
        self.memory_bytes = 0
        self.gpu_milli: dict[int, int] = {}
        self.gpu_memory: dict[int, int] = {}
        self.custom: dict[str, int] = {}
        for claim in claims:
            self.add(claim)

    def copy(self) -> NodeClaims:
        other = NodeClaims()
        other.cpu_milli, other.memory_bytes = self.cpu_milli, self.memory_bytes
        other.gpu_milli, other.gpu_memory = dict(self.gpu_milli), dict(self.gpu_memory)
        other.custom = dict(self.custom)
        return other

    def add(self, claim: Claim) -> None:
        self._count(claim, 1)

    def remove(self, claim: Claim) -> None:
        self._count(claim, -1)

    def _count(self, claim: Claim, sign: int) -> None:
        self.cpu_milli += sign * claim.cpu_milli
        self.memory_bytes += sign * claim.memory_bytes
        for share in claim.gpus:
            _count(self.gpu_milli, share.index, sign * share.milli)
            _count(self.gpu_memory, share.index, sign * share.memory_bytes)
        for name, count in claim.custom:
            _count(self.custom, name, sign * count)

    def free_milli(self, device: GpuDevice) -> int:
        return WHOLE_GPU - self.gpu_milli.get(device.index, 0)

    def free_memory(self, device: GpuDevice) -> int:
        return device.memory_bytes - self.gpu_memory.get(device.index, 0)

    def whole_free(self, lends: Capacity) -> int:
        """Number of devices without a claim."""
        if not lends.gpus:
            return 0
        return sum(1 for device in lends.gpus if not self.gpu_milli.get(device.index, 0))

    def part_free(self, lends: Capacity) -> int:
        """The largest part of one shareable device that is left."""
        return max((self.free_milli(device) for device in lends.gpus if not device.exclusive), default=0)

    def claim_for(self, ask: Amounts, lends: Capacity, *, device: int | None = None) -> Claim | None:
        """The claim this ask would get out of what the node lends, or None where it does not fit.

        Part of a GPU is taken from the fullest device that has it, or from the one that is named.
        """
        if ask.cpu_milli > lends.cpu_milli - self.cpu_milli:
            return None
        if ask.memory_bytes > lends.memory_bytes - self.memory_bytes:
            return None
        if ask.custom:
            has = dict(lends.custom)
            if any(count > has.get(name, 0) - self.custom.get(name, 0) for name, count in ask.custom):
                return None
        if not ask.gpu_milli:
            return Claim(ask.cpu_milli, ask.memory_bytes, (), ask.custom)
        gpus = self._devices_for(ask, lends, device)
        return None if gpus is None else Claim(ask.cpu_milli, ask.memory_bytes, gpus, ask.custom)

    def _devices_for(self, ask: Amounts, lends: Capacity, named: int | None) -> tuple[GpuShare, ...] | None:
        if ask.gpu_milli < WHOLE_GPU:
            fitting = []  # parts of a device
            for device in _of_model(ask, lends):
                memory = ask.gpu_memory_bytes or device.memory_bytes * ask.gpu_milli // WHOLE_GPU
                is_named = named is None or device.index == named
                has_room = self.free_milli(device) >= ask.gpu_milli and self.free_memory(device) >= memory
                if is_named and not device.exclusive and has_room:
                    fitting.append((self.free_milli(device), device.index, memory))
            if not fitting:
                return None
            _, index, memory = min(fitting)
            return (GpuShare(index, ask.gpu_milli, memory),)
        wanted = ask.gpu_milli // WHOLE_GPU
        devices = _of_model(ask, lends)
        free = [d for d in devices if not self.gpu_milli.get(d.index, 0) and d.memory_bytes >= ask.gpu_memory_bytes]
        if len(free) < wanted:
            return None
        free.sort(key=lambda device: (device.memory_bytes, device.index))
        chosen = sorted(free[:wanted], key=lambda device: device.index)
        return tuple(GpuShare(device.index, WHOLE_GPU, device.memory_bytes) for device in chosen)

    def excess_over(self, limit: Capacity) -> str | None:
        """The first resource whose claims exceed a limit, in words, or None."""
        if self.cpu_milli > limit.cpu_milli:
            return f"{self.cpu_milli} of {limit.cpu_milli} millicores lent"
        if self.memory_bytes > limit.memory_bytes:
            return f"{self.memory_bytes} of {limit.memory_bytes} bytes lent"
        devices = {device.index: device for device in limit.gpus}
        for index, milli in self.gpu_milli.items():
            device = devices.get(index)
            if device is None or milli > WHOLE_GPU or self.gpu_memory.get(index, 0) > device.memory_bytes:
                return f"GPU {index}: {milli} of 1000 lent"
        has = dict(limit.custom)
        for name, count in self.custom.items():
            if count > has.get(name, 0):
                return f"{count} of {has.get(name, 0)} {name} lent"
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NodeClaims):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]


def _of_model(ask: Amounts, lends: Capacity) -> tuple[GpuDevice, ...]:
    """The devices that are of a model asked for."""
    if not ask.gpu_models:
        return lends.gpus
    return tuple(device for device in lends.gpus if is_model(device.name, ask.gpu_models))


def shared_though_exclusive(claims: Iterable[Claim], limit: Capacity) -> str | None:
    """The exclusive device of which only a part is claimed, in words, or None."""
    parts = {share.index for claim in claims for share in claim.gpus if share.milli < WHOLE_GPU}
    shared = [device.index for device in limit.gpus if device.exclusive and device.index in parts]
    return f"GPU {shared[0]} lent in parts, though exclusive" if shared else None


def _count(sums: dict[K, int], key: K, amount: int) -> None:
    """Add to a sum, leaving no zero behind (so that equal claims have equal sums)."""
    total = sums.get(key, 0) + amount
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)
