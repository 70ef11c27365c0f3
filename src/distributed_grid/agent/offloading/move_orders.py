"""Execution of the control plane's orders about moves whose original is on this machine.

Each move has a directory with a journal, and a guard (`guard_process.py`) that does all that may not be left undone.
The agent passes orders on, reports the guard's records, lets the files of the original be read, and returns
files. All of it is safe to repeat, by this agent or the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from distributed_grid.agent.files.job_dir import is_safe_name
from distributed_grid.agent.offloading.guard_client import GuardClient
from distributed_grid.agent.offloading.guard_core import FINAL_PHASES, STILL_PHASES, GuardRecord
from distributed_grid.agent.offloading.move_journal import RESULTS, RETURNED, MoveJournal, OriginalProcess, read_journal
from distributed_grid.agent.offloading.original_process import (
    OpenDirectory,
    identify,
    is_running,
    look_again,
    open_working_directory,
)
from distributed_grid.agent.offloading.process_inventory import Surroundings
from distributed_grid.agent.outbox import Outbox
from distributed_grid.domain.processes import ProcessLook
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.errors import BadInput, GridError, NotFound, ProtocolError, StoreFailed, Unreachable
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.posix.private_files import read_regular, write_private
from distributed_grid.supervision import start_logged
from distributed_grid.trees.manifest import Manifest
from distributed_grid.trees.paths import display_path
from distributed_grid.wire import MAX_MOVES, MAX_SKIPPED, MAX_SKIPPED_CHARS, MoveOrder

CLOSED = ".closed-"
MAX_RETURNED_BYTES = 1 << 20
MAX_NAMED = 5
MAX_OPEN = 100
"""Moves at a time: each has a guard and its standby."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
UNKNOWN = "nothing is known of this move here"
log = logging.getLogger(__name__)


class ResultTrees(Protocol):
    """Source of the files to return."""

    async def read_tree(self, digest: str) -> Manifest:
        """The list of files of this digest."""

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory; done again it changes nothing."""


class SourceMove:
    """One move at its source: its journal, its guard, and the directory of its original."""

    def __init__(
        self,
        folder: Path,
        original: OriginalProcess,
        directory: OpenDirectory | None,
        report: Callable[..., None],
        surroundings: Callable[[], Surroundings],
    ) -> None:
        self.folder, self.original, self.directory = folder, original, directory
        self._report_state = report
        self._surroundings = surroundings
        self.look: ProcessLook | None = None
        self._checking: asyncio.Task[None] | None = None
        self._is_commit_asked = self._is_given_up = False
        self.phase = MoveState.OPENED
        self._decided = False
        self.is_closing = False
        self.guard = GuardClient(folder, self.receive, self._failed)
        self.task: asyncio.Task[None] | None = None
        self.returning: asyncio.Task[None] | None = None
        self.last: GuardRecord | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All that is under way here."""
        return [task for task in (self.task, self.returning, self._checking) if task is not None]

    def order(self, order: MoveOrder) -> None:
        """Pass an order on to the guard. A commit waits for the second look, whose result is recorded before it."""
        self.look = order.look or self.look
        if order.step is Step.THAW:
            self._is_given_up = True
        if order.step is Step.FREEZE and self.phase in STILL_PHASES:
            self.report_again()  # another order would take the place of the one that is not answered yet
        elif order.step is Step.FREEZE:
            self.guard.order(Step.FREEZE, freeze_ms=order.freeze_ms)
        elif order.step is Step.COMMIT and self.phase in (MoveState.FREEZING, MoveState.FROZEN):
            self._is_commit_asked = True
            if self.phase is MoveState.FROZEN:
                self._begin_check()
        else:
            self.guard.order(order.step)

    def _begin_check(self) -> None:
        """Begin the second look, unless it is under way; without a first look there is nothing to compare with."""
        is_under_way = self._checking is not None and not self._checking.done()
        if not is_under_way and (self.look is not None or self._is_commit_asked):
            self._checking = start_logged(self._check(self.look), f"the second look of {self.original.move_id}")

    async def _check(self, first: ProcessLook | None) -> None:
        if first is None:
            changes = "its move was requested by an earlier version, which kept no first look: type the command again"
        else:
            changes = await look_again(self.original, first, self._surroundings)
        if self.phase is MoveState.FROZEN and not (self.is_closing or self._is_given_up):
            self.guard.order("check", changes=changes)

    def report_again(self) -> None:
        """Report the last record once more: the answer to an order that changes nothing."""
        if self.last is not None:
            self._report(self.last)

    def receive(self, record: GuardRecord) -> None:
        """Enter a record of the guard; a repeated one changes nothing."""
        if self.phase in FINAL_PHASES and record.step is not self.phase:
            return  # a final phase stays
        if self.last is not None and (record.step, record.at_ms) == (self.last.step, self.last.at_ms):
            return
        self.phase, self.last = record.step, record
        if record.step in FINAL_PHASES:
            self.directory = None  # it is not read any more: its file system may be unmounted
        self._report(record)
        if record.step is MoveState.FROZEN:
            self._begin_check()
        elif record.step is MoveState.CHECKED and self._is_commit_asked and not (self.is_closing or self._is_given_up):
            self.guard.order(Step.COMMIT)

    def _report(self, record: GuardRecord) -> None:
        state, frozen_ms = record.step, record.frozen_ms
        if state is MoveState.FREEZING:
            return
        if state in STILL_PHASES:
            self._report_state(self.original.move_id, MoveState.FROZEN, left_ms=max(record.until_ms - boot_ms(), 0))
            return
        if state is MoveState.DEAD and not self._decided:  # of a guard that continued without this agent
            self._report_state(self.original.move_id, MoveState.DECIDED, frozen_ms=frozen_ms)
        self._decided = self._decided or state is MoveState.DECIDED
        self._report_state(self.original.move_id, state, detail=record.why, frozen_ms=frozen_ms)

    def _failed(self, problem: str) -> None:
        if self.phase is MoveState.OPENED:
            self._report_state(self.original.move_id, MoveState.FAILED, detail=problem)


class SourceMoves:
    """All moves of a machine's originals; `root` is the directory that theirs are in."""

    def __init__(
        self, root: Path, outbox: Outbox, trees: ResultTrees | None, surroundings: Callable[[], Surroundings]
    ) -> None:
        self._root = root
        self._outbox = outbox
        self._trees = trees
        self._surroundings = surroundings
        self._moves: dict[str, SourceMove] = {}
        self._damaged: dict[str, str] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Find the moves of the last agent, and continue them."""
        for name in sorted(os.listdir(self._root)) if self._root.is_dir() else []:
            folder = self._root / name
            if name.startswith(CLOSED):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                continue
            if not is_safe_name(name):
                continue
            try:
                original, records = read_journal(folder)
            except (OSError, ValueError) as failure:
                if not os.path.lexists(folder / "journal"):  # never opened: no order was answered, nothing was done
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
                self._damaged[name] = f"the journal of {name} is damaged: {failure}"
                log.warning("%s", self._damaged[name])
                continue
            directory = None
            with contextlib.suppress(GridError):
                directory = open_working_directory(original)
            move = SourceMove(folder, original, directory, self._report, self._surroundings)
            for record in records[-1:]:
                move.receive(record)
            self._begin(name, move)

    def listed(self, node: str) -> tuple[str, ...]:
        """The moves of a node that have a journal here; those whose journal is damaged are any node's."""
        own = [move_id for move_id, move in self._moves.items() if move.original.node == node]
        return tuple([*own, *self._damaged][:MAX_MOVES])

    def directory(self, move_id: str) -> OpenDirectory | None:
        """The working directory of an original, while its move is open."""
        move = self._moves.get(move_id)
        return None if move is None or move.is_closing else move.directory

    async def stop(self) -> None:
        """Cancel the tasks of this agent; the guards keep running. Safe twice."""
        tasks = [task for move in self._moves.values() for task in move.tasks]
        tasks += self._opening.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def carry_out(self, order: MoveOrder) -> None:
        """Begin to carry out an order; the outcome is reported."""
        if not is_safe_name(order.move_id):
            log.warning("not the id of a move: %.100r", order.move_id)
            return
        move = self._moves.get(order.move_id)
        if order.step is Step.CLOSE:  # a frozen original is thawed; a decided one is killed first
            removal = f"the removal of {order.move_id}"
            if self._damaged.pop(order.move_id, None) is not None:
                start_logged(asyncio.to_thread(self._remove_folder, self._root / order.move_id), removal)
            if move is None or move.is_closing:
                return
            move.is_closing = True
            if move.task is not None and not move.task.done():
                move.guard.order(Step.CLOSE)
            else:
                start_logged(self._remove(order.move_id, move), removal)
        elif move is None and order.step is Step.OPEN:
            if order.move_id not in self._opening:
                self._opening[order.move_id] = start_logged(self._open(order), f"the opening of {order.move_id}")
        elif move is None:
            # There is no journal of this move: its guard has thawed the original.
            if order.step is Step.RETURN:
                self._report(order.move_id, MoveState.RETURNED, detail=f"the files were not returned: {UNKNOWN}")
                return
            process = order.process
            if process is not None and not is_running(process.pid, process.pid_start, process.boot):
                detail = f"process {process.pid} is not there any more, and {UNKNOWN}"
                self._report(order.move_id, MoveState.GONE, detail=detail)
            else:
                self._report(order.move_id, MoveState.THAWED, detail=UNKNOWN)
        elif order.step is Step.RETURN:
            if move.returning is None or move.returning.done():
                move.returning = start_logged(self._return(move, order), f"the return of files of {order.move_id}")
        elif move.phase in FINAL_PHASES or order.step is Step.OPEN:
            move.report_again()
            self._serve_again(order.move_id, move)
        else:
            move.order(order)
            self._serve_again(order.move_id, move)

    # ------------------------------------------------------------------ open and close

    async def _open(self, order: MoveOrder) -> None:
        """Find the original and begin its journal; its guard reports the rest."""
        try:
            if order.move_id in self._damaged:
                raise GridError(self._damaged[order.move_id])
            if len(self._moves) >= MAX_OPEN:
                raise GridError(f"{MAX_OPEN} moves are open here already")
            original, directory = await asyncio.to_thread(self._begin_journal, order)
            folder = self._root / order.move_id
            self._begin(order.move_id, SourceMove(folder, original, directory, self._report, self._surroundings))
        except NotFound as failure:
            self._report(order.move_id, MoveState.GONE, detail=str(failure))
        except (GridError, OSError) as failure:
            log.warning("%s could not be opened: %s", order.move_id, failure)
            self._report(order.move_id, MoveState.FAILED, detail=str(failure))
        finally:
            self._opening.pop(order.move_id, None)

    def _begin_journal(self, order: MoveOrder) -> tuple[OriginalProcess, OpenDirectory]:
        if order.process is None:
            raise BadInput("the order does not say which process it is about")
        original, directory = identify(order.move_id, order.node, order.process)
        folder = self._root / order.move_id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, _DIRECTORY)
        try:
            MoveJournal.create(fd, original)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(fd)
        return original, directory

    def _begin(self, move_id: str, move: SourceMove) -> None:
        self._moves[move_id] = move
        move.task = start_logged(self._serve(move_id, move), f"the guard of {move_id}")

    def _serve_again(self, move_id: str, move: SourceMove) -> None:
        """Connect again to a guard that could not be reached before."""
        if move.phase not in FINAL_PHASES and move.task is not None and move.task.done():
            self._begin(move_id, move)

    async def _serve(self, move_id: str, move: SourceMove) -> None:
        await move.guard.run()
        if move.is_closing:
            await self._remove(move_id, move)

    async def _remove(self, move_id: str, move: SourceMove) -> None:
        under_way = [task for task in move.tasks if task is not move.task]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await asyncio.to_thread(self._remove_folder, move.folder)
        if self._moves.get(move_id) is move:
            del self._moves[move_id]
        self._outbox.forget_move(move_id)

    def _remove_folder(self, folder: Path) -> None:
        closed = folder.with_name(f"{CLOSED}{folder.name}")
        shutil.rmtree(closed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(closed)
        shutil.rmtree(closed, ignore_errors=True)

    # ------------------------------------------------------------------ return

    async def _return(self, move: SourceMove, order: MoveOrder) -> None:
        """Return the files once; a repeated order is answered with the first result."""
        try:
            done = await asyncio.to_thread(_read_returned, move.folder, order.manifest)
            if done is None:
                if self._trees is None:
                    raise GridError("this agent has no files of the control plane")
                directory = await asyncio.to_thread(open_working_directory, move.original)
                results = await self._trees.read_tree(order.manifest)
                before = Manifest()  # the directory when the original was frozen; without it every local file is kept
                try:
                    before = await self._trees.read_tree(order.shipped) if order.shipped else before
                except (NotFound, ProtocolError) as failure:
                    log.warning("the list of files before the move cannot be read: %s", failure)
                staging = move.folder / RESULTS
                await asyncio.to_thread(staging.mkdir, 0o700, exist_ok=True)
                await self._trees.lay_out(order.manifest, staging)
                staged = OpenDirectory(os.open(staging, _DIRECTORY))
                done = await asyncio.to_thread(return_files, results, staged.fd, directory.fd, before, order.move_id)
                await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
                await asyncio.to_thread(_write_returned, move.folder, order.manifest, done)
            self._report(order.move_id, MoveState.RETURNED, files=done.files, kept=done.kept, notes=done.notes)
        except (StoreFailed, Unreachable, OSError) as failure:  # a full disk: it is ordered again
            self._report(order.move_id, MoveState.FAILED, detail=f"the files could not be returned yet: {failure}")
        except GridError as failure:
            self._report(order.move_id, MoveState.RETURNED, detail=f"the files were not returned: {failure}")

    def _report(self, move_id: str, state: MoveState, **details: Any) -> None:
        kept = details.pop("kept", ())
        if len(kept) > MAX_SKIPPED:
            kept = (*kept[: MAX_SKIPPED - 1], f"and {len(kept) - MAX_SKIPPED + 1} more")
        notes = tuple(note[:MAX_SKIPPED_CHARS] for note in details.pop("notes", ())[:MAX_SKIPPED])
        self._outbox.moved(
            move_id, state, kept=tuple(path[:MAX_SKIPPED_CHARS] for path in kept), notes=notes, **details
        )


class ReturnedFiles(NamedTuple):
    """Number of files and links that came back, the paths that did not replace a local file, and notes for the user."""

    files: int
    kept: tuple[str, ...]
    notes: tuple[str, ...] = ()


def return_files(results: Manifest, staged: int, target: int, before: Manifest, move_id: str) -> ReturnedFiles:
    """Put the results, which are laid out in the open directory `staged`, into the open directory `target`, by the rule
    of `trees/file_return`; `before` is the tree when the original was frozen. `StoreFailed`: it may succeed later."""
    from distributed_grid.trees.file_return import return_tree, shipped_policy

    report = return_tree(results, staged, target, shipped_policy(before, origin=move_id, durable=True))
    notes = []
    if report.protected:
        notes.append(f"never written back: {_names(report.protected)}")
    if report.executable:
        notes.append(f"executable now: {_names(report.executable)}")
    kept = tuple(display_path(path) for path in report.beside)
    return ReturnedFiles(len(report.written) - len(report.beside), kept, tuple(notes))


def _names(paths: list[str]) -> str:
    shown = ", ".join(display_path(path) for path in paths[:MAX_NAMED])
    return shown if len(paths) <= MAX_NAMED else f"{shown} and {len(paths) - MAX_NAMED} more"


def _read_returned(folder: Path, manifest: str) -> ReturnedFiles | None:
    """Result of an earlier return of this manifest, if any."""
    try:
        fields = json.loads(read_regular(str(folder / RETURNED), None, MAX_RETURNED_BYTES) or b"null")
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or fields.get("manifest") != manifest:
        return None
    kept, notes = ([str(text) for text in fields.get(name, ())] for name in ("kept", "notes"))
    return ReturnedFiles(int(fields["files"]), tuple(kept), tuple(notes))


def _write_returned(folder: Path, manifest: str, done: ReturnedFiles) -> None:
    fields = {"manifest": manifest, "files": done.files, "kept": done.kept[:MAX_SKIPPED], "notes": done.notes}
    text = json.dumps(fields).encode()
    with contextlib.suppress(OSError):  # a full disk: a repeated return changes nothing
        write_private(folder / RETURNED, text)
