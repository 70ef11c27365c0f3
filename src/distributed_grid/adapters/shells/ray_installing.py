"""Ray on a node, as the grid installs it: an environment of its own beside the agent's, built from wheels."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_grid.adapters.shells.installing import look
from distributed_grid.adapters.shells.ray_wheels import WheelFile, gather_ray, version_of_ray
from distributed_grid.adapters.shells.remote import Say, Session

BUILD_SECONDS = 900.0
_gathering = asyncio.Lock()


async def install_ray(session: Session, cache: Path, environ: Mapping[str, str], say: Say) -> dict[str, Any]:
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
