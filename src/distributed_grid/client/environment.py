"""What a job gets of its caller's environment: enough that a command means what was typed, and no secrets."""

from __future__ import annotations

import os
import sys

from distributed_grid.errors import BadInput

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
)  # fmt: skip


def caller_environment(extra: dict[str, str]) -> dict[str, str]:
    """A clean base out of this process's environment, plus what the user passed."""
    base = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    base |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    base = {name: value for name, value in base.items() if is_text(value)}
    base["PATH"] = _with_a_python(base.get("PATH", os.defpath))
    for word in (*extra, *extra.values()):
        make_sure_of_text(word)
    return base | extra


def _with_a_python(path: str) -> str:
    """The caller's PATH, and last of all this interpreter's folder: `python` works where the system has none."""
    own = os.path.dirname(sys.executable)
    return path if own in path.split(":") else f"{path}:{own}"


def is_text(word: str) -> bool:
    """Whether a word of the command line or the environment is UTF-8, as everything that travels must be."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def make_sure_of_text(*words: str) -> None:
    """Refuse what is not UTF-8 with a clear line."""
    for word in words:
        if not is_text(word):
            raise BadInput(f"only UTF-8 text can be passed on, not {os.fsencode(word)!r}")
