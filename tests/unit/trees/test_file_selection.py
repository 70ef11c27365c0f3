"""Only what was asked for is listed, and nothing outside the job's directory."""

import os
from pathlib import Path

import pytest

from distributed_grid.errors import BadInput
from distributed_grid.trees.file_selection import FilePatterns, select_files
from distributed_grid.trees.paths import open_inside, open_root
from tests.unit.trees.tree_files import write_tree


@pytest.fixture
def job(tmp_path: Path) -> Path:
    files = [
        "a.txt",
        "b.txt",
        "model.bin",
        "out/x",
        "out/deep/y.txt",
        "out/.hidden",
        "logs/1.log",
        "logs/d/2.log",
        "caf\udce9",
    ]
    return write_tree(
        tmp_path / "job", {path: path.encode("utf-8", "surrogateescape") for path in files} | {"empty": None}
    )


def listed(job: Path, *patterns: str) -> list[str]:
    return [entry.path for entry in select_files(job, patterns).entries]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "out/deep/y.txt"]),
        ("out/**", ["out/.hidden", "out/deep/y.txt", "out/x"]),
        ("out", ["out/.hidden", "out/deep/y.txt", "out/x"]),
        ("./out/", ["out/.hidden", "out/deep/y.txt", "out/x"]),
        ("out/*", ["out/.hidden", "out/deep/y.txt", "out/x"]),
        ("*/deep", ["out/deep/y.txt"]),
        ("model.bin", ["model.bin"]),
        ("logs/**/2.log", ["logs/d/2.log"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("caf?", ["caf\udce9"]),
        ("empty", []),
    ],
)
def test_a_pattern_finds_what_it_says(job: Path, pattern: str, expected: list[str]) -> None:
    assert listed(job, pattern) == expected
    assert select_files(job, [pattern]).unmatched == ()


def test_everything_is_everything_once(job: Path) -> None:
    assert len(listed(job, "**", ".", "*", "out/x")) == 9


def test_sizes_and_x_bits_are_told_and_patterns_without_a_match_too(job: Path) -> None:
    (job / "model.bin").chmod(0o755)
    found = select_files(job, ["model.bin", "nothing/*"])
    assert [(entry.path, entry.size, entry.mode) for entry in found.entries] == [("model.bin", 9, 0o700)]
    assert found.unmatched == ("nothing/*",)


@pytest.mark.parametrize("pattern", ["/etc/*", "../x", "out/../../x", "", "~/x", "a\0b"])
def test_patterns_that_point_elsewhere_are_refused(job: Path, pattern: str) -> None:
    with pytest.raises(BadInput):
        select_files(job, [pattern])


def test_a_link_inside_counts_as_its_file_and_one_that_leads_out_is_skipped(job: Path) -> None:
    write_tree(
        job,
        {
            "l/latest": "../out/x", "l/out": "../../secret", "l/abs": "/etc/passwd", "l/dir": "../out",
            "l/loop": "loop",
            "l/chain": "latest", "l/sly": "up/../../../secret", "l/up": "../out/deep", "l/gone": "nothing",
        },
    )  # fmt: skip
    (job.parent / "secret").write_bytes(b"secret")
    found = select_files(job, ["l"])
    assert [entry.path for entry in found.entries] == ["l/chain", "l/latest"]
    reasons = {one.path: one.reason for one in found.skipped}
    assert set(reasons) == {"l/out", "l/abs", "l/dir", "l/loop", "l/sly", "l/up", "l/gone"}
    assert reasons["l/out"] == reasons["l/abs"] == reasons["l/sly"] == "leads outside the directory"
    root = open_root(job)
    fd = open_inside(root, b"l/chain")
    assert os.read(fd, 99) == b"out/x"
    os.close(fd)
    os.close(root)


def test_a_directory_that_is_a_link_is_not_entered(job: Path) -> None:
    write_tree(job.parent / "elsewhere", {"x.txt": b""})
    (job / "there").symlink_to("../elsewhere")
    assert listed(job, "there/*", "there/x.txt", "**/x.txt") == []


def test_fifos_are_skipped_and_never_waited_for(job: Path) -> None:
    os.mkfifo(job / "fifo")
    assert [one.path for one in select_files(job, ["fifo"]).skipped] == ["fifo"]


def test_the_limits_are_kept(job: Path) -> None:
    with pytest.raises(BadInput, match="more than 3 files match"):
        select_files(job, ["**"], limit_files=3)
    with pytest.raises(BadInput, match="more than 10 bytes"):
        select_files(job, ["**"], limit_bytes=10)


def test_the_receiving_side_can_tell_what_it_did_not_ask_for() -> None:
    patterns = FilePatterns(["out/**", "*.txt"])
    assert patterns.matches("out/a/b") == [0]
    assert patterns.matches("x.txt") == [1]
    assert patterns.matches(".git/hooks/pre-commit") == []
