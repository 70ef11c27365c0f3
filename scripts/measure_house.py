#!/usr/bin/env python3
"""Figures of the source tree beside their bars: size, untyped answers, one-caller helpers, wording of docstrings.

`scripts/measure_house.py` prints the figures of the whole tree and fails where one is above its bar;
`scripts/measure_house.py FOLDER…` prints those of single folders below `src/distributed_grid`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "distributed_grid"
MAX_LINES, MAX_FILES, MAX_UNTYPED, MAX_POSITIONAL = 76_000, 340, 5, 5
MAX_ONE_CALLER, MAX_HEADLESS, MAX_FUNCTIONS = 0.4, 0.01, 58
HEADLESS = re.compile(
    r"(^|[.:;,] )[Ww]hat "
    r"(is|was|has|had|it|a|an|of|the|no|can|cannot|could|may|must|still|there|they|one|will|would|else)\b"
)
UNTYPED = re.compile(r"^(View|Report)$|^dict\[str, Any\]|list\[View\]")
ANSWERING = ("server", "control")
"""Packages whose functions make answers."""


@dataclass
class Figures:
    lines: int = 0
    files: int = 0
    functions: int = 0
    untyped: int = 0
    private: int = 0
    one_caller: int = 0  # private names that occur exactly twice in their file
    docstrings: int = 0
    headless: int = 0  # docstrings that hinge on "what …" without a noun
    positional: int = 0  # constructor calls with at least six positional arguments

    def add_file(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.lines += text.count("\n")
        self.files += 1
        words = Counter(re.findall(r"\w+", text))
        package = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions += 1
                    answer = ast.unparse(node.returns) if node.returns else ""
                    self.untyped += package in ANSWERING and bool(UNTYPED.search(answer))
                    if node.name.startswith("_") and not node.name.startswith("__"):
                        self.private += 1
                        self.one_caller += words[node.name] == 2
                case ast.Call(func=ast.Name(id=name), args=args):
                    self.positional += len(args) >= 6 and name[:1].isupper()
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if docstring := ast.get_docstring(node):
                self.docstrings += 1
                self.headless += bool(HEADLESS.search(docstring))

    def __str__(self) -> str:
        return (
            f"{self.lines:,} lines in {self.files} files, {1000 * self.functions / max(1, self.lines):.0f} functions "
            f"per 1,000 lines; {self.one_caller} of {self.private} private helpers have one caller; {self.headless} of "
            f"{self.docstrings} docstrings hinge on 'what'; {self.untyped} untyped answers; {self.positional} calls "
            "with six positional arguments"
        )

    def excesses(self) -> Iterable[str]:
        """Figures above their bars."""
        if self.lines > MAX_LINES:
            yield f"more than {MAX_LINES:,} lines"
        if self.files > MAX_FILES:
            yield f"more than {MAX_FILES} files"
        if self.untyped > MAX_UNTYPED:
            yield f"more than {MAX_UNTYPED} untyped answers"
        if self.one_caller > MAX_ONE_CALLER * self.private:
            yield f"more than {MAX_ONE_CALLER:.0%} of the private helpers have one caller"
        if self.headless > MAX_HEADLESS * self.docstrings:
            yield f"more than {MAX_HEADLESS:.0%} of the docstrings hinge on 'what'"
        if self.positional > MAX_POSITIONAL:
            yield f"more than {MAX_POSITIONAL} calls with six positional arguments"
        if 1000 * self.functions > MAX_FUNCTIONS * self.lines:
            yield f"more than {MAX_FUNCTIONS} functions per 1,000 lines"


def measure(path: Path) -> Figures:
    figures = Figures()
    for file in [path] if path.is_file() else path.rglob("*.py"):
        figures.add_file(file)
    return figures


def main(folders: list[str]) -> int:
    if folders:
        for folder in folders:
            print(f"{folder}: {measure(PACKAGE / folder)}")
        return 0
    figures = measure(PACKAGE)
    print(figures)
    excesses = list(figures.excesses())
    for excess in excesses:
        print(excess, file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
