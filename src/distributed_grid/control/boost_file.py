"""`ResourceBoostPersistence`: the file that tells of boosts, `~/.distributed_grid/resource_boosts.json`.

The truth is the ledger. The control plane writes this file after each change, so that boosts are not lost with the
database; deleting or breaking it loses nothing. It is replaced as a whole or not at all, and only its owner can read
it. A home may be shared by several machines. Each has its own boosts in the file and leaves the others' alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from distributed_grid.domain.resources import WHOLE_GPU, Claim, Priority
from distributed_grid.errors import BadInput, GridError
from distributed_grid.posix.private_files import try_lock, write_private
from distributed_grid.state_dir import StateDir

FILE = "resource_boosts.json"
VERSION = 1
LOCK_SECONDS = 5.0
Moment = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Corrupted(GridError):
    """The file is there, and is not what the grid writes."""


class StoredBoost(Struct, frozen=True, kw_only=True):
    """A boost as it is written down; times are ISO 8601 in UTC, the claim is in the ledger's own units."""

    boost_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    source_node: str
    target_node: str
    resource_type: str
    amount: float
    allocated_at: Moment
    expires_at: Moment | None
    is_active: bool
    state: Literal["reserving", "active", "releasing"] = "active"
    user: str
    team: str = ""
    priority: str
    fence: Count
    claim: Claim
    machine_id: str

    def problem(self) -> str | None:
        """Why this cannot be a boost, or None."""
        claim = self.claim
        counts = [claim.cpu_milli, claim.memory_bytes, *(count for _, count in claim.custom)]
        counts += [number for share in claim.gpus for number in (share.index, share.memory_bytes)]
        if min(counts) < 0 or any(not 0 < share.milli <= WHOLE_GPU for share in claim.gpus):
            return "its amounts are invalid"
        if not (claim.cpu_milli or claim.memory_bytes or claim.gpus or claim.custom):
            return "it is a boost of nothing"
        if self.source_node == self.target_node:
            return "it is lent by its own target"
        try:
            Priority.parse(self.priority)
            datetime.fromisoformat(self.allocated_at)
            datetime.fromisoformat(self.expires_at or self.allocated_at)
        except (BadInput, ValueError) as error:
            return str(error)
        return None


class _Document(Struct, frozen=True):
    version: int
    boosts: list[msgspec.Raw]


class BoostFileContents(Struct, frozen=True):
    """What could be read, and what is wrong with the rest; nothing is, where that is empty."""

    boosts: tuple[StoredBoost, ...] = ()
    problem: str = ""


class ResourceBoostPersistence:
    """Reads and replaces the file of one state directory."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, state_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = Path(path) if path is not None else StateDir(state_dir).root / FILE

    def load(self) -> list[StoredBoost]:
        """The boosts in the file, of all machines; none where there is no file, Corrupted where it makes no sense."""
        contents = self.read()
        if contents.problem:
            raise Corrupted(f"Persistence file corrupted: {self.path}: {contents.problem}")
        return list(contents.boosts)

    def read(self) -> BoostFileContents:
        """What can be made of the file, however broken; OSError where it cannot be read at all."""
        try:
            document = msgspec.json.decode(self.path.read_bytes(), type=_Document)
        except FileNotFoundError:
            return BoostFileContents()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BoostFileContents(problem=str(error))
        if document.version != VERSION:
            return BoostFileContents(problem=f"version {document.version}, this program knows {VERSION}")
        found: list[StoredBoost] = []
        problem = ""
        for raw in document.boosts:
            try:
                boost = msgspec.json.decode(raw, type=StoredBoost)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problem = problem or str(error)
                continue
            wrong = boost.problem()
            if wrong is None:
                found.append(boost)
            else:
                problem = problem or f"{boost.boost_id}: {wrong}"
        return BoostFileContents(tuple(found), problem)

    def save(self, boosts: Iterable[StoredBoost], machine_id: str) -> Path | None:
        """Have exactly these boosts of this machine in the file, durably; where a file that made no sense was put.

        Writing the same twice is harmless. OSError where it cannot be written; the old file is then as it was.
        """
        with self._alone():
            contents = self.read()
            aside = self._set_aside() if contents.problem else None
            others = [boost for boost in contents.boosts if boost.machine_id != machine_id]
            document = {"version": VERSION, "boosts": [*others, *boosts]}
            write_private(self.path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        return aside

    def _set_aside(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.corrupt-{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        return aside

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While nobody else on any machine writes the file."""
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise BlockingIOError(errno.EAGAIN, "another process is writing the file")
                time.sleep(0.02)
            yield
        finally:
            os.close(lock)
