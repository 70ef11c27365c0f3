"""Fail when a file of the project holds what must not be in it.

Rule 1. A lock file has names, versions and hashes: no addresses, no comments.
Rule 2. No file names a package registry's host; where packages come from is the business of the machine.
Rule 3. No file names somebody's home folder, or the folder this clone is in.
Rule 4. `__version__` and the version in pyproject.toml are the same.
Rule 5. Who catches every exception raises it again, or says on that line why everything is caught.
Rule 6. No public class of the package has the name of another one.
Rule 7. Every module of the pure packages has a file of unit tests of its name, except for those that only list types.
Rule 8. At most 1 % of the docstrings of the package hinge on a "what …" without a noun (`scripts/measure_house.py`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Put together from parts, so that this file passes its own check.
REGISTRIES = (
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("pypi", "python", "org"),
    ("npmjs", "org"),
    ("npmjs", "com"),
)
REGISTRY = re.compile("|".join(r"\b" + r"\.".join(parts) + r"\b" for parts in REGISTRIES), re.IGNORECASE)
# Names that documentation uses say nothing about a machine.
SOMEBODY = r"(?!you\b|user\b|alice\b|bob\b|me\b)[A-Za-z_][\w.-]*"
START = r"(?<![\w.~$})/-])"
HOME = re.compile(rf"{START}/(?:home|Users)/{SOMEBODY}/|{START}/{'root'}/|{START}{re.escape(str(ROOT))}\b")
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
PACKAGE, UNIT_TESTS = "src/distributed_grid", "tests/unit"
PURE_PACKAGES = ("domain", "scheduling", "reactor", "prediction", "masking")
TYPES_ONLY = frozenset({"domain/events.py"})
MAX_HEADLESS_SHARE = 0.01
# The same expression as in measure_house.py, which counts these docstrings by folder.
HEADLESS = re.compile(
    r"(^|[.:;,] )[Ww]hat "
    r"(is|was|has|had|it|a|an|of|the|no|can|cannot|could|may|must|still|there|they|one|will|would|else)\b"
)


def main() -> int:
    files = project_files()
    problems = [*wrong_version(), *untested_modules(files)]
    classes: dict[str, str] = {}
    docstrings: list[tuple[str, int, str]] = []
    for path in files:
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        problems += (f"{path}:{number}: {what}" for number, what in wrong_lines(path, text))
        if path.startswith("src/") and path.endswith(".py"):
            problems += (f"{path}:{number}: {what}" for number, what in unexplained_catches(text))
            docstrings += ((path, number, docstring) for number, docstring in docstrings_of(text))
            for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
                if (first := classes.setdefault(name, path)) != path:
                    problems.append(f"{path}: {first} has a class {name}, too")
    problems += headless_docstrings(docstrings)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def wrong_lines(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Every line that breaks a rule, with its number."""
    is_lock = path.endswith(".lock")
    for number, line in enumerate(text.splitlines(), start=1):
        if is_lock and (ADDRESS.search(line) or line.lstrip().startswith(("#", "-"))) and "--hash=" not in line:
            yield number, "a lock file holds names, versions and hashes only"
        if found := REGISTRY.search(line):
            yield number, f"names a package registry: {found.group()}"
        if found := HOME.search(line):
            yield number, f"names a folder of one machine: {found.group()}"


def unexplained_catches(text: str) -> Iterator[tuple[int, str]]:
    """Every place that swallows whatever is raised and does not say why."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ExceptHandler(type=caught, body=[*_, last]) if _is_everything(caught):
                is_explained = "# " in lines[node.lineno - 1] or (isinstance(last, ast.Raise) and last.exc is None)
            case ast.Call(func=ast.Attribute(attr="suppress"), args=args) if any(map(_is_everything, args)):
                is_explained = "# " in lines[node.lineno - 1]
            case _:
                continue
        if not is_explained:
            yield node.lineno, "catches every exception and does not say why"


def _is_everything(caught: ast.expr | None) -> bool:
    match caught:
        case None | ast.Name(id="Exception" | "BaseException"):
            return True
        case ast.Tuple(elts=parts):
            return any(map(_is_everything, parts))
    return False


def docstrings_of(text: str) -> Iterator[tuple[int, str]]:
    """Every docstring of a module, with the line of its owner."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node)
        ):
            yield getattr(node, "lineno", 1), docstring


def headless_docstrings(docstrings: Collection[tuple[str, int, str]]) -> Iterator[str]:
    """Docstrings (path, line, text) that hinge on "what …", if they are more than `MAX_HEADLESS_SHARE` of all."""
    headless = [(path, number) for path, number, docstring in docstrings if HEADLESS.search(docstring)]
    if len(headless) > MAX_HEADLESS_SHARE * len(docstrings):
        for path, number in headless:
            yield f'{path}:{number}: its docstring hinges on a "what …" without a noun'


def untested_modules(files: Collection[str]) -> Iterator[str]:
    """Every module of a pure package that has no file of tests of its own."""
    for path in files:
        folder, _, name = path.removeprefix(f"{PACKAGE}/").rpartition("/")
        is_pure = path.startswith(f"{PACKAGE}/") and folder.split("/")[0] in PURE_PACKAGES
        if not is_pure or not name.endswith(".py") or name == "__init__.py" or f"{folder}/{name}" in TYPES_ONLY:
            continue
        test = f"{UNIT_TESTS}/{folder}/test_{name}"
        if test not in files:
            yield f"{path}: has no tests in {test}"


def wrong_version() -> Iterator[str]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    module = ROOT / "src" / "distributed_grid" / "__init__.py"
    for statement in ast.parse(module.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                if version != declared:
                    yield f"pyproject.toml: version is {declared}, but __version__ is {version}"
                return
    yield f"{module.relative_to(ROOT)}: has no __version__"


def project_files() -> list[str]:
    """Files in the repository, including those of the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return sorted(set(filter(None, listing.stdout.decode().split("\0"))))


if __name__ == "__main__":
    sys.exit(main())
