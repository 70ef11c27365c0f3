"""What a job gets of its caller's environment: enough that a command means what was typed, and no secrets."""

from __future__ import annotations

import os

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
)  # fmt: skip


def caller_environment(extra: dict[str, str]) -> dict[str, str]:
    """A clean base out of this process's environment, plus what the user passed."""
    base = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    base |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    return base | extra
