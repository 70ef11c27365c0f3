"""Results of attempts on this machine, counted without an agent: `python -m distributed_grid.agent.files.result_listing
DIR`, which the script of a node runs before the agent's directory DIR is removed.

On standard input is a JSON object that maps each attempt to the digest of the manifest that was shipped for it; on
standard output one that maps each attempt that left results to their number and bytes, or to the reason why they
cannot be counted. A manifest that is not here any more makes every file count: nothing is taken for unchanged unseen.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from distributed_grid.agent.files.attempt_files import work_dir
from distributed_grid.errors import GridError
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.trees.file_selection import changed_files, select_files
from distributed_grid.trees.manifest import Manifest, ManifestEntry, decode
from distributed_grid.trees.paths import to_bytes
from distributed_grid.trees.secret_files import is_unremarkable

EVERYTHING = ("**",)
MAX_REASON_CHARS = 200


def count_results(entries: Iterable[ManifestEntry]) -> tuple[int, int]:
    """Number and bytes of the files that are results: caches that programs make by themselves are none."""
    sizes = [entry.size for entry in entries if not is_unremarkable(tuple(to_bytes(entry.path).split(b"/")))]
    return len(sizes), sum(sizes)


def list_results(directory: Path, attempts: dict[str, str]) -> dict[str, tuple[int, int] | str]:
    """Results of the attempts that have any."""
    results: dict[str, tuple[int, int] | str] = {}
    for attempt, digest in attempts.items():
        try:
            work = work_dir(str(directory / "jobs"), attempt)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as failure:
            results[attempt] = str(failure)[:MAX_REASON_CHARS]
            continue
        try:
            selected = select_files(work, EVERYTHING)
            shipped = Manifest()  # the files that the attempt began with; none if their list is gone
            if digest and (directory / "content").is_dir():
                with contextlib.suppress(GridError, OSError), ContentStore(directory / "content").open(digest) as file:
                    shipped = decode(file.read())
            counted = count_results(changed_files(work, selected.entries, shipped).entries)
        except (GridError, OSError, RecursionError) as failure:
            results[attempt] = str(failure)[:MAX_REASON_CHARS]
            continue
        if counted[0]:
            results[attempt] = counted
    return results


def main() -> int:
    attempts = json.load(sys.stdin)
    print(json.dumps(list_results(Path(sys.argv[1]), attempts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
