"""The environment of a job on another machine than its caller's."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping

OF_A_MACHINE = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    "PYTHONPATH", "LD_LIBRARY_PATH",
})  # fmt: skip
KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LD_LIBRARY_PATH")


def own_environment(env: Mapping[str, str], given: Collection[str] = ()) -> dict[str, str]:
    """The caller's variables, with this machine's own where they speak of a machine; what was `given` stays.

    Last on the PATH is this interpreter's folder: `python` works where the system has none.
    """
    passed = {name: value for name, value in env.items() if name not in OF_A_MACHINE or name in given}
    own = {name: os.environ[name] for name in KEPT if name in os.environ}
    path = os.environ.get("PATH", os.defpath)
    own["PATH"] = f"{path}:{os.path.dirname(sys.executable)}"
    return own | passed
