"""Bringing a job's files back to the shell's machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_grid.cli.global_options import CliSession
from distributed_grid.client.download import FileDownload


def fetch(session: CliSession, job_id: str, patterns: Sequence[str], target: str) -> dict[str, Any]:
    """Bring the files that fit into a directory; what came, and what could not."""
    taker = FileDownload(target, patterns)
    try:
        with session.client() as client:
            for kind, part in client.stream("fetch_files", job_id=job_id, patterns=list(patterns)):
                done = taker.take(kind, part)
                if done is not None:
                    return {**done, "target": target, "paths": taker.paths}
    finally:
        taker.close()
    raise AssertionError("a stream ends with its sum")
