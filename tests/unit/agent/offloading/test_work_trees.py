"""Files that a tree of processes needs."""

from __future__ import annotations

from pathlib import Path

from distributed_grid.agent.offloading.proc_entries import ProcDetails
from distributed_grid.agent.offloading.work_trees import NeededFiles


def a_process(exe: str, cwd: str) -> ProcDetails:
    return ProcDetails(
        argv=("program",), cwd=cwd, exe=exe, files=(), sockets=frozenset(), pipes=frozenset(), streams=(), mappings=(),
        is_traced=False, is_privileged=False, foreign="", read_bytes=0, written_bytes=0, problem="",
    )  # fmt: skip


def test_a_program_of_another_mount_namespace_whose_path_is_a_directory_here_has_no_size(tmp_path: Path) -> None:
    """A size below zero would make the whole list of processes unreadable for the control plane."""
    (tmp_path / "program").mkdir()
    process = a_process(str(tmp_path / "program"), str(tmp_path / "work"))
    assert NeededFiles().find(process, [process]) == ((str(tmp_path / "program"), 0),)


def test_a_program_of_ones_own_is_needed_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"1234")
    process = a_process(str(tmp_path / "program"), str(tmp_path / "work"))
    assert NeededFiles().find(process, [process]) == ((str(tmp_path / "program"), 4),)
