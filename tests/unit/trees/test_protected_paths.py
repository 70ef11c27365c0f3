"""Paths that no returned file is ever written to."""

from __future__ import annotations

import pytest

from distributed_grid.trees.ignore_rules import ALWAYS_IGNORED
from distributed_grid.trees.secret_files import is_protected, is_unremarkable


def names(path: str) -> tuple[bytes, ...]:
    return tuple(path.encode().split(b"/"))


@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/pre-commit", ".git/config", "sub/.git/config", ".GIT/config", ".git./config", ".hg/hgrc",
        ".svn/entries",
        ".ssh/authorized_keys", ".bashrc", ".zshenv", ".profile", ".envrc", ".vimrc", ".gdbinit", "sitecustomize.py",
        ".vscode/tasks.json", ".idea/workspace.xml", ".husky/pre-commit", ".githooks/pre-push", ".cargo/config.toml",
        ".config/fish/config.fish", ".Rprofile", ".psqlrc", ".npmrc", ".gitconfig", "work/HEAD", ".gridignore",
        "pkg/__pycache__/m.pyc", ".venv/bin/python", "node_modules/x/index.js", ".distributed_grid/grid.db",
        ".dir-locals.el", ".env", "certs/server.key", ".aws/credentials", "id_ed25519",
    ],
)  # fmt: skip
def test_nothing_is_written_to_it(path: str) -> None:
    assert is_protected(names(path))


@pytest.mark.parametrize(
    "path",
    ["out/model.bin", "git/config", "a.git.txt", "head.txt", "HEADER", "results.log", ".hidden", "config/app.yaml",
     "bashrc", "src/train.py", ".gitignore", ".github/workflows/ci.yml", "profile", "venv/x"],
)  # fmt: skip
def test_ordinary_results_are_written(path: str) -> None:
    assert not is_protected(names(path))


def test_everything_that_is_never_shipped_is_never_written_back() -> None:
    for pattern in ALWAYS_IGNORED.decode().split():
        assert is_protected((pattern.rstrip("/").encode(), b"file")), pattern


def test_caches_of_programs_are_left_out_without_a_word() -> None:
    assert is_unremarkable(names("pkg/__pycache__/m.pyc"))
    assert not is_unremarkable(names(".git/config"))
