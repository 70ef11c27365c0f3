"""Operations on a node, each a few requests to the script there: inspect, install, stop, purge, install Ray.

The agent's environment is built from wheels in memory. Ray's is too big for that: its wheels are files, packed once
(quickly rather than small) and kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import mmap
import os
import re
import secrets
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node import wheels
from distributed_grid.adapters.node.node_messages import NodeFacts, NodeOperationFailed
from distributed_grid.adapters.node.script_session import ScriptSession
from distributed_grid.adapters.node.wheels import Wheel, python_minor

RAY_BUILD_SECONDS = 900.0
RAY_MISSING = "Ray is not installed here, so there is nothing to send to the nodes; type: make ray"
Result = tuple[NodeFacts, str]
"""What is known of the node afterwards, and what was done."""


class InstalledState(NodeFacts, frozen=True):
    """What `inspect` answers: the facts, and what is there already."""

    versions: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()


class InstallSources:
    """The wheels for each kind of node, gathered once; one at a time, because they share a cache."""

    def __init__(self, cache: Path = Path()) -> None:
        self._lock, self._ray_lock = asyncio.Lock(), asyncio.Lock()
        self._gathered: dict[tuple[str, ...], list[Wheel]] = {}
        self.cache = cache
        self.environ: Mapping[str, str] = {}

    async def agent_wheels(self, facts: NodeFacts) -> list[Wheel]:
        """What an agent on a node like this needs, from this very moment's source."""
        async with self._lock:
            return await asyncio.to_thread(self._agent_wheels, facts)

    def _agent_wheels(self, facts: NodeFacts) -> list[Wheel]:
        signature = wheels.source_signature()
        kind = (signature, *map(str, python_minor(facts)), facts.machine, facts.libc, facts.libc_version)
        if kind not in self._gathered:
            if any(known[0] != signature for known in self._gathered):
                self._gathered.clear()  # of a source that is gone
            self._gathered[kind] = wheels.gather_wheels(facts, self.cache, self.environ)
        return self._gathered[kind]

    async def ray_wheels(self, facts: NodeFacts) -> list[WheelFile]:
        """What Ray on a node like this needs; may take a while the first time."""
        async with self._ray_lock:
            return await asyncio.to_thread(gather_ray_wheels, facts, self.cache / "ray", self.environ)


async def inspect(session: ScriptSession) -> InstalledState:
    """What is on a node."""
    return msgspec.convert(await session.ask("inspect"), InstalledState)


async def install(session: ScriptSession, sources: InstallSources, say: Say) -> Result:
    """Have this version of the package on a node, and no agent of another."""
    say("inspecting the node")
    seen = await inspect(session)
    needed = await sources.agent_wheels(seen)
    version = wheels.version_name(needed, seen)
    summary = f"{version} was there already"
    if version not in seen.versions or seen.version != version:
        missing = [wheel for wheel in needed if wheel.sha256 not in seen.wheels]
        if missing:
            say(f"sending {len(missing)} of {len(needed)} wheels")
        entries = [_entry(wheel.name, wheel.sha256, len(wheel.data), sent=wheel in missing) for wheel in needed]
        await session.ask("build", say=say, blobs=[wheel.data for wheel in missing], version=version, wheels=entries)
        summary = f"installed {version} with Python {seen.python}"
    if seen.running and seen.running != version:
        say("ending the agent of another version")
        await session.ask("retire")
        summary += ", the agent of another version was ended"
    return facts_of(seen, version=version), summary


async def stop(session: ScriptSession, say: Say) -> Result:
    """Leave no process and no socket on a node."""
    seen = await inspect(session)
    answer = await session.ask("stop", say=say)
    return facts_of(seen, running=""), "stopped" if answer["stopped"] else "nothing ran there"


async def purge(session: ScriptSession, say: Say) -> Result:
    """Leave nothing of this grid on a node, and nothing of what only it used."""
    facts, summary = await stop(session, say)
    say("removing what was installed")
    await session.ask("purge")
    return facts_of(facts, version=""), f"{summary}, removed"


def facts_of(seen: NodeFacts, **changes: str) -> NodeFacts:
    """Only the facts of what was seen, some of them changed since."""
    known = {name: getattr(seen, name) for name in NodeFacts.__struct_fields__}
    return NodeFacts(**{**known, **changes})


def _entry(name: str, sha256: str, size: int, *, sent: bool) -> dict[str, Any]:
    return {"name": name, "sha256": sha256, "size": size, "sent": sent}


# ---------------------------------------------------------------- Ray


class WheelFile(Struct, frozen=True):
    """A wheel on the disk, and what names its content."""

    path: Path
    sha256: str
    size: int


async def install_ray(session: ScriptSession, sources: InstallSources, say: Say) -> str:
    """Have this environment's version of Ray on a node, in an environment of its own; what was done."""
    say("inspecting the node")
    seen = await inspect(session)
    say("packing Ray")
    files = await sources.ray_wheels(seen)
    version = f"ray-{own_ray_version()}-{wheels.environment_digest((file.sha256 for file in files), seen)}"
    if version in seen.versions and (await session.ask("ray-installed"))["version"] == version:
        return f"{version} was there already"
    missing = [file for file in files if file.sha256 not in seen.wheels]
    request = {
        "version": version,
        "wheels": [_entry(file.path.name, file.sha256, file.size, sent=file in missing) for file in files],
        "bytes": sum(file.size for file in files),
    }
    paths = [file.path for file in missing]
    await session.ask_with_files("ray-build", paths, say=say, seconds=RAY_BUILD_SECONDS, request=request)
    return f"installed {version} with Python {seen.python}"


def own_ray_version() -> str:
    """The version of Ray that this environment has; raises NodeOperationFailed with what to type where it has none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise NodeOperationFailed(RAY_MISSING) from None


def gather_ray_wheels(facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> list[WheelFile]:
    """Every wheel that Ray on such a node needs; may download, and then keeps what it got in `cache`."""
    own_ray_version()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [_ray_wheel(name, facts, cache, environ) for name in ray_requirements(facts)]


def ray_requirements(facts: NodeFacts) -> list[str]:
    """Ray with its dashboard, and what that stands on, as this environment has it and the node's Python asks for."""
    python = "{}.{}".format(*python_minor(facts))
    environment = {"python_version": python, "python_full_version": facts.python, "platform_machine": facts.machine}
    found: dict[str, set[str]] = {}
    ahead = [("ray", frozenset({"", "default"}))]
    while ahead:
        name, extras = ahead.pop()
        fresh = extras - found.setdefault(name, set())
        if not fresh:
            continue
        found[name] |= fresh
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            raise NodeOperationFailed(f"{name}, which Ray needs, is not installed here; type: make ray") from None
        for text in requirements:
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({**environment, "extra": extra}) for extra in fresh):
                ahead.append((canonicalize_name(one.name), frozenset({"", *one.extras})))
    return sorted(found)


def _ray_wheel(name: str, facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> WheelFile:
    found = wheels.find_distribution(name)
    tag = wheels.compatible_tag(found, facts)
    path = _repack_to_file(found, tag, cache) if tag else None
    if path is None:
        kept = wheels.find_cached(name, found.version, facts, cache)
        path = cache / (kept or wheels.download(name, found.version, facts, cache, environ)).name
    return _describe(str(path), path.stat().st_mtime_ns)


def _repack_to_file(found: metadata.Distribution, tag: str, cache: Path) -> Path | None:
    """An installed package as a wheel in a file; None where some of it is gone."""
    name = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    path = cache / f"{name}-{found.version}-{tag}.whl"
    if path.exists():
        return path
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(fresh, "w") as archive:
            for entry in sorted(filter(wheels.belongs_in_wheel, found.files or ()), key=str):
                _add_file(archive, str(entry), Path(str(entry.locate())))
        fresh.replace(path)
    except OSError:
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return path


def _add_file(archive: zipfile.ZipFile, name: str, source: Path) -> None:
    """One file; of its mode only whether it can be run is kept."""
    entry = zipfile.ZipInfo(name, wheels.ZIP_EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o755 if os.access(source, os.X_OK) else 0o644) << 16
    with source.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            archive.writestr(entry, b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            archive.writestr(entry, content, compresslevel=1)


@functools.lru_cache(maxsize=1000)
def _describe(path: str, changed_ns: int) -> WheelFile:
    """A file with its digest; `changed_ns` makes it another one when it changes."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return WheelFile(Path(path), digest, os.path.getsize(path))
