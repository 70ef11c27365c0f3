"""Any sound configuration, in any of its spellings, shows as something that loads to the same."""

import json
import random
from typing import Any

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.key_aliases import CLUSTER, RESOURCE_SHARING
from distributed_grid.config.kinds.containers import KeyTable, ListOf, MapOf
from distributed_grid.config.kinds.numbers import Amount, Count, Percent, Plain, Ratio, Seconds
from distributed_grid.config.kinds.text import CUSTOM_NAME, JUMPS, LOGIN, NODE_NAME, ChoiceText, Flag, Hidden, HostText
from distributed_grid.config.providers import Providers

NAMES = ["ana", "box-1", "x.y", "n0", "a_b"]
TEXTS = ["a b", "no", "12", "ü: #", "$${x}", "~", "'q'", "{", "*a", "☃"]


def sound(kind: Any, rng: random.Random) -> Any:
    """A value that fits a kind."""
    match kind:
        case KeyTable():
            return a_table(kind, rng)
        case ListOf():
            items = [sound(kind.kind, rng) for _ in range(rng.randrange(3))]
            named = {item["name"] if isinstance(item, dict) and "name" in item else str(item): item for item in items}
            return list(named.values())
        case MapOf():
            return {sound(kind.name, rng): sound(kind.kind, rng) for _ in range(rng.randrange(3))}
        case Flag():
            return rng.random() < 0.5
        case ChoiceText():
            return rng.choice(kind.words)
        case Ratio():
            return rng.random()
        case Percent():
            return round(rng.uniform(2, 100), rng.randrange(4))
        case Count():
            return rng.randint(kind.low, min(kind.high, 2000))
        case Amount() | Plain() | Seconds():
            return round(rng.uniform(2, 5000), rng.randrange(4))
        case Providers():
            return {"docker_local": {"image": "a:${TAG}", "cpu_limit": 2, "memory_limit": "1.5g"}}
        case Hidden():
            return "https://example.org/x"
        case HostText():
            return rng.choice(["local", "10.0.0.1", "box", "fe80::1"])
    if kind == CUSTOM_NAME:
        return rng.choice(["tpu", "fpga"])
    return rng.choice(NAMES if kind in (LOGIN, NODE_NAME, JUMPS) else TEXTS)


def a_table(table: KeyTable, rng: random.Random) -> dict[str, Any]:
    """A mapping with some of a table's keys, each in one of its spellings."""
    tree: dict[str, Any] = {}
    for entry in table.keys:
        spelling = rng.choice(entry.spellings)
        if spelling not in table.required and rng.random() < 0.6:
            continue
        *way, last = spelling.split(".")
        inner = tree
        for part in way:
            inner = inner.setdefault(part, {})
        inner[last] = sound(entry.kind, rng)
    return tree


def survives(tree: dict[str, Any]) -> bool:
    """Whether the values agree with each other; if they do, showing them loses nothing."""
    try:
        config = ClusterConfig.from_text(json.dumps(tree, ensure_ascii=False), env={})
    except ConfigProblems as refused:
        if any("found" in problem.message and "lists" not in problem.message for problem in refused.problems):
            raise
        return False
    shown = json.loads(json.dumps(config.as_dict(), allow_nan=False))
    if config.alerts.webhook is not None:
        assert shown["alerts"].pop("webhook") == "***"
        config = config.model_copy(update={"alerts": config.alerts.model_copy(update={"webhook": None})})
    again = ClusterConfig.from_mapping(shown, env={})
    assert again.model_copy(update={"warnings": config.warnings}) == config
    return True


def test_any_cluster_shows_as_what_loads_to_the_same():
    assert sum(survives(a_table(CLUSTER, random.Random(seed))) for seed in range(600)) > 60


def test_any_two_sharing_sections_come_to_one_that_loads_to_the_same():
    kept = 0
    for seed in range(400):
        rng = random.Random(seed)
        top, inner = a_table(RESOURCE_SHARING, rng), a_table(RESOURCE_SHARING, rng)
        kept += survives({"resource_sharing": top, "execution": {"resource_sharing": inner}})
    assert kept > 60
