"""Shell functions that start chosen commands by `grid offload wrap`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence

from distributed_grid.errors import BadInput

NAMES_VARIABLE = "GRID_OFFLOAD_COMMANDS"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
RESERVED = frozenset(
    (
        *("if", "then", "elif", "else", "fi", "for", "in", "do", "done", "while", "until", "case", "esac", "select"),
        *("function", "time", "coproc", "repeat", "foreach", "end", "nocorrect", "noglob", "typeset", "declare"),
        *("command", "builtin", "exec", "eval", "source", "unset", "export", "local", "return", "exit", "set", "trap"),
        *("cd", "alias", "unalias", "test", "true", "false", "env", "grid"),
    )
)
"""Words of the shell, and what the functions themselves need: as functions they would break it."""


def hook_script(names: Sequence[str], program: str, *, no_input: bool = False, state_dir: str | None = None) -> str:
    """The functions, for `eval` in bash or zsh, that run the `grid` at this path; BadInput for a name that cannot be.

    Where grid has been removed since, a function starts its command as before.
    """
    for name in names:
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise BadInput(f"{name!r} cannot be wrapped by a shell function; use: grid offload wrap COMMAND")
    program = shlex.quote(program)
    setting = f"GRID_STATE_DIR={shlex.quote(os.path.abspath(state_dir))} " if state_dir else ""
    option = " --no-input" if no_input else ""
    functions = (
        f"function {name} {{\n"
        f'  if [ -x {program} ]; then {setting}{program} offload wrap{option} -- {name} "$@"\n'
        f'  else command {name} "$@"; fi\n'
        "}\n"
        for name in dict.fromkeys(names)
    )
    return "".join(functions)


def own_path() -> str:
    """Where this program is, whatever the PATH of the shell will be."""
    found = sys.argv[0] if os.path.dirname(sys.argv[0]) else shutil.which(sys.argv[0]) or sys.argv[0]
    return os.path.abspath(found)
