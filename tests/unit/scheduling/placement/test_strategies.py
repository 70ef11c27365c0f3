"""One workload by every strategy: the table of `docs/guide/scheduling.md` is what the reactor decides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from distributed_grid.domain.nodes import Node
from distributed_grid.domain.scheduling_policy import Strategy
from tests.support.builders import Scenario, a_node, a_request, caps

PAGE = Path(__file__).parents[4] / "docs" / "guide" / "scheduling.md"
STRATEGIES = [one for one in Strategy if one is not Strategy.NODE_SPECIFIC]


def the_nodes() -> list[Node]:
    """The nodes of the shipped cluster files, but that one is faster than usual and costs money."""
    head = a_node("gpu-master", cores=16, memory_gb=30, gpus=1, rank=1000, caps=caps(cores=4, memory_gb=16, gpus=0))
    fast = a_node("gpu1", cores=8, memory_gb=15, gpus=1, rank=2000, caps=caps(cores=6, memory_gb=12))
    large = a_node("gpu2", cores=16, memory_gb=31, gpus=2, rank=3000, caps=caps(cores=14, memory_gb=28))
    return [replace(head, role="head"), replace(fast, speed_milli=1500, cost_milli=500), large]


def placements(strategy: Strategy) -> list[str]:
    """Where nine jobs go: 2 cores each, and every third of them half a GPU, too."""
    scenario = Scenario(*the_nodes())
    asked = (a_request(f"r{n}", cores=2, gpus=0.5 if n % 3 == 2 else 0, strategy=strategy, wait_s=0) for n in range(9))
    return [scenario.ask(request).node or "-" for request in asked]


def row(strategy: Strategy) -> str:
    places = placements(strategy)
    count = Counter(places)
    totals = " | ".join(str(count[node.name]) for node in the_nodes())
    return f"| `{strategy}` | {' '.join(_short(place) for place in places)} | {totals} |"


def _short(node: str) -> str:
    return {"gpu-master": "m", "gpu1": "1", "gpu2": "2"}.get(node, node)


def test_the_table_of_the_page_is_what_the_reactor_decides():
    wanted = [row(strategy) for strategy in STRATEGIES]
    found = [line for line in PAGE.read_text().splitlines() if line in wanted]
    assert found == wanted, "docs/guide/scheduling.md must have:\n" + "\n".join(wanted)
