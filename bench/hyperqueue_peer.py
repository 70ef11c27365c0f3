"""Runs N times `true` with HyperQueue on two cores and prints how many a second; run by a Python that has it."""

import contextlib
import io
import os
import sys
import tempfile
import time

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig


def main() -> None:
    """As many tasks as asked for, with their output in files, as ours have."""
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="grid-bench-hq-") as folder, LocalCluster() as cluster:
        os.chdir(folder)
        cluster.start_worker(WorkerConfig(cores=2))
        client = cluster.client()
        job = Job()
        for _ in range(count):
            job.program(["true"])
        began = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            client.wait_for_jobs([client.submit(job)])
        print(count / (time.perf_counter() - began))
        os.chdir("/")


main()
