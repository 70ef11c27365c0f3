"""Which config the control plane uses: the one it was given, unless work goes on under another one."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from pathlib import Path
from typing import Any

from distributed_grid.client.client import file_digest
from distributed_grid.config import ClusterConfig
from distributed_grid.ports import Store
from distributed_grid.state_dir import StateDir

log = logging.getLogger(__name__)


class SelectedConfig:
    """A loaded config and where it came from."""

    def __init__(self, config: ClusterConfig, path: str | None) -> None:
        self.config = config
        self.path = path
        self.digest = file_digest(path) if path else None


def choose_config(path: str | None, explicit: bool, store: Store, places: StateDir) -> SelectedConfig:
    """The config named by the user; else the one that work still goes on under; else the one that was found."""
    if not explicit and any(row.kind in ("lease", "job") for row in store.load().live):
        last = _last(places)
        if last != path:
            log.info("work goes on: using the config of before, %s", last)
        path = last
    return SelectedConfig(_load(path), path)


def _load(path: str | None) -> ClusterConfig:
    return ClusterConfig.from_yaml(path) if path else ClusterConfig.embedded(socket.gethostname())


def remember(chosen: SelectedConfig, places: StateDir, *, stay: bool) -> None:
    """Note the config, and whether to stay, for a control plane that has to go on in this one's place."""
    fresh = _note(places).with_suffix(".new")  # whole or not at all: a full disk must not empty the note
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps({"config": chosen.path, "stay": stay}))
        fresh.replace(_note(places))


def was_to_stay(places: StateDir) -> bool:
    """Whether the last control plane was to stay, and nobody has stopped it since."""
    return bool(_read(places).get("stay"))


def _last(places: StateDir) -> str | None:
    found = _read(places).get("config")
    return str(found) if found else None


def _read(places: StateDir) -> dict[str, Any]:
    try:
        found = json.loads(_note(places).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(places: StateDir) -> Path:
    return places.host_dir / "config.json"
