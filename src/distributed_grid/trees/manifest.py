"""Manifest of a directory: names, sizes and digests of everything in it, without content.

A manifest has exactly one encoding, so the digest of its bytes is its identity. Names are bytes on the wire: any name a
file system allows travels. One from outside is checked before use: every path is relative and normalised, occurs once,
in order, after its parent directory, and no link leads outside the tree, not even through other links of the tree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from distributed_grid.errors import BadInput, ProtocolError
from distributed_grid.trees.paths import MAX_PATH_BYTES, display_path, leads_outside, split_path, to_bytes, to_text

LIMIT_BYTES = 100 << 20
LIMIT_FILES = 10_000
MAX_ENCODED_BYTES = 16 << 20
MAX_ENTRIES = 200_000  # checked before any of them is read
PLAIN, EXECUTABLE = 0o600, 0o700
_LIST_HEAD_BYTES = 5

Kind = Literal["file", "dir", "link"]
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KINDS: dict[str, Kind] = {"f": "file", "d": "dir", "l": "link"}


class ManifestEntry(Struct, frozen=True):
    """One file, directory or link of the tree."""

    path: str  # surrogates stand for bytes that are not UTF-8
    kind: Kind
    size: int = 0
    mode: int = PLAIN  # EXECUTABLE where the owner may run it (and for directories), else PLAIN
    digest: str = ""  # of a file's content: sha256 in hex; empty in a listing
    target: str = ""  # of a link


class SkippedFile(Struct, frozen=True):
    """A file that is not shipped or fetched, and the reason."""

    path: str
    reason: str


class Manifest(Struct, frozen=True):
    """A whole tree, every directory included, each after its parent."""

    entries: tuple[ManifestEntry, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def total_files(self) -> int:
        return sum(entry.kind != "dir" for entry in self.entries)

    @property
    def digest(self) -> str:
        """Identity: equal trees have equal digests."""
        return hashlib.sha256(encode(self)).hexdigest()

    def contents(self) -> dict[str, int]:
        return {entry.digest: entry.size for entry in self.entries if entry.kind == "file"}


class _Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: str
    path: bytes
    size: int
    executable: bool
    digest: bytes
    target: bytes


_rows_decoder = msgspec.msgpack.Decoder(Annotated[tuple[_Row, ...], msgspec.Meta(max_length=MAX_ENTRIES)])


def manifest_of(entries: Iterable[ManifestEntry]) -> Manifest:
    return Manifest(tuple(sorted(entries, key=lambda entry: to_bytes(entry.path).split(b"/"))))


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode([_row(entry) for entry in manifest.entries])


def decode(data: bytes, *, limit_bytes: int = LIMIT_BYTES, limit_files: int = LIMIT_FILES) -> Manifest:
    """The manifest in these bytes. Malformed is a `ProtocolError`, larger than the limits a `BadInput`."""
    manifest = Manifest(_decode(data))
    check(manifest, limit_bytes=limit_bytes, limit_files=limit_files)
    if encode(manifest) != data:
        raise ProtocolError("this list of files is not in canonical form")
    return manifest


def encode_listing_pages(entries: Iterable[ManifestEntry], max_bytes: int) -> list[bytes]:
    """Rows of a list of files in parts of at most `max_bytes`, which are lists themselves."""
    pages: list[list[bytes]] = [[]]
    size = 0
    for entry in entries:
        row = msgspec.msgpack.encode(_row(entry))
        if pages[-1] and size + len(row) > max_bytes - _LIST_HEAD_BYTES:
            pages.append([])
            size = 0
        pages[-1].append(row)
        size += len(row)
    return [msgspec.msgpack.encode([msgspec.Raw(row) for row in rows]) if rows else b"" for rows in pages]


def decode_listing(data: bytes, *, limit_files: int) -> tuple[ManifestEntry, ...]:
    """The list of files in these bytes: paths and sizes checked, nothing but files, no two of one name."""
    entries = _decode(data)
    _check_count(len(entries), limit_files, "files")
    if len({entry.path for entry in entries}) < len(entries):
        raise ProtocolError("the list of files names one of them twice")
    for entry in entries:
        split_path(to_bytes(entry.path))
        if entry.kind != "file" or entry.target or (entry.digest and not _DIGEST.fullmatch(entry.digest)):
            raise ProtocolError(f"'{display_path(entry.path)}' is not a valid file entry")
    return entries


def decode_tree_page(data: bytes, *, limit_entries: int) -> tuple[ManifestEntry, ...]:
    """Part of the list of a whole tree; the list is checked once it is complete."""
    entries = _decode(data)
    _check_count(len(entries), limit_entries, "entries")
    return entries


def check(manifest: Manifest, *, limit_bytes: int | None = None, limit_files: int | None = None) -> None:
    """Raise unless the manifest is sound (see above) and within the limits given."""
    seen: dict[tuple[bytes, ...], str] = {(): "dir"}
    links: dict[bytes, bytes] = {}
    last: tuple[bytes, ...] = ()
    for entry in manifest.entries:
        path = to_bytes(entry.path)
        names = split_path(path)
        if names <= last:
            raise ProtocolError(f"'{display_path(path)}' is twice in the list of files, or out of order")
        if seen.get(names[:-1]) != "dir":
            raise ProtocolError(f"'{display_path(path)}' is not in a directory of the list")
        seen[names], last = entry.kind, names
        if entry.kind == "file":
            sound = bool(_DIGEST.fullmatch(entry.digest)) and entry.size >= 0 and not entry.target
        elif entry.kind == "dir":
            sound = (entry.size, entry.mode, entry.digest, entry.target) == (0, EXECUTABLE, "", "")
        else:
            target = to_bytes(entry.target)
            sound = (entry.size, entry.mode, entry.digest) == (0, PLAIN, "")
            sound = sound and 0 < len(target) <= MAX_PATH_BYTES and b"\0" not in target
        if not sound or entry.mode not in (PLAIN, EXECUTABLE):
            raise ProtocolError(f"'{display_path(entry.path)}' is not a valid {entry.kind} entry")
        if entry.kind == "link":
            links[path] = to_bytes(entry.target)
    for path in links:
        if leads_outside(path, links):
            raise ProtocolError(f"the link '{display_path(path)}' leads outside the directory")
    if limit_files is not None:
        _check_count(manifest.total_files, limit_files, "files")
        _check_count(len(manifest.entries) - manifest.total_files, limit_files, "directories")
    if limit_bytes is not None and manifest.total_bytes > limit_bytes:
        raise BadInput(f"the directory holds {manifest.total_bytes} bytes, {limit_bytes} are allowed")


def _check_count(count: int, limit: int, noun: str) -> None:
    if count > limit:
        raise BadInput(f"the list holds {count:,} {noun}, {limit:,} are allowed")


def _row(entry: ManifestEntry) -> _Row:
    return _Row(
        entry.kind[0],
        to_bytes(entry.path),
        entry.size,
        entry.mode == EXECUTABLE,
        bytes.fromhex(entry.digest),
        to_bytes(entry.target),
    )


def _decode(data: bytes) -> tuple[ManifestEntry, ...]:
    if len(data) > MAX_ENCODED_BYTES:
        raise BadInput(f"the list of files takes {len(data)} bytes, {MAX_ENCODED_BYTES} are allowed")
    try:
        rows = _rows_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"this is not a list of files: {error}") from error
    entries = []
    for row in rows:
        kind = _KINDS.get(row.kind)
        if kind is None or not 0 <= row.size < 1 << 63:
            raise ProtocolError(f"'{display_path(row.path)}' has an unknown kind or an invalid size")
        mode = EXECUTABLE if row.executable else PLAIN
        digest, target = row.digest.hex(), to_text(row.target)
        entries.append(ManifestEntry(to_text(row.path), kind, row.size, mode, digest=digest, target=target))
    return tuple(entries)
