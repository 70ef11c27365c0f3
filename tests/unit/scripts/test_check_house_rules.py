"""`scripts/check_house_rules.py`: problems of files that break a rule, and none for the others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_house_rules.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_house_rules", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_module_of_a_pure_package_needs_a_file_of_tests_of_its_name(script: ModuleType) -> None:
    module, test = (
        "src/distributed_grid/scheduling/queue/backfill.py",
        "tests/unit/scheduling/queue/test_backfill.py",
    )
    assert list(script.untested_modules([module])) == [f"{module}: has no tests in {test}"]
    assert list(script.untested_modules([module, test])) == []
    assert list(script.untested_modules([module, "tests/unit/scheduling/test_backfill.py"])) != []


@pytest.mark.parametrize(
    "path",
    [
        "src/distributed_grid/domain/events.py",
        "src/distributed_grid/domain/__init__.py",
        "src/distributed_grid/scheduling/README.md",
        "src/distributed_grid/server/daemon.py",
        "src/distributed_grid/wire.py",
        "bench/domain/events.py",
    ],
)
def test_types_and_other_packages_need_none(script: ModuleType, path: str) -> None:
    assert list(script.untested_modules([path])) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("try:\n    x()\nexcept Exception:\n    pass\n", [3]),
        ("try:\n    x()\nexcept Exception:  # whatever a plugin raises\n    pass\n", []),
        ("try:\n    x()\nexcept (ValueError, BaseException):\n    y()\n    raise\n", []),
        ("try:\n    x()\nexcept ValueError:\n    pass\n", []),
        ("with contextlib.suppress(Exception):\n    x()\n", [1]),
    ],
)
def test_who_catches_everything_says_why_or_raises_it_again(script: ModuleType, text: str, lines: list[int]) -> None:
    assert [number for number, _ in script.unexplained_catches(text)] == lines


def test_a_lock_file_holds_no_address(script: ModuleType) -> None:
    sound = "msgspec==0.19.0 \\\n    --hash=sha256:abc\n"
    assert list(script.wrong_lines("requirements.lock", sound)) == []
    assert [number for number, _ in script.wrong_lines("requirements.lock", f"# made by hand\n{sound}")] == [1]


def test_docstrings_that_hinge_on_what_are_at_most_one_in_a_hundred(script: ModuleType) -> None:
    good = [("a.py", number, "Lines that break a rule.") for number in range(99)]
    headless = ("b.py", 7, "What is left of a lease.")
    assert list(script.headless_docstrings([*good, headless])) == []
    assert list(script.headless_docstrings([*good[1:], headless])) == [
        'b.py:7: its docstring hinges on a "what …" without a noun'
    ]


def test_docstrings_come_from_modules_classes_and_functions_with_their_lines(script: ModuleType) -> None:
    text = '"""A module."""\n\nclass A:\n    """A class."""\n\n    async def run(self):\n        """A method."""\n'
    assert list(script.docstrings_of(text)) == [(1, "A module."), (3, "A class."), (6, "A method.")]
    assert list(script.docstrings_of("x = 1\n")) == []


@pytest.mark.parametrize(
    ("docstring", "is_headless"),
    [
        ("What is left.", True),
        ("Frees a lease: what it lent is free.", True),
        ("Says what to type.", False),
        ("The reason of a refusal.", False),
    ],
)
def test_a_what_at_the_head_of_a_clause_is_headless(script: ModuleType, docstring: str, is_headless: bool) -> None:
    assert bool(script.HEADLESS.search(docstring)) is is_headless
