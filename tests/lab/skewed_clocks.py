"""A wall clock that is wrong, for everything a user of a host starts (libfaketime); other clocks stay true."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

OFFSET = Path("/etc/lab/clock")
SLEEP = Path("/etc/lab/sleep.so")
SOURCE = Path(__file__).with_name("sleep.c")


def problem() -> str | None:
    """Why clocks cannot be skewed on this machine, or None."""
    if _library() is None:
        return "libfaketime is not installed (Debian: faketime)"
    return None if shutil.which("cc") else "there is no C compiler (Debian: gcc, libc6-dev)"


def build(into: Path) -> None:
    """Compile what libfaketime lacks to a file. A second call does nothing."""
    if reason := problem():
        raise RuntimeError(reason)
    if not into.exists():
        words = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(into), str(SOURCE), "-ldl"]
        subprocess.run(words, check=True, capture_output=True)
        into.chmod(0o755)


def environment(sleep: Path = SLEEP, offset: Path = OFFSET, *, fresh: bool = False) -> dict[str, str]:
    """What makes a program live by the clock that the file `offset` says; `sleep` is what `build` has made.

    The file is read anew once a second, or if `fresh` at each look at a clock, which takes most of an agent's time.
    """
    faked = {
        "LD_PRELOAD": f"{sleep}:{_library()}",
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        **({"FAKETIME_NO_CACHE": "1"} if fresh else {"FAKETIME_CACHE_DURATION": "1"}),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    return faked | {"GRID_KEEP_ENV": ",".join(faked)}


def _library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
