"""Files of the caller's directory that are shipped, and cases without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_grid.client.job_payload import NONE, WorkdirUpload, upload_workdir
from distributed_grid.errors import BadInput
from distributed_grid.state_dir import StateDir


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


@pytest.mark.parametrize("far", [(), ("gpu2",)], ids=["this machine alone", "other machines too"])
def test_a_directory_that_is_not_there_is_refused_wherever_the_job_would_run(
    state_dir: StateDir, far: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput, match="no such directory"):
        upload_workdir("/nowhere", state_dir, nodes=("here", *far), far=far)
    assert not state_dir.root.exists()


def test_nothing_is_shipped_where_no_other_machine_may_get_the_job(state_dir: StateDir, tmp_path: Path) -> None:
    nodes = ("here", "gpu2")
    assert upload_workdir(None, state_dir, nodes=("here",), far=()) == WorkdirUpload()
    assert upload_workdir(NONE, state_dir, nodes=nodes, far=("gpu2",)) == WorkdirUpload()
    assert upload_workdir(None, state_dir, nodes=nodes, far=("gpu2",), isolated=True) == WorkdirUpload()
    assert upload_workdir(str(tmp_path), state_dir, nodes=nodes, far=("gpu2",), require=("here",)) == WorkdirUpload(
        require=("here",)
    )


def test_the_same_tree_has_the_same_name(state_dir: StateDir, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("one")
    first = upload_workdir(None, state_dir, nodes=("gpu2",), far=("gpu2",), here=str(tree))
    assert len(first.workdir) == 64
    assert upload_workdir(str(tree), state_dir, nodes=("gpu2",), far=("gpu2",)) == first
    (tree / "a").write_text("two")
    assert upload_workdir(str(tree), state_dir, nodes=("gpu2",), far=("gpu2",)).workdir != first.workdir


def test_a_link_that_leads_out_keeps_the_job_here_or_refuses_it(state_dir: StateDir, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "out").symlink_to("/etc/passwd")
    stays = upload_workdir(None, state_dir, nodes=("here", "gpu2"), far=("gpu2",), here=str(tree))
    assert (stays.workdir, stays.require) == ("", ("here",))
    assert "stays on this machine" in stays.notes[0]
    with pytest.raises(BadInput, match="leads out"):
        upload_workdir(None, state_dir, nodes=("gpu2",), far=("gpu2",), here=str(tree))


def test_secrets_are_named_in_one_line_and_ship_lets_them_through(state_dir: StateDir, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / ".ssh").mkdir(parents=True)
    for name in (".env", ".ssh/id_rsa", "a"):
        (tree / name).write_text(f"content of {name}")

    def upload_with(*ship: str) -> WorkdirUpload:
        return upload_workdir(None, state_dir, nodes=("gpu2",), far=("gpu2",), here=str(tree), ship=ship)

    upload = upload_with()
    assert upload.notes == ("not shipped, as they look like secrets: .env, .ssh/ (allow with --ship PATTERN)",)
    assert not any(b"content of ." in file.read_bytes() for file in state_dir.root.rglob("*") if file.is_file())
    shipped = upload_with(".env", ".ssh")
    assert shipped.notes == ()
    assert shipped.workdir != upload.workdir
    unused = upload_with("**/.s*", ".env", "*.p12").notes
    assert unused == ("--ship '*.p12': no file that looks like a secret matches, outside of ignored directories",)


@pytest.mark.parametrize("far", [(), ("gpu2",)], ids=["this machine alone", "other machines too"])
def test_a_bad_pattern_is_refused_wherever_the_job_would_run(state_dir: StateDir, far: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match="--ship '/etc/shadow': leads outside"):
        upload_workdir(None, state_dir, nodes=("here", *far), far=far, ship=["/etc/shadow"])
    assert not state_dir.root.exists()


@pytest.mark.parametrize("name", ["home", "."], ids=["the home", "its parent"])
def test_a_home_directory_keeps_the_job_here_or_refuses_it_unless_it_is_named(
    state_dir: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("password s3cret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here = str(tmp_path / name)
    stays = upload_workdir(None, state_dir, nodes=("here", "gpu2"), far=("gpu2",), here=here)
    assert (stays.workdir, stays.require) == ("", ("here",))
    assert stays.notes[0].startswith("this job stays on this machine: the directory ")
    with pytest.raises(BadInput, match=r"home directory .* use --workdir DIR or --workdir none"):
        upload_workdir(None, state_dir, nodes=("here", "gpu2"), far=("gpu2",), require=("gpu2",), here=here)
    assert not state_dir.root.exists()
    named = upload_workdir(here, state_dir, nodes=("here", "gpu2"), far=("gpu2",))
    assert len(named.workdir) == 64
    assert ".netrc" in named.notes[0]
