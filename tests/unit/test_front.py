from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distributed_grid

PROGRAM = """
import json, sys
before = set(sys.modules)
import distributed_grid as grid
names = dir(grid)
print(json.dumps([sorted(set(sys.modules) - before), names]))
"""


def test_import_loads_nothing_but_the_package_itself() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded, names = json.loads(done.stdout)
    assert loaded == ["distributed_grid"]
    assert {"run", "submit", "borrow", "status", "pool", "aio", "errors"} <= set(names)


def test_every_public_name_is_there() -> None:
    for name in distributed_grid.__all__:
        assert getattr(distributed_grid, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        _ = distributed_grid.walk  # type: ignore[attr-defined]


def test_aio_has_the_names_of_the_front() -> None:
    from distributed_grid import aio, front

    functions = {"borrow", "pool", "run", "status", "submit"}
    assert functions <= set(front.__all__) & set(aio.__all__)


def test_the_stub_of_the_package_has_its_names() -> None:
    stub = Path(distributed_grid.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r"import \w+ as (\w+)$", stub, re.MULTILINE)) == set(distributed_grid.__all__)
