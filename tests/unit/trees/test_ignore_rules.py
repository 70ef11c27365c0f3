"""Which files are left out, compared with what git itself says."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.trees.ignore_rules import rules_for
from distributed_grid.trees.scan import Survey
from tests.unit.trees.tree_files import Tree, read_tree, trees, write_tree

QUIET = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": "/nonexistent",
    "PATH": os.environ["PATH"],
}


def shipped(root: Path, *, own: tuple[Path, ...] = ()) -> set[str]:
    """Shipped part of the tree, directories included."""
    fd = os.open(root, os.O_RDONLY)
    try:
        survey = Survey(fd, str(root), limit_bytes=10**9, limit_files=10**6)
        survey.walk(rules_for(os.fsencode(root.resolve()), own_dirs=[os.fsencode(place.resolve()) for place in own]))
    finally:
        os.close(fd)
    return {os.fsdecode(found.path) for found in survey.found}


@pytest.fixture(scope="module")
def git_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty repository; its work tree is whatever a test says."""
    place = str(tmp_path_factory.mktemp("repository") / "git")
    subprocess.run(["git", "init", "-q", "--bare", place], check=True, env=QUIET)
    return place


def not_ignored_by_git(root: Path, git_dir: str, top: Path | None = None) -> set[str]:
    """What git would not ignore of the tree below `root`, in the work tree at `top`."""
    top = top or root
    paths = [path for path in read_tree(root) if path.partition("/")[0] != ".git"]
    asked = b"".join(os.fsencode(root.relative_to(top) / path) + b"\0" for path in paths)
    command = ["git", f"--git-dir={git_dir}", f"--work-tree={top}", "check-ignore", "-z", "--stdin"]
    done = subprocess.run(command, input=asked, cwd=top, env=QUIET, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    ignored = {os.fsdecode(path) for path in done.stdout.split(b"\0") if path}
    return {path for path in paths if str(root.relative_to(top) / path) not in ignored}


FILES: Tree = {
    path: b"x"
    for path in [
        "a", "b", "ab", "abc", "a.o", "b.o", "a.c", "A.o", "foo", "foo.txt", "doc/frotz", "a/doc/frotz2", "sub/a.o",
        "sub/deep/a.o", "sub/deep/er/foo", "sub/build/x", "build2/x", "src/build/y", "src/foo/z", "x/y/z/w", "x/z",
        "sp ace", "trail ", "#hash", "!bang", "[br]", "back\\slash", "*star", "q?", "ä", "a-b", "a]b", "5", "d/5",
        "foo1/bar/baz", "foo2/bar", "deep/1/2/3/4/foo", "sub/.hidden", ".hidden/x", "tab\t", "x.tar.gz", "x.gz.tar.gz",
    ]
    if path not in ("a", "foo")
}  # fmt: skip
PATTERNS = [
    "*.o", "*.o\n!a.o", "!a.o\n*.o", "/a.c", "/*.o", "foo", "foo/", "/foo", "foo/*", "foo/**", "**/foo", "**/foo/",
    "sub/**/a.o", "sub/**", "sub/*", "**", "*", "/*", "/**", "**/", "*/", "*\n!*/\n!*.o", "sub/", "sub/\n!sub/a.o",
    "sub/*\n!sub/deep", "sub/*\n!sub/deep/\nsub/deep/*\n!sub/deep/er", "doc/frotz", "doc/frotz/", "frotz", "/doc",
    "a?c", "a?", "[ab].o", "[!a].o", "[^a].o", "[a-c]*", "[]]", "a[]-]b", "[", "[a", "a[b", "\\", "foo\\", "\\#hash",
    "#hash", "\\!bang", "!bang", "\\*star", "[[]br]", "\\[br]", "back\\\\slash", "sp\\ ace", "trail", "trail ",
    "trail\\ ", "trail\\  ", "q\\?", "?", "??", "???", "ä", "a*b", "a**b", "x/**/z", "x/**/w", "**/z/**", "x/*/z",
    "**/build", "build/", "build*", "src/**/build/", "**/**/a.o", "sub/**/**", "***", "***/foo", "foo***", "*.tar.gz",
    "x*.tar.gz", "x*z*.gz", "[[:digit:]]", "[[:alpha:]].o", "[[:nope:]]", "[[:digit:]", "[a-]b", "[--a]b", "[b-a]",
    "[\\]]", "[\\", "a/", "//", "/", "!", "", " ", "foo//", "a//b", "./foo", "../foo", "sub/../foo", "x/y/", "/x/y/z",
    "y/z", "5", "/5", "d/", "!d/\nd/", "d/\n!d/", "d/\n!d/5", "deep/**/foo", "deep/**/3", "**/3/4/", "*/*/*", "tab\t",
    "tab", "*.o\r", "*.o\r\n!a.o\r\n", "\ufeff*.o", "foo1/**/baz", "foo?/bar", "sub/[d]eep", "sub[/]deep", "sub\\/deep",
    "**\\/foo", "a[!/]b", ".*", ".hidden", ".hidden/", "sub/.hidden", "*a*b*c", "?*?", "**a", "a**", "**a/**", "**.o",
    "src/**.o", "sub/**a.o", "*.[oc]", "\\a.o", "[a-c-e].o", "[[:upper:][:digit:]]*",
]  # fmt: skip


@pytest.fixture(scope="module")
def files_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("files_tree"), FILES)


@pytest.mark.parametrize("patterns", PATTERNS)
def test_a_gitignore_means_what_git_says_it_means(files_tree: Path, git_dir: str, patterns: str) -> None:
    (files_tree / ".gitignore").write_bytes(patterns.encode())
    assert shipped(files_tree) == not_ignored_by_git(files_tree, git_dir)


def test_stars_that_are_only_part_of_a_name_stay_within_it(tmp_path: Path) -> None:
    """As git's manual has it; git itself forgets this where plain letters come first (`sub**/a.o`)."""
    write_tree(tmp_path, {".gitignore": b"sub**/a.o", "sub/a.o": b"", "sub2/a.o": b"", "sub/deep/a.o": b""})
    assert shipped(tmp_path) == {".gitignore", "sub", "sub2", "sub/deep", "sub/deep/a.o"}


PIECES = st.sampled_from(
    ["a", "b", "c.txt", "build", "*", "**", "?", "/", "!", "\\", "[a-c]", "[!a]", " ", "é", ".", "x"]
)
ODD_IN_GIT = re.compile(r"^!?[^*?\[\\\n]*[^*?\[\\\n/]\*\*+(/|$)", re.MULTILINE)  # see the test above
LINES = (
    st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=5)
    .map("\n".join)
    .filter(lambda lines: not ODD_IN_GIT.search(lines))
)


@settings(max_examples=60)
@given(tree=trees(), top=LINES, nested=LINES)
def test_random_rules_over_random_trees_agree_with_git(
    tmp_path_factory: pytest.TempPathFactory, git_dir: str, tree: Tree, top: str, nested: str
) -> None:
    root = write_tree(tmp_path_factory.mktemp("tree"), tree)
    (root / ".gitignore").write_text(top)
    for path in read_tree(root):
        if (root / path).is_dir() and not (root / path).is_symlink() and len(path) % 2:
            (root / path / ".gitignore").write_text(nested)
    assert shipped(root) == not_ignored_by_git(root, git_dir)


def test_rules_deeper_down_outrank_those_above(tmp_path: Path, git_dir: str) -> None:
    write_tree(
        tmp_path, {".gitignore": b"*.log\n", "sub/.gitignore": b"!keep.log\n", "sub/keep.log": b"", "keep.log": b""}
    )
    assert (
        shipped(tmp_path)
        == not_ignored_by_git(tmp_path, git_dir)
        == {".gitignore", "sub", "sub/.gitignore", "sub/keep.log"}
    )


def test_a_gridignore_has_the_last_word_over_every_gitignore(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            ".gitignore": b"data/\n*.log\n",
            ".gridignore": b"!data/\ndata/*\n!data/model.bin\nnotes.txt\n",
            "data/model.bin": b"",
            "data/huge.bin": b"",
            "notes.txt": b"",
            "sub/.gitignore": b"!notes.txt",
            "sub/notes.txt": b"",
            "x.log": b"",
        },
    )
    assert shipped(tmp_path) == {".gitignore", ".gridignore", "data", "data/model.bin", "sub", "sub/.gitignore"}


def test_what_nobody_wants_is_left_out_unless_a_gridignore_brings_it_back(tmp_path: Path) -> None:
    parts = [".git/x", ".hg/x", "p/__pycache__/x", ".venv/x", "node_modules/x", ".distributed_grid/x"]
    write_tree(tmp_path, dict.fromkeys(parts, b"x") | {".gitignore": b"!.venv/\n!__pycache__/\n"})
    assert shipped(tmp_path) == {".gitignore", "p"}
    (tmp_path / ".gridignore").write_text("!.venv/\n!p/__pycache__/\n")
    assert shipped(tmp_path) == {
        ".gitignore",
        ".gridignore",
        "p",
        "p/__pycache__",
        "p/__pycache__/x",
        ".venv",
        ".venv/x",
    }


@pytest.mark.parametrize("name", ["state", "st*te [x]!", "#s", "tr "])
def test_the_grids_own_state_is_left_out_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path, {f"sub/{name}/grid.db": b"", "sub/state2": b"", "stzte x": b""})
    assert shipped(tmp_path, own=(tmp_path / "sub" / name,)) == {"sub", "sub/state2", "stzte x"}


@pytest.mark.parametrize("patterns", ["*.o", "/proj/*.o", "sub/*.o", "proj/sub/", "/*.o", "a.o\n!proj/a.o", "**/sub/*"])
def test_the_rules_of_the_work_tree_around_the_directory_count(tmp_path: Path, git_dir: str, patterns: str) -> None:
    write_tree(
        tmp_path, {".gitignore": patterns.encode(), "proj/a.o": b"", "proj/b": b"", "proj/sub/a.o": b"", ".git": None}
    )
    assert shipped(tmp_path / "proj") == not_ignored_by_git(tmp_path / "proj", git_dir, tmp_path)


@pytest.mark.parametrize("patterns", ["proj/", "*", "/*", "out", "/proj/out/", "*\n!keep"])
def test_rules_above_that_leave_out_the_directory_itself_do_not_count(tmp_path: Path, patterns: str) -> None:
    write_tree(tmp_path, {".git": None, ".gitignore": patterns.encode(), "proj/out/a": b""})
    assert shipped(tmp_path / "proj" / "out") == {"a"}


def test_a_directory_brought_back_in_between_has_the_rules_above(tmp_path: Path) -> None:
    tree: Tree = {".git": None, ".gitignore": b"out\na\n", "proj/.gitignore": b"!out\n", "proj/out/a": b""}
    assert shipped(write_tree(tmp_path, tree) / "proj" / "out") == set()


def test_without_a_work_tree_nothing_above_counts(tmp_path: Path) -> None:
    write_tree(tmp_path, {".gitignore": b"*", "proj/a": b""})
    assert shipped(tmp_path / "proj") == {"a"}


def test_an_ignore_file_that_is_a_link_or_a_directory_holds_no_rules(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {"rules": b"*", "sub/.gitignore": "../rules", "sub/a": b"", "d/.gridignore/x": b"", "d/a": b""}
    )
    assert {"sub/a", "d/a", "rules"} < shipped(tmp_path)
