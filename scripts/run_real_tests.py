"""Run pytest with these arguments; a few tests that failed beside others are run once more, one at a time.

Tests of real processes, and some of threads, wait for what happens within some seconds. On a machine whose cores others
use as well, seconds can pass in which nothing happens. What fails the second time, too, has failed. What passes only
then is listed: it is a defect, of the test or of the product, that is to be found.
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
    CACHE.unlink(missing_ok=True)
    code = subprocess.run([*PYTEST, *arguments], check=False).returncode
    failed = sorted(json.loads(CACHE.read_text())) if code == FAILED and CACHE.exists() else []
    if not failed or len(failed) > AT_MOST:
        return code
    print(f"{len(failed)} failed; once more, one at a time", flush=True)
    code = subprocess.run([*PYTEST, "-p", "no:cacheprovider", *failed], check=False).returncode
    if code == 0:
        print("passed only when run alone:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
