"""The order of parallel runs names what is there, and keeps together what shares a grid or a lab."""

from __future__ import annotations

import subprocess

from tests.support.project import PROJECT
from tests.support.run_order import FIRST, INDEPENDENT, RAY_LAB, is_in_process, place_of, scope_of


def test_every_file_that_is_named_is_there_and_is_named_once() -> None:
    assert [name for name in (*FIRST, *INDEPENDENT) if not (PROJECT / name).exists()] == []
    assert len({*FIRST}) == len(FIRST)


def test_a_file_is_in_one_scope_and_so_is_the_ray_lab() -> None:
    assert scope_of("tests/e2e/test_rest.py::test_a") == scope_of("tests/e2e/test_rest.py::Group::test_b[1::2]")
    assert (
        scope_of("tests/lab/ray/test_boosts.py::test_a") == scope_of("tests/lab/ray/test_deaths.py::test_b") == RAY_LAB
    )
    for path in INDEPENDENT:
        assert scope_of(f"{path}::test_a") != scope_of(f"{path}::test_b")


def test_what_is_named_comes_first_and_the_rest_stays_as_it_is() -> None:
    places = [place_of(f"{name}::test_a") for name in FIRST if name != RAY_LAB]
    assert places == sorted(places)
    assert place_of("tests/lab/ray/test_deaths.py::test_a") == 0
    assert place_of("tests/unit/a.py::test_a") == place_of("tests/unit/b.py::test_a") > max(places)


def test_make_test_fast_names_every_unit_and_contract_test_once() -> None:
    dry = subprocess.run(
        ["make", "-n", "test-fast"], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60
    )
    named = [PROJECT / word for word in dry.stdout.split() if word.startswith("tests/")]
    files = [file for path in named for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    wanted = [file for folder in ("unit", "contract") for file in (PROJECT / "tests" / folder).rglob("test_*.py")]
    assert sorted(files) == sorted(wanted)


def test_what_is_not_slow_among_them_is_marked_by_its_path() -> None:
    assert is_in_process("tests/unit/test_wire.py::test_a")
    assert is_in_process("tests/contract/test_stores.py::test_a")
    assert not is_in_process("tests/component/test_a.py::test_a")
