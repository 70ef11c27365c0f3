"""A manifest has one encoding, and nothing hostile gets through its door."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.errors import BadInput, GridError, ProtocolError
from distributed_grid.trees.manifest import (
    EXECUTABLE,
    MAX_ENCODED_BYTES,
    MAX_ENTRIES,
    Manifest,
    ManifestEntry,
    decode,
    decode_listing,
    encode,
    encode_listing_pages,
    manifest_of,
)

DIGEST = hashlib.sha256(b"x").hexdigest()


def a_file(path: str, size: int = 1) -> ManifestEntry:
    return ManifestEntry(path, "file", size, digest=DIGEST)


def a_dir(path: str) -> ManifestEntry:
    return ManifestEntry(path, "dir", mode=EXECUTABLE)


def a_link(path: str, target: str) -> ManifestEntry:
    return ManifestEntry(path, "link", target=target)


def test_a_manifest_comes_back_as_it_was_names_that_are_not_utf_8_included() -> None:
    manifest = manifest_of([a_file("b/caf\udce9"), a_dir("b"), a_link("l", "b/caf\udce9"), a_file("b-c"), a_file("é")])
    assert decode(encode(manifest)) == manifest
    assert [entry.path for entry in manifest.entries] == ["b", "b/caf\udce9", "b-c", "l", "é"]


def test_the_order_in_which_files_were_found_does_not_change_the_identity() -> None:
    entries = [a_dir("d"), a_file("d/x"), a_file("a")]
    assert manifest_of(entries).digest == manifest_of(entries[::-1]).digest
    assert manifest_of(entries).digest != manifest_of(entries[:-1]).digest


HOSTILE = {
    "absolute": [a_file("/etc/passwd")],
    "parent": [a_file("../x")],
    "parent inside": [a_dir("a"), a_file("a/../../x")],
    "dot": [a_file("./x")],
    "empty": [a_file("")],
    "empty name": [a_dir("a"), a_file("a//x")],
    "trailing slash": [a_dir("a/")],
    "nul": [a_file("a\0b")],
    "twice": [a_file("a"), a_file("a")],
    "file and directory of one name": [a_file("a"), a_dir("a")],
    "out of order": [a_file("b"), a_file("a")],
    "below a file": [a_file("a"), a_file("a/b")],
    "below a link": [a_link("a", "b"), a_file("a/b")],
    "below nothing": [a_file("a/b")],
    "name too long": [a_file("x" * 256)],
    "path too long": [a_file("/".join(["x" * 99] * 42))],
    "too deep": [a_dir("/".join("a" * depth)) for depth in range(1, 102)],
    "absolute link": [a_link("l", "/etc")],
    "link out": [a_link("l", "..")],
    "link out of a directory": [a_dir("d"), a_link("d/l", "../../x")],
    "link out through a link": [
        a_dir("a"), a_dir("a/b"), a_link("a/b/out", "up/../.."), a_link("a/b/up", "../../x"), a_dir("x")
    ],
    "link to an absolute link": [a_link("a", "b/x"), a_link("b", "/etc")],
    "link without a target": [a_link("l", "")],
    "link with a nul": [a_link("l", "a\0b")],
    "file without a digest": [ManifestEntry("a", "file", 1)],
    "file with a short digest": [ManifestEntry("a", "file", 1, digest="ab")],
    "file with a target": [ManifestEntry("a", "file", 1, digest=DIGEST, target="b")],
    "directory with a size": [ManifestEntry("a", "dir", 5, EXECUTABLE)],
}  # fmt: skip


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused(entries: list[ManifestEntry]) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Manifest(tuple(entries))))


@pytest.mark.parametrize("target", ["x", "../x", "d/../../x", "nowhere/at/all", ".", "../d/l", "l"])
def test_links_that_stay_inside_are_fine_even_if_they_lead_nowhere(target: str) -> None:
    manifest = manifest_of([a_dir("d"), a_link("d/l", target), a_file("x")])
    assert decode(encode(manifest)) == manifest


def test_each_limit_is_kept_and_named() -> None:
    manifest = manifest_of([a_file("a", 600), a_file("b", 500)])
    assert decode(encode(manifest), limit_bytes=1100, limit_files=2) == manifest
    with pytest.raises(BadInput, match="1100 bytes, 1099 are allowed"):
        decode(encode(manifest), limit_bytes=1099)
    with pytest.raises(BadInput, match="2 files, 1 are allowed"):
        decode(encode(manifest), limit_files=1)
    with pytest.raises(BadInput, match="2 directories, 1 are allowed"):
        decode(encode(manifest_of([a_dir("a"), a_dir("b")])), limit_files=1)
    with pytest.raises(BadInput, match="are allowed"):
        decode(bytes(MAX_ENCODED_BYTES + 1))
    with pytest.raises(ProtocolError, match="not a list of files"):
        decode(b"\xdd" + (MAX_ENTRIES + 1).to_bytes(4, "big"))


@given(data=st.binary(max_size=60))
def test_any_other_bytes_are_refused_and_never_crash(data: bytes) -> None:
    try:
        manifest = decode(data)
    except GridError:
        return
    assert encode(manifest) == data


def test_another_spelling_of_the_same_manifest_is_refused() -> None:
    data = encode(manifest_of([a_file("a")]))
    assert data.startswith(b"\x91")
    with pytest.raises(ProtocolError, match="canonical form"):
        decode(b"\xdc\x00\x01" + data[1:])


SCRAPS = st.sampled_from(
    [b"", b".", b"..", b"a", b"b", b"/", b"/a", b"a/b", b"../a", b"a/../..", b"\0", b"\xff", b"a/.."]
)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["f", "d", "l", "x", ""]),
        SCRAPS,
        st.integers(-1, 2**64 - 1),
        st.booleans(),
        st.sampled_from([b"", b"ab", bytes(32)]),
        SCRAPS,
    ),
    max_size=5,
)


@given(rows=ROWS)
def test_what_gets_through_the_door_keeps_every_law(rows: list[tuple[object, ...]]) -> None:
    try:
        manifest = decode(msgspec.msgpack.encode(rows))
    except GridError:
        return
    paths = [entry.path for entry in manifest.entries]
    directories = {entry.path for entry in manifest.entries if entry.kind == "dir"}
    assert len(set(paths)) == len(paths)
    for entry in manifest.entries:
        assert not {"", ".", ".."} & set(entry.path.split("/"))
        assert "/" not in entry.path or entry.path.rpartition("/")[0] in directories
        assert not entry.target.startswith("/")


def test_a_listing_comes_back_and_holds_files_only() -> None:
    entries = (ManifestEntry("out/caf\udce9", "file", 7, EXECUTABLE), a_file("b"))
    assert decode_listing(*encode_listing_pages(entries, 9999), limit_files=2) == entries
    for bad in ([a_dir("a")], [a_link("a", "b")], [a_file("../x")], [a_file("a"), a_file("a")]):
        with pytest.raises(ProtocolError):
            decode_listing(*encode_listing_pages(bad, 9999), limit_files=9)
    with pytest.raises(BadInput, match="allowed"):
        decode_listing(*encode_listing_pages(entries, 9999), limit_files=1)


def test_a_listing_of_any_length_is_encoded_in_parts_of_bounded_size() -> None:
    entries = tuple(ManifestEntry(f"{number:03}-{'x' * number}", "file", number) for number in range(200))
    parts = encode_listing_pages(entries, 1000)
    assert max(map(len, parts)) <= 1000
    assert tuple(entry for part in parts for entry in decode_listing(part, limit_files=99)) == entries
    assert encode_listing_pages((), 1000) == [b""]
