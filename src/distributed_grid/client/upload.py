"""Taking the caller's directory along, for a job that may run on another machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed_grid.errors import BadInput
from distributed_grid.state_dir import StateDir

NONE = "none"


@dataclass(frozen=True, slots=True)
class Shipment:
    """What a submission says about directories: what is shipped, and on which nodes alone the job may run then."""

    workdir: str = ""
    require: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def ship(
    workdir: str | None,
    places: StateDir,
    *,
    nodes: Sequence[str],
    far: Collection[str],
    require: Sequence[str] = (),
    isolated: bool = False,
    here: str | None = None,
) -> Shipment:
    """Put what the job needs of a directory where agents can fetch it, if it may run on another machine at all.

    None is the directory `here`, or the current one, if it is small enough; where it is not, the job stays on this
    machine, or is refused where that is impossible.
    """
    make_sure_of(workdir)
    allowed = require or nodes
    if workdir == NONE or not any(name in far for name in allowed) or (isolated and workdir is None):
        return Shipment(require=tuple(require))
    near = tuple(name for name in allowed if name not in far)
    try:
        return _taken(workdir or here or os.getcwd(), places, require)
    except BadInput as problem:
        if workdir is not None or not near:
            raise
        return Shipment("", near, (f"this job stays on this machine: {problem}",))
    except FileNotFoundError:
        raise BadInput("the current directory does not exist any more; use --workdir none") from None


def make_sure_of(workdir: str | None) -> None:
    """Refuse a directory that was named and is not there, whether or not it would be shipped."""
    if workdir is not None and workdir != NONE and not os.path.isdir(workdir):
        raise BadInput(f"--workdir {workdir}: there is no such directory")


def _taken(directory: str, places: StateDir, require: Sequence[str]) -> Shipment:
    from distributed_grid.adapters import workdir  # only where something is shipped

    store = workdir.ContentStore(content_store(places))
    taken = workdir.scan(directory, store, own=(places.state_dir,))
    digest = store.keep(workdir.encode(taken.manifest))
    notes = tuple(f"{workdir.shown(one.path)} is not shipped: {one.why}" for one in taken.skipped[:5])
    return Shipment(digest, tuple(require), notes)


def content_store(places: StateDir) -> Path:
    """Where what is shipped waits to be fetched."""
    places.make()
    return places.host_dir / "content"
