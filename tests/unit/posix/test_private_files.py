"""Files that were found: used only where nobody else could have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed_grid.posix.private_files import distrust_of

OTHER = 12345


@pytest.fixture
def found(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir(mode=0o755)
    file = folder / "cluster.yaml"
    file.write_text("name: mine\n")
    file.chmod(0o644)
    return file


def give_to(path: Path, user: int, group: int = -1) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    os.chown(path, user, group, follow_symlinks=False)


def test_what_is_ones_own_is_trusted(found: Path) -> None:
    assert distrust_of(str(found)) is None


@pytest.mark.parametrize(("part", "name"), [("file", "it belongs"), ("folder", "its folder belongs")])
def test_what_belongs_to_somebody_else_is_not(found: Path, part: str, name: str) -> None:
    give_to(found if part == "file" else found.parent, OTHER)
    assert distrust_of(str(found)) == f"{name} to uid {OTHER}, not to you"


@pytest.mark.parametrize(("part", "name"), [("file", "it"), ("folder", "its folder")])
def test_what_everybody_may_write_to_is_not(found: Path, part: str, name: str) -> None:
    (found if part == "file" else found.parent).chmod(0o757)
    assert distrust_of(str(found)) == f"everybody may write to {name}"


@pytest.mark.parametrize("part", ["file", "folder"])
def test_what_a_group_may_write_to_is_trusted_only_where_the_group_is_the_callers_own(found: Path, part: str) -> None:
    path = found if part == "file" else found.parent
    path.chmod(0o775)
    give_to(path, 0, 0)  # root's own group has nobody else in it
    assert distrust_of(str(found)) is None
    give_to(path, 0, OTHER)
    assert f"the group {OTHER} may write to" in (distrust_of(str(found)) or "")


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_link_that_somebody_else_made_is_not_followed(found: Path, tmp_path: Path, part: str) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    if part == "folder":
        link = stranger / "config"
        link.symlink_to(found.parent)
        path = link / found.name
    else:
        (stranger / "config").mkdir()
        link = path = stranger / "config" / found.name
        link.symlink_to(found)
    assert distrust_of(str(path)) is None
    give_to(link, OTHER)
    assert f"belongs to uid {OTHER}" in (distrust_of(str(path)) or "")


def test_what_cannot_be_examined_is_not_trusted(tmp_path: Path) -> None:
    assert distrust_of(str(tmp_path / "missing" / "cluster.yaml")) == "it cannot be examined: No such file or directory"
