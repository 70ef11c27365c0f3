"""The placement group actor runs on Ray nodes without the package, so it imports nothing of it."""

from __future__ import annotations

import ast
from pathlib import Path

from distributed_grid.adapters.ray import placement_group_actor


def test_the_actor_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(placement_group_actor.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.startswith("distributed_grid")] == []
