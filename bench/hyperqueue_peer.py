"""Runs N times `true` with HyperQueue on two cores and prints how many a second; run by a Python that has it."""

import contextlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig


def main() -> None:
    """As many tasks as asked for, with their output in files, as ours have.

    Its client asks once a second whether all is over; so the end is when the last task made its files.
    """
    count, parent = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="grid-bench-hq-", dir=parent) as folder, LocalCluster() as cluster:
        os.chdir(folder)
        cluster.start_worker(WorkerConfig(cores=2))
        client = cluster.client()
        job = Job()
        for _ in range(count):
            job.program(["true"])
        began = time.time()
        with contextlib.redirect_stderr(io.StringIO()):
            client.wait_for_jobs([client.submit(job)])
        ended = [file.stat().st_mtime for file in Path(folder).rglob("*.std*")]
        assert len(ended) == 2 * count, f"{len(ended)} files of {count} tasks"
        print(count / (max(ended) - began))
        os.chdir("/")


main()
