"""Which wheels fit a node: the tags of a wheel against the node's Python, machine and C library."""

from __future__ import annotations

import re

from distributed_grid.adapters.node.messages import NodeFacts

_OLD_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_PLATFORM = re.compile(r"(?:(manylinux1|manylinux2010|manylinux2014)|(manylinux|musllinux)_(\d+)_(\d+)|linux)_(\w+)")


def fits(tag: str, facts: NodeFacts) -> bool:
    """Whether a wheel with this tag (`cp311-cp311-manylinux_2_17_x86_64`) works on a node."""
    python, abi, platforms = tag.split("-")
    return _python_fits(python, abi, facts) and any(_platform_fits(one, facts) for one in platforms.split("."))


def minor_of(facts: NodeFacts) -> tuple[int, int]:
    major, minor = facts.python.split(".")[:2]
    return int(major), int(minor)


def _python_fits(pythons: str, abi: str, facts: NodeFacts) -> bool:
    """A pure wheel, one of the stable interface made for this Python or an older one, or one made for exactly it."""
    mine = minor_of(facts)
    for name in pythons.split("."):
        made_for = re.fullmatch(r"(py|cp)(\d)(\d*)", name)
        if made_for is None or int(made_for[2]) != mine[0]:
            continue
        minor = int(made_for[3]) if made_for[3] else None
        if abi in ("none", "abi3") and (minor is None or minor <= mine[1]):
            return True
        if name == abi == f"cp{mine[0]}{mine[1]}":
            return True
    return False


def _platform_fits(platform: str, facts: NodeFacts) -> bool:
    if platform == "any":
        return True
    found = _PLATFORM.fullmatch(platform)
    if found is None or found[5] != facts.machine:
        return False
    libc = "musl" if found[2] == "musllinux" else "glibc"
    needed = _OLD_NAMES[found[1]] if found[1] else (int(found[3] or 0), int(found[4] or 0))
    return facts.libc == libc and needed <= libc_version(facts)


def libc_version(facts: NodeFacts) -> tuple[int, int]:
    """The version of the node's C library; none where it is not known."""
    found = re.match(r"(\d+)\.(\d+)", facts.libc_version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def platforms_of(facts: NodeFacts) -> list[str]:
    """The platforms a node takes wheels for, newest first, as package indexes name them."""
    if facts.libc != "glibc":
        return [f"musllinux_1_{minor}_{facts.machine}" for minor in (2, 1, 0)]
    names = [f"manylinux_2_{minor}_{facts.machine}" for minor in range(libc_version(facts)[1], 4, -1)]
    old = [f"{name}_{facts.machine}" for name, needed in _OLD_NAMES.items() if needed <= libc_version(facts)]
    return names + old[::-1]
