"""The pressure score, where monitoring looks for it; `domain/pressure.py` has the formula, since placing needs it."""

from __future__ import annotations

from distributed_grid.domain.pressure import cpu_part, gpu_part, memory_part, pressure

__all__ = ["cpu_part", "gpu_part", "memory_part", "pressure"]
