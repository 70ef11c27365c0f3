"""Return of files to the working directory of a moved process, by the rule of `trees/file_return`."""

from __future__ import annotations

from typing import NamedTuple

from distributed_grid.trees.file_return import ReturnReport, return_tree, shipped_policy
from distributed_grid.trees.manifest import Manifest
from distributed_grid.trees.paths import display_path

MAX_NAMED = 5


class ReturnedFiles(NamedTuple):
    """Number of files and links that came back, the paths that did not replace a local file, and notes for the user."""

    files: int
    kept: tuple[str, ...]
    notes: tuple[str, ...] = ()


def return_files(results: Manifest, staged: int, target: int, before: Manifest, move_id: str) -> ReturnedFiles:
    """Put the results, which are laid out in the open directory `staged`, into the open directory `target`; `before` is
    the tree when the original stood still. `StoreFailed`: it may succeed later."""
    policy = shipped_policy(before, origin=move_id, durable=True)
    report = return_tree(results, staged, target, policy)
    own = len(report.written) - len(report.beside)
    return ReturnedFiles(own, tuple(display_path(path) for path in report.beside), tuple(_notes(report)))


def _notes(report: ReturnReport) -> list[str]:
    notes = []
    if report.protected:
        notes.append(f"never written back: {_names(report.protected)}")
    if report.executable:
        notes.append(f"executable now: {_names(report.executable)}")
    return notes


def _names(paths: list[str]) -> str:
    shown = ", ".join(display_path(path) for path in paths[:MAX_NAMED])
    return shown if len(paths) <= MAX_NAMED else f"{shown} and {len(paths) - MAX_NAMED} more"
