"""Results of attempts, counted without an agent: unchanged shipped files are none."""

from __future__ import annotations

from pathlib import Path

from distributed_grid.agent.files.result_listing import list_results
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.trees.manifest import ManifestEntry, encode, manifest_of


def attempt(directory: Path, name: str, **files: bytes) -> None:
    work = directory / "jobs" / name / "work"
    work.mkdir(parents=True)
    for path, content in files.items():
        (work / path).write_bytes(content)


def test_files_that_were_made_or_changed_count_and_shipped_ones_do_not(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "content")
    shipped = manifest_of([ManifestEntry(name, "file", 3, 0o600, store.add(name.encode())) for name in ("one", "two")])
    digest = store.add(encode(shipped))
    attempt(tmp_path, "unchanged.1", one=b"one", two=b"two")
    attempt(tmp_path, "changed.1", one=b"ONE", two=b"two", made=b"12345")
    asked = {"unchanged.1": digest, "changed.1": digest, "gone.1": digest, "nothing.1": ""}
    attempt(tmp_path, "nothing.1")
    assert list_results(tmp_path, asked) == {"changed.1": (2, 8)}


def test_without_the_list_of_shipped_files_every_file_counts(tmp_path: Path) -> None:
    attempt(tmp_path, "a.1", one=b"one")
    assert list_results(tmp_path, {"a.1": "0" * 64}) == {"a.1": (1, 3)}
    (tmp_path / "content").mkdir()
    assert list_results(tmp_path, {"a.1": "0" * 64}) == {"a.1": (1, 3)}


def test_caches_are_no_results_and_a_name_that_leads_elsewhere_is_a_problem(tmp_path: Path) -> None:
    attempt(tmp_path, "a.1")
    cache = tmp_path / "jobs" / "a.1" / "work" / "src" / "__pycache__"
    cache.mkdir(parents=True)
    (cache / "x.pyc").write_bytes(b"x")
    found = list_results(tmp_path, {"a.1": "", "../jobs/a.1": ""})
    assert found == {"../jobs/a.1": "not a safe attempt id: '../jobs/a.1'"}
