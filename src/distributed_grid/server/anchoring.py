"""The anchor of the grid's clock on disk, so that the next control plane goes on with the same time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from distributed_grid.adapters.clock import Anchor
from distributed_grid.orchestration.places import Places


def load_anchor(places: Places) -> Anchor | None:
    """What was saved last; None where there is nothing, or nothing that makes sense."""
    try:
        return msgspec.json.decode(_note(places).read_bytes(), type=Anchor)
    except (OSError, msgspec.DecodeError):
        return None


def save_anchor(places: Places, anchor: Anchor) -> None:
    """Keep it, whole or not at all; a full disk leaves the one before."""
    fresh = _note(places).with_suffix(".new")
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.encode(anchor))
        fresh.replace(_note(places))


def _note(places: Places) -> Path:
    return places.host_dir / "clock.json"
