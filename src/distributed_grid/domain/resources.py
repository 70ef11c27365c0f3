"""Amounts of resources in integer base units: millicores, bytes, milli-GPUs, counts.

Floats (cores, GB, percent) exist only at the border. Custom resources are a sorted tuple of (name, count) with positive
counts. A GPU request below 1000 is part of one shared device, from 1000 on it is whole devices.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct

from distributed_grid.errors import BadInput
from distributed_grid.number_text import counted, size_text

WHOLE_GPU = 1000
MAX_AMOUNT = 2**50
"""Amounts above this are refused, so that sums over thousands of nodes stay far from the edge of 64 bits."""


class ResourceType(enum.StrEnum):
    """Built-in resources; declared custom names are plain strings beside these."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"

    @classmethod
    def _missing_(cls, value: object) -> ResourceType | None:
        folded = str(value).lower()
        return next((kind for kind in cls if kind.value == folded), None)


class Priority(enum.IntEnum):
    LOW = 0
    MEDIUM = 1
    NORMAL = 1
    HIGH = 2
    URGENT = 3
    CRITICAL = 3

    @classmethod
    def parse(cls, word: str | int | Priority) -> Priority:
        """The priority of this name, in any case; `normal` is medium, `critical` is urgent."""
        if isinstance(word, int):
            return cls(word)
        try:
            return cls[word.strip().upper()]
        except KeyError:
            raise BadInput(f"no priority {word!r}: use low, medium (normal), high or urgent (critical)") from None


class Amounts(Struct, frozen=True, omit_defaults=True, gc=False):
    """Requested resources."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0
    gpu_memory_bytes: int = 0
    custom: tuple[tuple[str, int], ...] = ()
    gpu_models: tuple[str, ...] = ()  # a GPU's name must contain one of them

    def problem(self) -> str | None:
        """Why nobody can ask for this, or None."""
        numbers = [self.cpu_milli, self.memory_bytes, self.gpu_milli, self.gpu_memory_bytes]
        numbers += [count for _, count in self.custom]
        if min(numbers) < 0:
            return "amounts must not be negative"
        if max(numbers) > MAX_AMOUNT:
            return "the amount is larger than any machine"
        if not (self.cpu_milli or self.memory_bytes or self.gpu_milli or self.custom):
            return "nothing is asked for: the amount must be more than zero"
        if self.gpu_memory_bytes and not self.gpu_milli:
            return "GPU memory can only be asked for together with a GPU"
        if self.gpu_models and not self.gpu_milli:
            return "a GPU model can only be asked for together with a GPU"
        if self.gpu_milli > WHOLE_GPU and self.gpu_milli % WHOLE_GPU:
            return "more than one GPU can only be asked for in whole devices"
        if self.custom and not all(count for _, count in self.custom):
            return "the amount must be more than zero"
        if self.custom and len(dict(self.custom)) < len(self.custom):
            return "a resource is asked for twice"
        return None


class GpuDevice(Struct, frozen=True):
    """One GPU of a node; an exclusive one is only lent whole."""

    index: int
    memory_bytes: int = 0
    name: str = ""
    exclusive: bool = False


class GpuShare(Struct, frozen=True):
    """The part of one device that a claim holds; 1000 milli is the whole device."""

    index: int
    milli: int
    memory_bytes: int = 0


class Claim(Struct, frozen=True, omit_defaults=True, gc=False):
    """Exact resources that a lease holds on its node."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpus: tuple[GpuShare, ...] = ()
    custom: tuple[tuple[str, int], ...] = ()


class Capacity(Struct, frozen=True):
    """Resources that a node has, or lends at most."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpus: tuple[GpuDevice, ...] = ()
    custom: tuple[tuple[str, int], ...] = ()


NOTHING = Capacity()


def is_model(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a GPU's name is one of the wanted models: "a100" is "NVIDIA A100-SXM4-40GB"."""
    folded = name.casefold()
    return any(word.casefold() in folded for word in wanted)


def normalized_custom(custom: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Custom resources in their one form: sorted, without zeros."""
    return tuple(sorted((name, count) for name, count in custom.items() if count))


GB = 1024**3


def cores(milli: int) -> str:
    return counted(milli / 1000, "core")


def gigabytes(size: int) -> str:
    return size_text(size)


def gpus(milli: int) -> str:
    return counted(milli / 1000, "GPU")
