"""Delivery of files: the files that `--fetch` named are copied into their user's directory when the job has ended.

Pending deliveries are derived from the ledger: start-up, a lost answer and a retry are the same. A delivery that fails
for a reason that may pass (an unreachable node, a full disk) is tried again until it succeeds; a second delivery
changes nothing. The last room of a disk stays free as its reserve. If the directory is gone or cannot be written to,
the files come into a directory of the control plane's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path

from msgspec.structs import asdict

from distributed_grid.api.answers.jobs import FetchedFile, FetchedTree
from distributed_grid.api.framing import JSON, STDOUT
from distributed_grid.client.job_payload import FetchTotals, FileDownload
from distributed_grid.control.agent_files import AttemptFiles
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.deliveries import MAX_NAMED_FILES, DeliveredFiles, Delivery
from distributed_grid.domain.events import FilesDelayed, FilesDelivered, FilesUndeliverable
from distributed_grid.domain.jobs import Ending, Job
from distributed_grid.errors import BadInput, GridError, NotFound, ProtocolError, Refused, StoreFailed
from distributed_grid.reactor.effects import DeliverFiles, delivery_effects
from distributed_grid.scheduling.offers.pause import disk_reserve
from distributed_grid.server.services.jobs import FileSink, send_files
from distributed_grid.server.services.records import find_job
from distributed_grid.state_dir import StateDir
from distributed_grid.trees.paths import display_path

AT_ONCE = 4
POLL_SECONDS = 0.5
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
MAX_FAILURES = 3
"""Tries of a delivery that fails for a lasting reason."""
_PERMANENT = (NotFound, BadInput, Refused, ProtocolError)
log = logging.getLogger(__name__)


class FileDeliverer:
    """Performs the deliveries of the ledger, a few at a time."""

    def __init__(self, grid: Grid, files: AttemptFiles, state_dir: StateDir) -> None:
        self._grid = grid
        self._files = files
        self._state_dir = state_dir
        self._work = Reconciler(at_once=AT_ONCE)

    async def run(self) -> None:

        async def deliver_pending() -> None:
            if self._grid.ledger.deliveries:
                effects = await self._grid.read(lambda ledger, now: delivery_effects(ledger))
                self._work.keep_only({effect.delivery.job for effect in effects})
                for effect in effects:
                    self.perform(effect)

        await self._work.run(deliver_pending, POLL_SECONDS)

    def perform(self, effect: DeliverFiles) -> None:
        delivery = effect.delivery
        self._work.begin(delivery.job, partial(self._deliver, delivery), f"delivery of the files of {delivery.job_id}")

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            delivered = await self._bring(delivery)
        except (GridError, OSError) as failure:
            is_permanent = isinstance(failure, _PERMANENT)
            pause = min(FIRST_RETRY_SECONDS * 2 ** self._work.tries(delivery.job).failures, MAX_RETRY_SECONDS)
            tries = self._work.fail(delivery.job, str(failure), lasts=is_permanent, retry_seconds=pause)
            if tries.lasting >= MAX_FAILURES:
                await self._grid.handle_with_retry(FilesUndeliverable(delivery.job, str(failure)))
            elif not is_permanent:
                await self._grid.handle_with_retry(FilesDelayed(delivery.job, str(failure)))
        else:
            await self._grid.handle_with_retry(FilesDelivered(delivery.job, delivered))

    async def _bring(self, delivery: Delivery) -> DeliveredFiles:
        job = await find_job(self._grid, delivery.job)
        outcomes = [attempt.outcome for attempt in job.attempts if attempt.outcome is not None]
        has_ended = any(outcome.ending is not Ending.NEVER_STARTED for outcome in outcomes)
        if not has_ended and not any(attempt.started_at_ms > 0 for attempt in job.attempts):
            raise Refused(f"{job.id} never started")
        wanted, own = delivery.order.directory, str(self._state_dir.root / "results" / f"{job.id}-{job.uid[:8]}")
        if not wanted or not await asyncio.to_thread(os.path.isdir, wanted):
            return await self._bring_into(own, job, delivery)
        try:
            return await self._bring_into(wanted, job, delivery)
        except Refused as refusal:  # it may not be written to
            log.warning("the files of %s come into %s: %s", job.id, own, refusal)
            return await self._bring_into(own, job, delivery)

    async def _bring_into(self, directory: str, job: Job, delivery: Delivery) -> DeliveredFiles:
        order = delivery.order
        download = FileDownload(
            directory, order.patterns, self._state_dir, overwrite=order.overwrite, umask=order.umask
        )

        async def header(fields: FetchedTree | FetchedFile) -> None:
            await asyncio.to_thread(download.receive, JSON, asdict(fields))

        def write(chunk: bytes) -> None:
            disk = os.statvfs(directory)
            free, reserve = disk.f_bavail * disk.f_frsize, disk_reserve(disk.f_blocks * disk.f_frsize)
            if free < len(chunk) + reserve:
                left = f"{free / 2**20:.1f} MB are left, of which {reserve / 2**20:.1f} MB stay free"
                raise StoreFailed(f"no room on the disk of {directory}: {left}")
            download.receive(STDOUT, chunk)

        async def data(chunk: bytes) -> None:
            await asyncio.to_thread(write, chunk)

        try:
            totals = await send_files(self._files, job, order.patterns, FileSink(header, data))
            done = await asyncio.to_thread(download.receive, JSON, {**asdict(totals), "done": True})
        finally:
            await asyncio.to_thread(download.close)
        assert done is not None
        return delivered_files(directory, done)


def delivered_files(directory: str, totals: FetchTotals) -> DeliveredFiles:
    """The totals of a download for the ledger; of many paths only the first."""
    beside = tuple(sorted(totals.beside.items()))[:MAX_NAMED_FILES]
    return DeliveredFiles(
        directory=str(Path(directory)),
        files=totals.files,
        bytes=totals.bytes,
        unchanged=totals.unchanged,
        in_place=totals.in_place,
        beside=tuple((display_path(path), display_path(name)) for path, name in beside),
        protected=tuple(map(display_path, totals.protected[:MAX_NAMED_FILES])),
        executable=tuple(map(display_path, totals.executable[:MAX_NAMED_FILES])),
        skipped=tuple(totals.skipped[:MAX_NAMED_FILES]),
    )
