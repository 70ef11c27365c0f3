"""The functions of `offload shell-hook`, in a real shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distributed_grid.cli.commands.offload import hook_script
from distributed_grid.errors import BadInput

SHELLS = [shell for shell in ("bash", "zsh") if shutil.which(shell)]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stand-in for `grid` that prints its words, in a place whose name needs quotes."""
    folder = tmp_path / "it's a $HOME; folder"
    folder.mkdir()
    made = folder / "grid"
    made.write_text("#!/bin/sh\nprintf '<%s>' \"$@\"\n")
    made.chmod(0o755)
    return made


def run(shell: str, script: str, program: Path, *names: str, no_input: bool = False) -> str:
    hook = hook_script(names, str(program), no_input=no_input)
    done = subprocess.run([shell, "-c", f"{hook}\n{script}"], check=True, capture_output=True, text=True, timeout=20)
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_named_command_is_wrapped_with_its_words_as_they_are(shell: str, program: Path) -> None:
    assert (
        run(shell, "printf 'a  b' '$x' '*' ''", program, "printf", "g++")
        == "<offload><wrap><--><printf><a  b><$x><*><>"
    )
    assert run(shell, "g++ -c", program, "g++", no_input=True) == "<offload><wrap><--no-input><--><g++><-c>"


@pytest.mark.parametrize("shell", SHELLS)
def test_command_starts_it_as_before(shell: str, program: Path) -> None:
    assert run(shell, "command printf %s here", program, "printf") == "here"


@pytest.mark.parametrize("shell", SHELLS)
def test_without_grid_it_starts_as_before(shell: str, program: Path) -> None:
    program.unlink()
    assert run(shell, "printf %s here", program, "printf") == "here"


def test_an_alias_of_that_name_does_not_break_the_function(program: Path) -> None:
    script = f"shopt -s expand_aliases\nalias tar='tar --verbose'\n{hook_script(['tar'], str(program))}\ntar x"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=20)
    assert done.stdout == "<offload><wrap><--><tar><--verbose><x>"


@pytest.mark.parametrize(
    "name", ["", "a b", "$(id)", "a;b", "-x", "if", "command", "grid", "a'b", "é", "a\nb", "/bin/ls"]
)
def test_a_name_that_cannot_be_a_function_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be wrapped"):
        hook_script([name], "/usr/bin/grid")
