"""How a façade finds its grid: the files of a state directory, and the config it insists on."""

from __future__ import annotations

import os

from distributed_grid.config import ClusterConfig
from distributed_grid.orchestration.client import ClientConfig
from distributed_grid.orchestration.places import Places


def way_to(config: ClusterConfig | None, state_dir: str | os.PathLike[str] | None) -> tuple[Places, ClientConfig]:
    """Where the control plane of this config is reached; without a config it is whichever one runs."""
    places = Places(state_dir)
    path = config.file_for(places.state_dir / "configs") if config is not None else None
    return places, ClientConfig(path, explicit=path is not None)
