"""Whether a link stays inside its tree, decided from names alone.

Following the names of one link is not enough: `a/b/c/up -> ../../../x` stays inside, and so, read by itself, does
`a/b/c/out -> up/../..`; together they lead above the top. So links of the tree are followed as the kernel would.
"""

from collections import deque
from collections.abc import Mapping

from distributed_grid.adapters.files.descent import MAX_HOPS


def leads_out(path: bytes, links: Mapping[bytes, bytes]) -> bool:
    """Whether following the link at `path` goes above the top. `links` are all links of the tree, path to target.

    What goes in circles leads nowhere, and so not out: the kernel gives up after as many links.
    """
    here: list[bytes] = []
    ahead = deque(path.split(b"/"))
    hops = 0
    while ahead:
        name = ahead.popleft()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if not here:
                return True
            here.pop()
            continue
        here.append(name)
        target = links.get(b"/".join(here))
        if target is None:
            continue
        if target.startswith(b"/"):
            return True
        hops += 1
        if hops > MAX_HOPS:
            return False
        here.pop()
        ahead.extendleft(reversed(target.split(b"/")))
    return False
