"""An engine in memory: places with room, and groups that take it. The contract's example, for tests and simulations."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode
from distributed_grid.errors import Refused, Unreachable
from distributed_grid.ports import EngineGroup, EngineView


class LocalEngine:
    """Reserves at once or refuses at once; `away` makes it one that does not answer."""

    def __init__(self, places: Mapping[str, EngineResources], session: str = "1") -> None:
        self._has = dict(places)
        self._groups: dict[str, EngineGroup] = {}
        self._session = session
        self.away = False
        self.held: tuple[float, Mapping[str, float]] = (0.0, {})
        self.terms: dict[str, float] = {}

    async def reserve(self, group: EngineGroup, *, seconds: float) -> None:
        self._answer()
        if group.name in self._groups:
            return
        has = self._has.get(group.place)
        if has is None:
            raise Refused("the engine has no such node any more")
        free = self._free(group.place)
        if (
            group.cpu_milli > free.cpu_milli
            or group.memory_bytes > free.memory_bytes
            or group.gpu_milli > free.gpu_milli
        ):
            raise Refused("the engine has less than that free there")
        self._groups[group.name] = group
        if group.left_seconds:
            self.terms[group.name] = group.left_seconds

    async def free(self, name: str) -> None:
        self._answer()
        self._groups.pop(name, None)

    async def observe(self, *, full: bool) -> EngineView:
        self._answer()
        nodes = tuple(EngineNode(id=place, name=place, has=room, room=room) for place, room in self._has.items())
        groups = tuple((group.name, group.place) for group in self._groups.values())
        return EngineView(self._session, nodes, groups if full else None)

    async def extend_hold(self, seconds: float, terms: Mapping[str, float]) -> list[str]:
        self._answer()
        self.held = (seconds, dict(terms))
        for name, left in terms.items():
            if name in self._groups:
                self.terms[name] = max(self.terms.get(name, left), left)
        return [name for name in terms if name not in self._groups]

    async def clear(self) -> None:
        self._answer()
        self._groups.clear()

    def restart(self, session: str, places: Mapping[str, EngineResources]) -> None:
        """Forget everything and come back with other places, as a Ray cluster does whose head has died."""
        self._groups.clear()
        self._session, self._has = session, dict(places)

    def _free(self, place: str) -> EngineResources:
        taken = [group for group in self._groups.values() if group.place == place]
        has = self._has[place]
        return replace(
            has,
            cpu_milli=has.cpu_milli - sum(group.cpu_milli for group in taken),
            memory_bytes=has.memory_bytes - sum(group.memory_bytes for group in taken),
            gpu_milli=has.gpu_milli - sum(group.gpu_milli for group in taken),
        )

    def _answer(self) -> None:
        if self.away:
            raise Unreachable("the engine does not answer")
