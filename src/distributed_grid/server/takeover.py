"""Whether a control plane makes room for its client's: for a newer version, or for another config."""

from __future__ import annotations

import logging

from distributed_grid import __version__
from distributed_grid.api.requests import ClientHello
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import Refused
from distributed_grid.server.config_selection import SelectedConfig
from distributed_grid.server.idle_exit import users_leases

log = logging.getLogger(__name__)


async def hands_over(hello: ClientHello, chosen: SelectedConfig, grid: Grid) -> bool:
    """Whether to make room for whoever says this; Refused with what to type while something is held here."""
    if _numbers(hello.version) > _numbers(__version__):
        log.info("handing over to version %s", hello.version)
        return True
    if hello.config is None or hello.config == chosen.digest:
        return False

    def held(ledger: Ledger, now: int) -> tuple[int, list[str]]:
        wanted = [node.name for node in ledger.nodes.values() if node.wanted and not node.joined]
        return len(users_leases(ledger)), wanted

    busy, served = await grid.read(held)
    using = f"the running control plane uses {chosen.path or 'no config'}"
    if busy:
        raise Refused(
            f"{using} and holds {busy} lease{'' if busy == 1 else 's'}; "
            "wait until they are over, or type: grid daemon stop"
        )
    if served:
        raise Refused(f"{using} and agents run on {', '.join(served)}; first type: grid cluster stop")
    if hello.config_path is not None:
        ClusterConfig.from_yaml(hello.config_path)  # one that cannot be used takes nobody's place
    log.info("handing over to config %s", hello.config_path)
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
