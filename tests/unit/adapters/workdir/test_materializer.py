"""What is laid out is exactly the manifest, and never a byte outside the target."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.adapters.workdir import ContentMissing, ContentStore, Manifest, ManifestEntry, lay_out, scan
from distributed_grid.adapters.workdir.manifest import EXECUTABLE
from distributed_grid.errors import GridError, Refused, StoreFailed
from tests.unit.adapters.workdir.trees import Tree, look, plant

TREE: Tree = {"a": b"one", "sub/b": b"two" * 100_000, "sub/deep/empty": b"", "l": "sub/b", "sub/d": None}


@pytest.fixture
def taken(tmp_path: Path, store: ContentStore) -> Manifest:
    return scan(plant(tmp_path / "from", TREE), store).manifest


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


def test_a_second_call_finds_everything_done(taken: Manifest, store: ContentStore, target: Path) -> None:
    first, second = lay_out(taken, store, target), lay_out(taken, store, target)
    assert (first.written, first.kept, second.written, second.kept) == (4, 0, 0, 4)


def test_an_open_directory_does_as_well_as_its_path(taken: Manifest, store: ContentStore, target: Path) -> None:
    fd = os.open(target, os.O_RDONLY)
    lay_out(taken, store, fd)
    os.close(fd)  # it is still the caller's
    assert look(target) == look(target.parent / "from")


def test_what_a_crash_left_is_mended(taken: Manifest, store: ContentStore, target: Path) -> None:
    plant(target, {"a": b"on", "sub/b": bytes(300_000), "l": "elsewhere", "sub/deep": None, "other": b"stays"})
    (target / "l").unlink()
    (target / "l").symlink_to("/etc/passwd")
    laid = lay_out(taken, store, target)
    assert laid.written == 4
    assert look(target) == look(target.parent / "from") | {"other": b"stays"}


def test_a_file_in_place_of_a_link_and_a_link_in_place_of_a_file_are_replaced(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    outside = target.parent / "outside"
    outside.write_bytes(b"untouched")
    plant(target, {"l": b"a file", "a": "../outside"})
    lay_out(taken, store, target)
    assert look(target) == look(target.parent / "from")
    assert outside.read_bytes() == b"untouched"


def test_a_link_on_the_way_is_refused_and_nothing_goes_through_it(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    (target.parent / "outside").mkdir()
    (target / "sub").symlink_to("../outside")
    with pytest.raises(Refused, match="sub: is a link, and links are not followed"):
        lay_out(taken, store, target)
    assert look(target.parent / "outside") == {}


def test_a_job_that_writes_into_its_files_does_not_change_the_store(
    taken: Manifest, store: ContentStore, target: Path
) -> None:
    lay_out(taken, store, target)
    with open(target / "sub/b", "r+b") as file:
        file.write(b"changed")
    (target.parent / "again").mkdir()
    lay_out(taken, store, target.parent / "again")
    assert look(target.parent / "again") == look(target.parent / "from")


def test_missing_contents_are_named_before_anything_is_made(taken: Manifest, store: ContentStore, target: Path) -> None:
    for digest in taken.blobs():
        (Path(store.root) / digest[:2] / digest).unlink()
    with pytest.raises(ContentMissing, match="3 of the files needed") as caught:
        lay_out(taken, store, target)
    assert set(caught.value.digests) == set(taken.blobs())
    assert look(target) == {}


def test_a_store_on_another_disk_serves_as_well(small_disk: Path, tmp_path: Path) -> None:
    root = plant(tmp_path / "from", TREE)
    store = ContentStore(small_disk / "store")
    (tmp_path / "to").mkdir()
    lay_out(scan(root, store).manifest, store, tmp_path / "to")
    assert look(tmp_path / "to") == look(root)


def test_a_full_disk_is_said_and_the_rest_follows_when_there_is_room(
    small_disk: Path, tmp_path: Path, store: ContentStore
) -> None:
    root = plant(tmp_path / "from", {name: name.encode() * 900_000 for name in "ab"})
    manifest = scan(root, store).manifest
    plant(small_disk, {"ballast": bytes(1 << 20), "to": None})
    with pytest.raises(StoreFailed, match="No space left"):
        lay_out(manifest, store, small_disk / "to")
    assert set(look(small_disk / "to")) == {"a"}
    (small_disk / "ballast").unlink()
    lay_out(manifest, store, small_disk / "to")
    assert look(small_disk / "to") == look(root)


PATHS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "out"]), min_size=1, max_size=3).map("/".join)
TARGETS = st.one_of(PATHS, st.just("/tmp"), st.just("../outside"), st.just("../../outside"))


@given(data=st.data())
def test_no_manifest_whatever_it_says_writes_outside_the_target(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    store = ContentStore(place / "store")
    digest = store.keep(b"owned")
    plant(place, {"outside/a": b"safe", "jobs/to": None})
    if data.draw(st.booleans()):
        (place / "jobs/to/b").symlink_to("../../outside")
    entry = st.one_of(
        st.builds(lambda path: ManifestEntry(path, "file", 5, digest=digest), PATHS),
        st.builds(lambda path: ManifestEntry(path, "dir", mode=EXECUTABLE), PATHS),
        st.builds(lambda path, target: ManifestEntry(path, "link", target=target), PATHS, TARGETS),
    )
    entries = data.draw(st.lists(entry, max_size=6))
    if data.draw(st.booleans()):
        entries = sorted({entry.path: entry for entry in entries}.values(), key=lambda entry: entry.path.split("/"))
    try:
        lay_out(Manifest(tuple(entries)), store, place / "jobs/to")
    except GridError:
        pass
    assert look(place / "outside") == {"a": b"safe"}
    assert sorted(os.listdir(place / "jobs")) == ["to"]
    assert sorted(os.listdir(place)) == ["jobs", "outside", "store"]
    for folder, _, names in os.walk(place / "jobs/to"):
        for name in names:
            if name != "b":  # planted above
                assert os.path.realpath(os.path.join(folder, name)).startswith(str(place / "jobs/to"))
