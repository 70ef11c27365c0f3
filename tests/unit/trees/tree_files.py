"""Small trees on the disk, as values: written, read back, drawn at random."""

import os
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

Tree = dict[str, "bytes | str | None"]  # a file's content, a link's target, None for a directory


def write_tree(root: Path, tree: Mapping[str, bytes | str | None]) -> Path:
    """Make the tree below `root`, parents included."""
    root.mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            target.mkdir(exist_ok=True)
        elif isinstance(content, str):
            target.symlink_to(content)
        else:
            target.write_bytes(content)
    return root


def read_tree(root: Path) -> Tree:
    """Everything below `root`; links are not followed."""
    found: Tree = {}
    for folder, directories, files in os.walk(root):
        for name in [*directories, *files]:
            target = Path(folder) / name
            path = str(target.relative_to(root))
            if target.is_symlink():
                found[path] = os.readlink(target)
            else:
                found[path] = None if target.is_dir() else target.read_bytes()
    return found


NAMES = st.sampled_from(["a", "b", "c.txt", "build", "x y", "é", "caf\udce9", "-", "[z]", "#n", "!n", ".hidden"])


@st.composite
def trees(draw: st.DrawFn, *, links: bool = True) -> Tree:
    """A tree in which no link leads out: links point at a name beside them, there or not."""
    kinds = ["file", "dir", "link"] if links else ["file", "dir"]
    drawn = draw(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.sampled_from(kinds)), max_size=12))
    tree: Tree = {}
    for names, kind in drawn:
        parents = ["/".join(names[:depth]) for depth in range(1, len(names))]
        path = "/".join(names)
        if path in tree or any(tree.get(parent, None) is not None for parent in parents):
            continue
        tree.update(dict.fromkeys(parents))
        content = draw(st.binary(max_size=40))
        tree[path] = content if kind == "file" else draw(NAMES) if kind == "link" else None
    return tree
