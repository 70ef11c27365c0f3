"""A blob is whole or absent, whoever else uses the store and whoever dies in it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_grid.errors import ProtocolError, StoreFailed
from distributed_grid.trees.content_store import ContentMissing, ContentStore


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_in(store: ContentStore) -> list[str]:
    return sorted(path.name for path in Path(store.root).rglob("*") if path.is_file())


def age(store: ContentStore, digest: str, seconds: float) -> None:
    path = Path(store.root) / digest[:2] / digest
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_what_was_put_can_be_read_and_is_private(store: ContentStore) -> None:
    content = b"hello" * 1000
    store.put(digest_of(content), [content[:7], content[7:]], size=len(content))
    with store.open(digest_of(content)) as file:
        assert file.read() == content
    path = Path(store.root) / digest_of(content)[:2] / digest_of(content)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {place.stat().st_mode & 0o777 for place in (Path(store.root), path.parent)} == {0o700}


def test_putting_twice_is_harmless(store: ContentStore) -> None:
    for _ in range(2):
        assert store.add(b"x") == digest_of(b"x")
        store.put(digest_of(b"x"), [b"x"])
    assert files_in(store) == [digest_of(b"x")]


@pytest.mark.parametrize(("parts", "size"), [([b"other"], None), ([b"xy"], 1), ([b""], 1), ([], None), ([b"y"], 1)])
def test_content_that_is_not_what_was_promised_is_refused_and_not_kept(
    store: ContentStore, parts: list[bytes], size: int | None
) -> None:
    with pytest.raises(ProtocolError):
        store.put(digest_of(b"x"), parts, size=size)
    assert files_in(store) == []


@pytest.mark.parametrize("digest", ["", "ab", "../../../../etc/passwd", "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
def test_only_a_digest_is_a_name(store: ContentStore, digest: str) -> None:
    for use in (store.open, lambda name: store.has(name, 0), lambda name: store.put(name, [])):
        with pytest.raises(ProtocolError):
            use(digest)


def test_what_is_missing_is_said_and_what_was_cut_short_counts_as_missing(store: ContentStore) -> None:
    here, cut = store.add(b"here"), store.add(b"cut short")
    os.truncate(Path(store.root) / cut[:2] / cut, 0)
    absent = digest_of(b"absent")
    assert store.missing({here: 4, cut: 9, absent: 6}) == [cut, absent]
    with pytest.raises(ContentMissing) as caught:
        store.open(absent)
    assert caught.value.digests == (absent,)
    store.put(cut, [b"cut short"])
    assert store.missing({cut: 9}) == []


def test_trimming_takes_what_was_not_used_for_longest(store: ContentStore) -> None:
    old, older, asked, kept, new = (store.add(bytes([n]) * 100) for n in range(5))
    for days, digest in ((2, old), (3, older), (5, asked), (6, kept)):
        age(store, digest, days * 86400)
    store.missing({asked: 100})
    assert store.trim(300, keep={kept}) == 200
    assert set(files_in(store)) == {asked, kept, new}
    assert store.trim(0) == 100  # what is in use stays
    assert set(files_in(store)) == {asked, new}
    assert store.trim(0, grace_seconds=0) == 200


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(store: ContentStore) -> None:
    script = (
        "import os, sys\nfrom distributed_grid.trees.content_store import ContentStore\n"
        "ContentStore(sys.argv[1]).writer().write(b'half')\nos._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, store.root], check=False).returncode == 9
    assert len(files_in(store)) == 1
    with store.writer() as living:
        living.write(b"abc")
        ContentStore(store.root)
        assert len(files_in(store)) == 1
        assert living.finish() == digest_of(b"abc")
    assert files_in(store) == [digest_of(b"abc")]


def test_leaving_a_writer_unfinished_leaves_nothing(store: ContentStore) -> None:
    with store.writer() as writer:
        writer.write(b"abc")
    assert files_in(store) == []


def test_several_processes_at_once_lose_nothing(store: ContentStore) -> None:
    script = (
        "import sys\nfrom distributed_grid.trees.content_store import ContentStore\n"
        "for n in range(60):\n"
        "    store = ContentStore(sys.argv[1])\n    store.add(b'%d' % n)\n    store.trim(10**9)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, store.root]) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert store.missing({digest_of(b"%d" % n): len(b"%d" % n) for n in range(60)}) == []
    assert len(files_in(store)) == 60


def test_a_full_disk_is_said_and_leaves_nothing(small_disk: Path) -> None:
    store = ContentStore(small_disk / "store", durable=True)
    with pytest.raises(StoreFailed, match="No space left"):
        store.add(bytes(3 << 20))
    assert files_in(store) == []
    store.add(b"small")
