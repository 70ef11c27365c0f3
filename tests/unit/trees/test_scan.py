"""A directory is taken as it is, quickly the second time, and refused in words when it cannot be."""

import hashlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from distributed_grid.errors import BadInput, GridError
from distributed_grid.trees.content_store import MAX_TREES, ContentStore
from distributed_grid.trees.ignore_rules import rules_for
from distributed_grid.trees.scan import ScanResult, Survey, scan_directory
from distributed_grid.trees.tree_writer import materialize
from tests.unit.trees.tree_files import Tree, read_tree, trees, write_tree

OLD_TREES: dict[str, Tree] = {
    "unchanged": {"a": b"one", "b": b"two", "sub/c": b"three"},
    "trimmed": {"a": b"one"},
    "damaged": {"a": b"one"},
}


@pytest.fixture(scope="module", autouse=True)
def new_trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made before the first test, so that they are old when the last ones of this file need them."""
    place = tmp_path_factory.mktemp("old")
    for name, tree in OLD_TREES.items():
        write_tree(place / name, tree)
    return place


@pytest.fixture(scope="module")
def old_trees(new_trees: Path) -> Path:
    """Trees old enough to be remembered: the change time is the kernel's, and cannot be set."""
    made_at_ns = max(path.stat().st_ctime_ns for path in new_trees.rglob("*"))
    while time.time_ns() < made_at_ns + 2_050_000_000:
        time.sleep(0.05)
    return new_trees


def names(result: ScanResult) -> list[str]:
    return [entry.path for entry in result.manifest.entries]


@given(tree=trees())
def test_what_was_taken_and_laid_out_is_the_same_tree(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    place = tmp_path_factory.mktemp("trip")
    root = write_tree(place / "from", tree)
    store = ContentStore(place / "store")
    manifest = scan_directory(root, store).manifest
    (place / "to").mkdir()
    materialize(manifest, store, place / "to")
    assert read_tree(place / "to") == read_tree(root)
    assert scan_directory(place / "to", store).manifest.digest == manifest.digest


def test_only_the_x_bit_of_a_mode_travels(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"run": b"#!", "read": b"", "d": None})
    (root / "run").chmod(0o4755)
    (root / "read").chmod(0o444)
    (root / "d").chmod(0o1777)
    manifest = scan_directory(root, store).manifest
    assert {entry.path: entry.mode for entry in manifest.entries} == {"run": 0o700, "read": 0o600, "d": 0o700}
    (tmp_path / "to").mkdir()
    materialize(manifest, store, tmp_path / "to")
    assert (tmp_path / "to/run").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "to/read").stat().st_mode & 0o7777 == 0o600


def test_what_has_only_just_changed_is_not_trusted(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"a": b"one"})
    assert [scan_directory(root, store).read_files for _ in range(2)] == [1, 1]


def test_sockets_fifos_and_devices_are_left_out_and_listed(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"a": b"one"})
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "sock"))
        result = scan_directory(root, store)
    assert names(result) == ["a"]
    assert [(one.path, one.reason) for one in result.skipped] == [("fifo", "is a fifo"), ("sock", "is a socket")]


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "../tree2/x", "sub/../../x"])
def test_a_link_that_leads_out_is_refused_by_name_unless_it_is_ignored(
    tmp_path: Path, store: ContentStore, target: str
) -> None:
    root = write_tree(tmp_path / "tree", {"sub": None, "good": "sub", "bad": target})
    with pytest.raises(BadInput, match=r"the link bad -> .* leads outside it; add it to \.gridignore"):
        scan_directory(root, store)
    (root / ".gridignore").write_text("bad\n")
    assert names(scan_directory(root, store)) == [".gridignore", "good", "sub"]


def test_too_many_bytes_are_refused_and_the_largest_are_named(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"ckpt.bin": b"", "data/x": b"", "data/deep/y": b"", "small": b"x"})
    os.truncate(root / "ckpt.bin", 11 << 27)
    os.truncate(root / "data/x", 3 << 30)
    os.truncate(root / "data/deep/y", 1 << 28)
    with pytest.raises(BadInput) as caught:
        scan_directory(root, store)
    assert str(caught.value) == (
        f"the directory {root} is too large to ship: more than 100 MB after the ignore rules"
        " (largest: data/ 3.2 GB, ckpt.bin 1.4 GB, small 1 bytes); add them to .gridignore,"
        " or use --workdir DIR or --workdir none"
    )
    (root / ".gridignore").write_text("data/\n*.bin\n")
    assert names(scan_directory(root, store)) == [".gridignore", "small"]


def test_too_many_files_or_directories_are_refused(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(
        tmp_path / "tree", {f"d{n % 2}/{n}": b"" for n in range(31)} | {f"e/{n}": None for n in range(30)}
    )
    with pytest.raises(BadInput, match=r"more than 30 files .*\(most: d0/ 16 files, d1/ 15 files\)"):
        scan_directory(root, store, limit_files=30)
    with pytest.raises(BadInput, match="more than 32 directories"):
        scan_directory(root, store, limit_files=32)
    assert scan_directory(root, store, limit_files=33).manifest.total_files == 31


def test_a_huge_tree_is_refused_without_looking_at_all_of_it(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", {f"d{n % 4}/{n}": b"" for n in range(1200)})
    fd = os.open(root, os.O_RDONLY)
    survey = Survey(fd, str(root), limit_bytes=10**9, limit_files=100, oversize_seconds=0)
    with pytest.raises(BadInput) as caught:
        survey.walk(rules_for(os.fsencode(root)))
    os.close(fd)
    found = re.search(
        r"more than 100 files after the ignore rules \(most so far: d\d/ (\d+) files\)", str(caught.value)
    )
    assert found
    assert 100 < int(found[1]) < 300


def test_nothing_is_read_through_a_link_that_takes_a_directorys_place(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"sub/a": b"mine", "aside": None})
    write_tree(tmp_path / "outside", {"a": b"secret"})
    over = threading.Event()

    def keep_swapping() -> None:
        while not over.is_set():
            os.rename(root / "sub", root / "aside/sub")
            os.symlink("../outside", root / "sub")
            os.unlink(root / "sub")
            os.rename(root / "aside/sub", root / "sub")

    swapper = threading.Thread(target=keep_swapping)
    swapper.start()
    taken = 0
    try:
        for _ in range(300):
            try:
                taken += scan_directory(root, store).manifest.total_bytes > 0
            except GridError:
                pass  # the link was seen, and refused
    finally:
        over.set()
        swapper.join()
    assert taken
    assert not store.has(hashlib.sha256(b"secret").hexdigest(), 6)


def test_a_file_that_never_comes_to_rest_is_refused_by_name(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {"busy.log": bytes(8 << 20)})
    over = threading.Event()

    def keep_writing() -> None:
        with open(root / "busy.log", "r+b") as file:
            while not over.is_set():
                file.seek(0)
                file.write(os.urandom(8))
                file.flush()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        with pytest.raises(BadInput, match=r"busy\.log keeps changing while it is read"):
            scan_directory(root, store)
    finally:
        over.set()
        writer.join()
    assert names(scan_directory(root, store)) == ["busy.log"]


def test_a_directory_that_is_not_there_is_refused_in_one_line(tmp_path: Path, store: ContentStore) -> None:
    with pytest.raises(BadInput, match="nowhere cannot be shipped: No such file"):
        scan_directory(tmp_path / "nowhere", store)


def test_a_store_or_state_inside_the_directory_is_not_shipped(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", {"a": b"one", "state/grid.db": b"x"})
    store = ContentStore(root / "cache" / "blobs")
    assert names(scan_directory(root, store, own_dirs=[root / "state"])) == ["a", "cache"]


@pytest.fixture
def a_common_user() -> Iterator[Path]:
    """A directory of somebody who is not root, and that user's rights for as long as the test takes."""
    with tempfile.TemporaryDirectory(prefix="grid-common-") as place:
        was = os.geteuid()
        if was == 0:
            os.chown(place, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(place)
        finally:
            os.seteuid(was)


def test_what_this_user_may_not_read_is_left_out_and_listed(a_common_user: Path) -> None:
    root = write_tree(a_common_user / "tree", {"a": b"one", "secret": b""})
    (root / "secret").chmod(0)
    result = scan_directory(root, ContentStore(a_common_user / "store"))
    assert names(result) == ["a"]
    assert [(one.path, one.reason) for one in result.skipped] == [("secret", "Permission denied")]


def test_an_unchanged_tree_is_not_read_again_and_a_changed_file_is(old_trees: Path, store: ContentStore) -> None:
    root = old_trees / "unchanged"
    first = scan_directory(root, store)
    second = scan_directory(root, store)
    assert (first.read_files, second.read_files) == (3, 0)
    assert first.manifest == second.manifest
    before = (root / "b").stat()
    (root / "b").write_bytes(b"TWO")
    os.utime(root / "b", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time: still noticed
    third = scan_directory(root, store)
    assert (third.read_files, third.manifest.digest != first.manifest.digest) == (1, True)


def test_a_blob_that_was_trimmed_is_put_back_by_the_next_scan(old_trees: Path, store: ContentStore) -> None:
    root = old_trees / "trimmed"
    manifest = scan_directory(root, store).manifest
    store.trim(0, grace_seconds=0)
    assert scan_directory(root, store).manifest == manifest
    assert store.missing(manifest.contents()) == []


def test_memory_of_other_trees_is_bounded_and_damage_to_it_costs_only_time(
    old_trees: Path, store: ContentStore
) -> None:
    root = old_trees / "damaged"
    scans = Path(store.root) / "scans"
    scans.mkdir()
    for n in range(MAX_TREES + 10):
        (scans / str(n)).write_bytes(b"")
        os.utime(scans / str(n), (n, n))
    scan_directory(root, store)
    kept = {path.name for path in scans.iterdir()}
    assert len(kept) == MAX_TREES
    assert "0" not in kept
    for path in scans.iterdir():
        path.write_bytes(b"\xc1 damaged")
    assert scan_directory(root, store).read_files == 1
    assert scan_directory(root, store).read_files == 0


SECRETS: Tree = {
    "a.py": b"1",
    ".env": b"TOKEN=s3cret",
    ".env.example": b"TOKEN=",
    "certs/cacert.pem": b"public",
    "certs/server.pem": b"private",
    ".ssh/id_rsa": b"private",
    ".ssh/old/id_rsa": b"private",
    ".ssh/config": b"Host x",
}
ORDINARY = [".env.example", "a.py", "certs", "certs/cacert.pem"]


def stored_contents(store: ContentStore) -> list[bytes]:
    return [path.read_bytes() for path in Path(store.root).rglob("*") if path.is_file()]


def test_secrets_are_neither_shipped_nor_stored_and_each_is_named_once(tmp_path: Path, store: ContentStore) -> None:
    result = scan_directory(write_tree(tmp_path / "tree", SECRETS), store)
    assert names(result) == ORDINARY
    assert result.withheld == (b".env", b".ssh/", b"certs/server.pem")
    assert result.skipped == ()
    assert not any(secret in content for content in stored_contents(store) for secret in (b"s3cret", b"private"))


@pytest.mark.parametrize(
    ("ship", "more", "withheld"),
    [
        ([".env"], [".env"], (b".ssh/", b"certs/server.pem")),
        (["certs/*.pem"], ["certs/server.pem"], (b".env", b".ssh/")),
        (
            [".ssh"],
            [".ssh", ".ssh/config", ".ssh/id_rsa", ".ssh/old", ".ssh/old/id_rsa"],
            (b".env", b"certs/server.pem"),
        ),
        (
            [".ssh/id_rsa"],
            [".ssh", ".ssh/id_rsa"],
            (b".env", b".ssh/config", b".ssh/old/", b"certs/server.pem"),
        ),
        (
            [".ssh/old/id_rsa"],
            [".ssh", ".ssh/old", ".ssh/old/id_rsa"],
            (b".env", b".ssh/config", b".ssh/id_rsa", b"certs/server.pem"),
        ),
        (
            ["**"],
            [".env", ".ssh", ".ssh/config", ".ssh/id_rsa", ".ssh/old", ".ssh/old/id_rsa", "certs/server.pem"],
            (),
        ),
    ],
)
def test_ship_lets_through_what_it_names_and_nothing_else(
    tmp_path: Path, store: ContentStore, ship: list[str], more: list[str], withheld: tuple[bytes, ...]
) -> None:
    result = scan_directory(write_tree(tmp_path / "tree", SECRETS), store, ship=ship)
    assert sorted(names(result)) == sorted([*ORDINARY, *more])
    assert result.withheld == withheld
    assert result.unused == ()


def test_a_pattern_that_names_no_secret_is_told(tmp_path: Path, store: ContentStore) -> None:
    result = scan_directory(write_tree(tmp_path / "tree", SECRETS), store, ship=["*.p12", "a.py"])
    assert result.unused == ("*.p12", "a.py")
    assert result.withheld == (b".env", b".ssh/", b"certs/server.pem")


def test_an_ignored_secret_is_not_named_and_ship_brings_it_back(tmp_path: Path, store: ContentStore) -> None:
    root = write_tree(tmp_path / "tree", {**SECRETS, ".gitignore": b".env\n", ".gridignore": b".ssh/\n"})
    (root / ".git").mkdir()
    assert scan_directory(root, store).withheld == (b"certs/server.pem",)
    result = scan_directory(root, store, ship=[".env", ".ssh"])
    assert {".env", ".ssh/id_rsa"} <= set(names(result))
    assert result.withheld == (b"certs/server.pem",)


@pytest.mark.parametrize(
    ("lines", "shipped"),
    [
        (b"!.env\n", {".env"}),
        (b"!/.env\n", {".env"}),
        (b"!*.pem\n", {"certs/server.pem"}),
        (b"!.ssh/\n", {".ssh/config", ".ssh/id_rsa", ".ssh/old/id_rsa"}),
        (b"!.ssh/\n.ssh/*\n!.ssh/id_rsa\n", {".ssh/id_rsa"}),
        (b"!*\n", set()),
        (b"!certs/**\n!.*\n", set()),
        (b"!.env\n.env\n", set()),
    ],
)
def test_an_explicit_line_of_gridignore_allows_a_secret(
    tmp_path: Path, store: ContentStore, lines: bytes, shipped: set[str]
) -> None:
    root = write_tree(tmp_path / "tree", {**SECRETS, ".gridignore": lines})
    taken = {path for path in names(scan_directory(root, store)) if isinstance(SECRETS.get(path), bytes)}
    assert taken == shipped | {".env.example", "a.py", "certs/cacert.pem"}


def test_a_link_named_like_a_secret_is_withheld_wherever_it_leads(tmp_path: Path, store: ContentStore) -> None:
    tree: Tree = {"a": b"", ".ssh": "/etc", ".env": "../shared.env", "key": ".ssh"}
    result = scan_directory(write_tree(tmp_path / "tree", tree), store)
    assert names(result) == ["a", "key"]
    assert result.withheld == (b".env", b".ssh")


def test_the_name_of_the_directory_itself_counts_for_its_files(tmp_path: Path, store: ContentStore) -> None:
    result = scan_directory(write_tree(tmp_path / ".docker", {"config.json": b"{}", "daemon.json": b"{}"}), store)
    assert names(result) == ["daemon.json"]
    assert result.withheld == (b"config.json",)
