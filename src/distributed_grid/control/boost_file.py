"""`ResourceBoostPersistence`: the file of boosts, `~/.distributed_grid/resource_boosts.json`.

The truth is the ledger. The control plane writes this file after each change, so that boosts are not lost with the
database; deleting or breaking it loses nothing. It is replaced as a whole or not at all, and only its owner can read
it. A home may be shared by several machines: each has its own boosts in the file and leaves the others' alone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from distributed_grid.api.requests import ID_PATTERN, PATTERN_WORDS
from distributed_grid.domain.leases import MAX_FENCE
from distributed_grid.domain.nodes import MAX_GPUS
from distributed_grid.domain.resources import MAX_AMOUNT, WHOLE_GPU, Claim, GpuShare, Priority
from distributed_grid.errors import BadInput, GridError
from distributed_grid.posix.private_files import try_lock, write_private
from distributed_grid.state_dir import StateDir
from distributed_grid.validation_text import describe_patterns

FILE = "resource_boosts.json"
VERSION = 1
LOCK_SECONDS = 5.0
MAX_FILE_BYTES = 64 * 1024 * 1024
_MOMENT = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z$"
Moment = Annotated[str, Meta(pattern=_MOMENT)]
_PATTERN_WORDS = PATTERN_WORDS | {_MOMENT: "a time such as 2026-05-01T18:00:00Z"}
Name = Annotated[str, Meta(max_length=256)]
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]


class Corrupted(GridError):
    """The file has other content than the grid writes."""


class StoredShare(Struct, frozen=True):
    index: Annotated[int, Meta(ge=0, lt=2**16)]
    milli: Annotated[int, Meta(gt=0, le=WHOLE_GPU)]
    memory_bytes: Amount = 0


class StoredClaim(Struct, frozen=True):
    cpu_milli: Amount = 0
    memory_bytes: Amount = 0
    gpus: Annotated[tuple[StoredShare, ...], Meta(max_length=MAX_GPUS)] = ()
    custom: Annotated[tuple[tuple[Name, Amount], ...], Meta(max_length=256)] = ()

    @classmethod
    def of(cls, claim: Claim) -> StoredClaim:
        gpus = (StoredShare(share.index, share.milli, share.memory_bytes) for share in claim.gpus)
        return cls(claim.cpu_milli, claim.memory_bytes, tuple(gpus), claim.custom)

    def value(self) -> Claim:
        gpus = (GpuShare(share.index, share.milli, share.memory_bytes) for share in self.gpus)
        return Claim(self.cpu_milli, self.memory_bytes, tuple(gpus), self.custom)


class StoredBoost(Struct, frozen=True, kw_only=True):
    """A boost in the file; times are ISO 8601 in UTC, the claim is in the ledger's own units."""

    boost_id: Annotated[str, Meta(pattern=ID_PATTERN)]
    source_node: Name
    target_node: Name
    resource_type: Name
    amount: Annotated[float, Meta(ge=0, le=MAX_AMOUNT)]
    allocated_at: Moment
    expires_at: Moment | None
    is_active: bool
    state: Literal["reserving", "active", "releasing"] = "active"
    user: Name
    team: Name = ""
    priority: Name
    fence: Annotated[int, Meta(ge=0, le=MAX_FENCE)]
    claim: StoredClaim
    machine_id: Name

    def problem(self) -> str | None:
        """Why this cannot be a boost, or None."""
        claim = self.claim
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
    boosts: Annotated[list[msgspec.Raw], Meta(max_length=100_000)]


class BoostFileContents(Struct, frozen=True):
    boosts: tuple[StoredBoost, ...] = ()
    problem: str = ""  # of the rest


class ResourceBoostPersistence:
    """Reads and replaces the file of one state directory."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, state_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = Path(path) if path is not None else StateDir(state_dir).root / FILE

    def load(self) -> list[StoredBoost]:
        """The boosts in the file, of all machines; none without a file, Corrupted if it is invalid."""
        contents = self.read()
        if contents.problem:
            raise Corrupted(f"Persistence file corrupted: {self.path}: {contents.problem}")
        return list(contents.boosts)

    def read(self) -> BoostFileContents:
        """The readable part of the file, however broken; OSError if it cannot be read at all."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                return BoostFileContents(problem=f"it has more than {MAX_FILE_BYTES:,} bytes")
            document = msgspec.json.decode(content, type=_Document)
        except FileNotFoundError:
            return BoostFileContents()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BoostFileContents(problem=describe_patterns(str(error), _PATTERN_WORDS))
        if document.version != VERSION:
            return BoostFileContents(problem=f"version {document.version}, this program knows {VERSION}")
        boosts: list[StoredBoost] = []
        problem = ""
        for raw in document.boosts:
            try:
                boost = msgspec.json.decode(raw, type=StoredBoost)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problem = problem or describe_patterns(str(error), _PATTERN_WORDS)
                continue
            boost_problem = boost.problem()
            if boost_problem is None:
                boosts.append(boost)
            else:
                problem = problem or f"{boost.boost_id}: {boost_problem}"
        return BoostFileContents(tuple(boosts), problem)

    def save(self, boosts: Iterable[StoredBoost], machine_id: str) -> Path | None:
        """Replace the boosts of this machine in the file, durably; the path under which an invalid file was set aside.

        Writing the same twice is harmless. OSError if it cannot be written; the old file is then as it was.
        """
        with self._locked():
            contents = self.read()
            aside: Path | None = None
            if contents.problem:
                names = (f"{self.path.name}.corrupt-{number}" for number in itertools.count(1))
                aside = next(path for path in map(self.path.with_name, names) if not path.exists())
                os.rename(self.path, aside)
            others = [boost for boost in contents.boosts if boost.machine_id != machine_id]
            document = {"version": VERSION, "boosts": [*others, *boosts]}
            write_private(self.path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        return aside

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock file, which other machines take, too."""
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
