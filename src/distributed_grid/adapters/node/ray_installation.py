"""Ray and all it needs as wheels, in this environment's own versions: files, because they are too big for memory.

Rule 1: what is installed here is packed again where it fits the node, once, and kept; quickly rather than small.
Rule 2: what does not fit is downloaded here, never on the node, and kept.

Ray on a node, as the grid installs it: an environment of its own beside the agent's, built from wheels.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import secrets
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.node import wheels
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.installation import look
from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.node.script_session import FileScriptSession, Say
from distributed_grid.adapters.node.wheel_tags import minor_of
from distributed_grid.adapters.node.wheels import Wheel, downloaded, fitting_tag, is_packed

CHUNK = 1 << 20
TO_INSTALL = "Ray is not installed here, so there is nothing to send to the nodes; type: make ray"


class WheelFile(Struct, frozen=True):
    """A wheel on the disk, and what names its content."""

    path: Path
    sha256: str
    size: int


def ray_version() -> str:
    """The version of Ray that this environment has; Failed with what to type where it has none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise NodeOperationFailed(TO_INSTALL) from None


def gather_ray(facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> list[WheelFile]:
    """Every wheel that Ray on such a node needs; may take a while the first time."""
    ray_version()
    folder = cache / "ray"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [_wheel_of(name, facts, folder, environ) for name in needed(facts)]


def needed(facts: NodeFacts) -> list[str]:
    """Ray with its dashboard, and what that stands on, as this environment has it and the node's Python asks for."""
    from packaging.requirements import Requirement

    python = "{}.{}".format(*minor_of(facts))
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
                ahead.append((re.sub(r"[-_.]+", "-", one.name).lower(), frozenset({"", *one.extras})))
    return sorted(found)


def version_of_ray(files: list[WheelFile], facts: NodeFacts) -> str:
    """The name of Ray's environment on a node: another content, Python or machine is another one."""
    digest = hashlib.sha256("\n".join(sorted(file.sha256 for file in files)).encode())
    digest.update(f"\n{minor_of(facts)}\n{facts.machine}\n{facts.executable}".encode())
    return f"ray-{ray_version()}-{digest.hexdigest()[:12]}"


def _wheel_of(name: str, facts: NodeFacts, folder: Path, environ: Mapping[str, str]) -> WheelFile:
    found = wheels.installed(name)
    tag = fitting_tag(found, facts)
    path = _packed_again(found, tag, folder) if tag else None
    if path is None:
        kept = wheels.cached(name, found.version, facts, folder)
        wheel: Wheel = kept or downloaded(name, found.version, facts, folder, environ)
        path = folder / wheel.name
    return _described(str(path), path.stat().st_mtime_ns)


def _packed_again(installed: metadata.Distribution, tag: str, folder: Path) -> Path | None:
    """An installed package as a wheel in a file; None where some of it is gone."""
    name = re.sub(r"[-_.]+", "_", installed.metadata["Name"])
    path = folder / f"{name}-{installed.version}-{tag}.whl"
    if path.exists():
        return path
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for entry in sorted(filter(is_packed, installed.files or ()), key=str):
                _add(archive, str(entry), Path(str(entry.locate())))
        fresh.replace(path)
    except OSError:
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return path


def _add(archive: zipfile.ZipFile, name: str, source: Path) -> None:
    """One file; of its mode only whether it can be run is kept."""
    entry = zipfile.ZipInfo(name, wheels.OLDEST_ZIP)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o755 if os.access(source, os.X_OK) else 0o644) << 16
    with source.open("rb") as file, archive.open(entry, "w", force_zip64=True) as packed:
        while chunk := file.read(CHUNK):
            packed.write(chunk)


@functools.lru_cache(maxsize=1000)
def _described(path: str, changed_ns: int) -> WheelFile:
    """A file with its digest; `changed_ns` makes it another one when it changes."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return WheelFile(Path(path), digest, os.path.getsize(path))


BUILD_SECONDS = 900.0
_gathering = asyncio.Lock()


async def install_ray(session: FileScriptSession, cache: Path, environ: Mapping[str, str], say: Say) -> dict[str, Any]:
    """Have this environment's version of Ray on a node; what was done, in words."""
    say("looking at the node")
    seen = await look(session)
    say("packing Ray")
    async with _gathering:  # nodes of the same kind need the same files
        files = await asyncio.to_thread(gather_ray, seen, cache, environ)
    version = version_of_ray(files, seen)
    if version in seen.versions and (await session.ask("ray-installed"))["version"] == version:
        return {"words": f"{version} was there already"}
    missing = [file for file in files if file.sha256 not in seen.wheels]
    order = {
        "version": version,
        "wheels": [_entry(file, sent=file in missing) for file in files],
        "bytes": sum(file.size for file in files),
    }
    await session.ask_with_files(
        "ray-build", [file.path for file in missing], say=say, seconds=BUILD_SECONDS, request=order
    )
    return {"words": f"installed {version} with Python {seen.python}"}


def _entry(file: WheelFile, *, sent: bool) -> dict[str, Any]:
    return {"name": file.path.name, "sha256": file.sha256, "size": file.size, "sent": sent}
