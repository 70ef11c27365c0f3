"""Payload of a job: the caller's environment, the working directory that is uploaded, the files that come back.

The environment has the variables that a command needs, and no secrets. A download writes only requested files, and
never outside the target directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed_grid.api.command_limits import command_problem
from distributed_grid.api.framing import JSON
from distributed_grid.errors import BadInput, GridError, ProtocolError
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from distributed_grid.trees.file_return import ReturnDirectory
    from distributed_grid.trees.manifest import Manifest

INHERITED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
)  # fmt: skip
MAX_NODE_NAME_CHARS = 128
NONE = "none"
"""The `--workdir` that uploads nothing."""


def caller_environment(extra: dict[str, str]) -> dict[str, str]:
    """A clean base out of this process's environment, and the variables of the user."""
    base = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    base |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    base = {name: value for name, value in base.items() if is_utf8(value)}
    path, own = base.get("PATH", os.defpath), os.path.dirname(sys.executable)
    base["PATH"] = path if own in path.split(":") else f"{path}:{own}"  # `python` works where the system has none
    for word in (*extra, *extra.values()):
        require_utf8(word)
    return base | extra


def caller_node() -> str:
    """The node that this program runs on where it is part of a job, as its environment says; else empty."""
    name = os.environ.get("GRID_NODE", "")
    return name if name.isprintable() and len(name) <= MAX_NODE_NAME_CHARS else ""


def is_utf8(word: str) -> bool:
    """True if a word of the command line or the environment is UTF-8, as every message must be."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def require_utf8(*words: str) -> None:
    """Raise BadInput for a word that is not UTF-8."""
    for word in words:
        if not is_utf8(word):
            raise BadInput(f"only UTF-8 text can be passed on, not {os.fsencode(word)!r}")


def check_command(argv: Sequence[str], env: Mapping[str, str], given: Collection[str] = ()) -> None:
    """Raise BadInput for a command that no node can start."""
    require_utf8(*argv)
    problem = command_problem(argv, env, given)
    if problem is not None:
        raise BadInput(problem)


class WorkdirUpload(NamedTuple):
    """An uploaded working directory: its digest, the nodes the job is restricted to, and notes for the user."""

    workdir: str = ""
    require: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def upload_workdir(
    workdir: str | None,
    state_dir: StateDir,
    *,
    nodes: Sequence[str],
    far: Collection[str],
    require: Sequence[str] = (),
    isolated: bool = False,
    here: str | None = None,
    ship: Sequence[str] = (),
) -> WorkdirUpload:
    """Store a working directory where agents can fetch it, if the job may run on another machine at all.

    None is the directory `here`, or the current one, if it is small enough and no home directory; otherwise the job
    stays on this machine, or is refused where that is impossible. Files that look like secrets are not stored, but for
    those that the patterns of `ship` name.
    """
    check_workdir(workdir)
    check_ship(ship)
    allowed = require or nodes
    if workdir == NONE or not any(name in far for name in allowed) or (isolated and workdir is None):
        return WorkdirUpload(require=tuple(require))
    near = tuple(name for name in allowed if name not in far)
    try:
        directory = workdir or here or os.getcwd()
        if workdir is None:
            from distributed_grid.trees.paths import display_path
            from distributed_grid.trees.secret_files import never_shipped_unasked

            if problem := never_shipped_unasked(directory):
                advice = "use --workdir DIR or --workdir none"
                raise BadInput(f"the directory {display_path(directory)} {problem}; {advice}")
        return _store_directory(directory, state_dir, require, ship)
    except BadInput as refusal:
        if workdir is not None or not near:
            raise
        return WorkdirUpload("", near, (f"this job stays on this machine: {refusal}",))
    except FileNotFoundError:
        raise BadInput("the current directory does not exist any more; use --workdir none") from None


def check_workdir(workdir: str | None) -> None:
    """Raise BadInput for a directory that was named and does not exist, whether or not it would be uploaded."""
    if workdir is not None and workdir != NONE and not os.path.isdir(workdir):
        raise BadInput(f"--workdir {workdir}: there is no such directory")


def check_ship(patterns: Sequence[str]) -> None:
    """Raise BadInput for a pattern of `--ship` that cannot name anything, whether or not it would be used."""
    if patterns:
        from distributed_grid.trees.secret_files import ShipPatterns

        ShipPatterns(patterns)


def _store_directory(directory: str, state_dir: StateDir, require: Sequence[str], ship: Sequence[str]) -> WorkdirUpload:
    # Imported here because most commands ship nothing.
    from distributed_grid.trees.content_store import ContentStore
    from distributed_grid.trees.manifest import encode
    from distributed_grid.trees.paths import display_path
    from distributed_grid.trees.scan import scan_directory
    from distributed_grid.trees.secret_files import unused_note, withheld_note

    store = ContentStore(content_store_dir(state_dir))
    scan = scan_directory(directory, store, own_dirs=(state_dir.root,), ship=ship)
    digest = store.add(encode(scan.manifest))
    notes = [withheld_note(scan.withheld), unused_note(scan.unused)]
    notes += [f"{display_path(skipped.path)} is not shipped: {skipped.reason}" for skipped in scan.skipped[:5]]
    return WorkdirUpload(digest, tuple(require), tuple(filter(None, notes)))


def content_store_dir(state_dir: StateDir) -> Path:
    """The directory of content that agents may fetch; made where it is missing."""
    state_dir.create()
    return state_dir.host_dir / "content"


class FetchTotals(NamedTuple):
    """The files of a job in a person's directory."""

    files: int
    bytes: int
    in_place: bool
    unchanged: int
    skipped: Sequence[str]
    paths: Sequence[str] = ()
    beside: Mapping[str, str] = {}  # edited files that stay, and the names of the job's versions beside them
    protected: Sequence[str] = ()
    executable: Sequence[str] = ()


class FileDownload:
    """Writes the frames of `fetch_files` into a person's directory, by the rule of `trees/file_return`."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        patterns: Sequence[str],
        state_dir: StateDir,
        *,
        overwrite: bool = False,
        umask: int | None = None,
    ) -> None:
        # Imported here because most commands fetch nothing.
        from functools import partial

        from distributed_grid.trees.file_return import FetchedDigests
        from distributed_grid.trees.file_selection import FilePatterns
        from distributed_grid.trees.paths import translate_os_errors

        self._target = os.path.abspath(target)
        self._patterns = FilePatterns(patterns)
        self._state_dir = state_dir
        self._overwrite = overwrite
        self._umask = umask
        self._translate_errors: Callable[[], AbstractContextManager[None]] = partial(
            translate_os_errors, self._target, "write there"
        )
        self._digests = FetchedDigests(fetched_digests_dir(state_dir), self._target)
        self._directory: ReturnDirectory | None = None
        self._root = -1
        self._is_open = False

    def receive(self, kind: bytes, part: bytes | dict[str, Any]) -> FetchTotals | None:
        """Write one frame; returns the totals with the last."""
        with self._translate_errors():
            if kind != JSON:
                assert isinstance(part, bytes)
                self._returned().write(part)
                return None
            assert isinstance(part, dict)
            if "job_id" in part and "done" not in part:
                self._open(part)
                return None
            if self._is_open:
                self._is_open = False
                self._returned().finish()
            if part.get("done"):
                return self._totals(part)
            path = decode_path(part)
            if not self._patterns.matches(path):
                raise ProtocolError(f"{path!r} was not asked for")
            self._returned().begin(path, int(part["size"]), executable=bool(part["executable"]))
            self._is_open = True
            return None

    def close(self) -> None:
        """Stop; an incomplete file is removed. Safe to call twice."""
        if self._directory is not None:
            self._directory.close()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _open(self, header: dict[str, Any]) -> None:
        from distributed_grid.trees.file_return import ReturnDirectory, current_umask, shipped_policy

        os.makedirs(self._target, exist_ok=True)
        self._root = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        policy = shipped_policy(
            _shipped_tree(self._state_dir, str(header["workdir"])),
            origin=str(header["job_id"]),
            fetched=self._digests.read(),
            overwrite=self._overwrite,
            umask=current_umask() if self._umask is None else self._umask,
        )
        self._directory = ReturnDirectory(self._root, policy)

    def _returned(self) -> ReturnDirectory:
        if self._directory is None:
            raise ProtocolError("a file came before the job that it is of")
        return self._directory

    def _totals(self, done: dict[str, Any]) -> FetchTotals:
        totals = FetchTotals(done["files"], done["bytes"], done["in_place"], done["unchanged"], done["skipped"])
        if self._directory is None:
            return totals
        self._directory.flush()
        report = self._directory.report
        self._digests.record(report.written)
        return totals._replace(
            files=len(report.written),
            bytes=report.bytes,
            paths=list(report.written),
            beside=report.beside,
            protected=report.protected,
            executable=report.executable,
            unchanged=totals.unchanged + report.unchanged,
        )


def fetched_digests_dir(state_dir: StateDir) -> Path:
    """The directory of the digests of fetched files."""
    return state_dir.host_dir / "fetched"


def _shipped_tree(state_dir: StateDir, digest: str) -> Manifest:
    """The tree that a job began with; an empty one where it began with nothing, or where the list is gone: then every
    local file counts as edited."""
    from distributed_grid.trees.content_store import ContentStore
    from distributed_grid.trees.manifest import Manifest, decode

    if not digest:
        return Manifest()
    try:
        with ContentStore(content_store_dir(state_dir)).open(digest) as file:
            return decode(file.read())
    except GridError:
        return Manifest()


def decode_path(header: dict[str, Any]) -> str:
    """The path in the header of a file that comes back; surrogates stand for bytes that are not UTF-8."""
    return bytes.fromhex(header["file"]).decode("utf-8", "surrogateescape")
