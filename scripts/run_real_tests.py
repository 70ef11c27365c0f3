"""Run pytest with these arguments; the files of a few tests that failed beside others are run once more, one at a time.

Tests of real processes, and some of threads, wait for what happens within some seconds. On a machine whose cores others
use as well, seconds can pass in which nothing happens. What fails the second time, too, has failed. What passes only
then is listed: it is a defect, of the test or of the product, that is to be found. Whole files are run again, as the
tests of a file share a grid and its history; what has passed before need not pass twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

AT_MOST = 12
FAILED = 1  # pytest's exit code where tests have failed, and nothing worse
CACHE = Path(".pytest_cache/v/cache/lastfailed")
PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    code, failed = run(arguments)
    if code != FAILED or not failed or len(failed) > AT_MOST:
        return code
    files = sorted({test.partition("::")[0] for test in failed})
    print(f"{len(failed)} failed; their files once more, one at a time:", *sorted(failed), sep="\n  ", flush=True)
    code, again = run([*files, *selection(arguments)])
    if code not in {0, FAILED} or failed & again:
        return code
    print("passed only when run alone:", *sorted(failed), sep="\n  ")
    return 0


def run(arguments: list[str]) -> tuple[int, set[str]]:
    """pytest's exit code, and the tests that have failed."""
    CACHE.unlink(missing_ok=True)
    code = subprocess.run([*PYTEST, *arguments], check=False).returncode
    return code, set(json.loads(CACHE.read_text())) if CACHE.exists() else set()


def selection(arguments: list[str]) -> list[str]:
    """The `-m` of the first run: a file may hold tests that are no part of it."""
    return arguments[arguments.index("-m") :][:2] if "-m" in arguments else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
