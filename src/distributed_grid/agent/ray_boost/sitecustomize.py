"""Start-up hook of the Python of a job in a boost: once it imports Ray, its tasks go into the placement group.

The `sitecustomize` that this one hides is run, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_GROUP, _NAMESPACE = os.environ.get("GRID_BOOST_GROUP", ""), os.environ.get("RAY_NAMESPACE", "grid")


class _RayImportHook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads Ray as usual, then has its tasks use the boost."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "ray":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("ray")
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        spec = importlib.util.spec_from_file_location("grid_ray_boost", os.path.join(_HERE, "ray_boost.py"))
        assert spec is not None
        assert spec.loader is not None
        boost = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = boost
        spec.loader.exec_module(boost)
        boost.use_placement_group_everywhere(_GROUP, _NAMESPACE)


def _run_hidden_sitecustomize() -> None:
    """Run the `sitecustomize` that ours hides."""
    for folder in sys.path:
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.abspath(folder or ".") != _HERE and os.path.isfile(path):
            with open(path, "rb") as file:
                exec(compile(file.read(), path, "exec"), {"__name__": "sitecustomize", "__file__": path})  # noqa: S102
            return


if _GROUP:
    sys.meta_path.insert(0, _RayImportHook())
_run_hidden_sitecustomize()
