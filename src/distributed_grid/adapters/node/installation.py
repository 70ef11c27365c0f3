"""The deeds on a node, each a short conversation with the script there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.node.script_session import Say, ScriptSession
from distributed_grid.adapters.node.wheel_tags import minor_of
from distributed_grid.adapters.node.wheels import Wheel, gather, signature, version_of


class InstalledState(NodeFacts, frozen=True):
    """What `look` answers: the facts, and what is there already."""

    versions: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()


class InstallSources:
    """The wheels for each kind of node, gathered once; one at a time, because they share a cache."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._gathered: dict[tuple[str, ...], list[Wheel]] = {}
        self.cache = Path()
        self.environ: Mapping[str, str] = {}

    async def for_node(self, facts: NodeFacts) -> list[Wheel]:
        """What a node like this needs, from this very moment's source."""
        async with self._lock:
            return await asyncio.to_thread(self._for_kind, facts)

    def _for_kind(self, facts: NodeFacts) -> list[Wheel]:
        kind = (signature(), *map(str, minor_of(facts)), facts.machine, facts.libc, facts.libc_version)
        if kind not in self._gathered:
            if any(known[0] != kind[0] for known in self._gathered):
                self._gathered.clear()  # of a source that is gone
            self._gathered[kind] = gather(facts, self.cache, self.environ)
        return self._gathered[kind]


async def look(session: ScriptSession) -> InstalledState:
    """What is on a node."""
    return msgspec.convert(await session.ask("look"), InstalledState)


async def install(session: ScriptSession, supplies: InstallSources, say: Say) -> tuple[NodeFacts, str]:
    """Have this version of the package on a node, and no agent of another; the facts, and what was done."""
    say("looking at the node")
    seen = await look(session)
    wheels = await supplies.for_node(seen)
    version = version_of(wheels, seen)
    words = f"{version} was there already"
    if version not in seen.versions or seen.version != version:
        missing = [wheel for wheel in wheels if wheel.sha256 not in seen.wheels]
        if missing:
            say(f"sending {len(missing)} of {len(wheels)} wheels")
        await session.ask("build", say=say, blobs=[w.data for w in missing], **_order(version, wheels, missing))
        words = f"installed {version} with Python {seen.python}"
    if seen.running and seen.running != version:
        say("ending the agent of another version")
        await session.ask("retire")
        words += ", the agent of another version was ended"
    return facts_of(seen, version=version), words


def _order(version: str, wheels: list[Wheel], missing: list[Wheel]) -> dict[str, Any]:
    return {
        "version": version,
        "wheels": [
            {"name": wheel.name, "sha256": wheel.sha256, "size": len(wheel.data), "sent": wheel in missing}
            for wheel in wheels
        ],
    }


async def end(session: ScriptSession, say: Say) -> tuple[NodeFacts, str]:
    """Leave no process and no socket on a node."""
    seen = await look(session)
    answer = await session.ask("end", say=say)
    return facts_of(seen, running=""), "stopped" if answer["ended"] else "nothing ran there"


async def purge(session: ScriptSession, say: Say) -> tuple[NodeFacts, str]:
    """Leave nothing of this grid on a node, and nothing of what only it used."""
    facts, words = await end(session, say)
    say("removing what was installed")
    await session.ask("purge")
    return facts_of(facts, version=""), f"{words}, removed"


def facts_of(seen: NodeFacts, **changes: str) -> NodeFacts:
    """Only the facts of what was seen, some of them changed since."""
    known = {name: getattr(seen, name) for name in NodeFacts.__struct_fields__}
    return NodeFacts(**{**known, **changes})
