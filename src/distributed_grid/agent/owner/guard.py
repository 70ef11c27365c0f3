"""Watches for the owner of this machine and makes borrowed work give way, without asking anybody.

Rule 1. It looks, `yielding` decides, `throttling` and the host act. Nothing is decided here.
Rule 2. Whenever it begins to give way it withdraws what was offered: `generation` grows.
Rule 3. A job that will be stopped finds a file at $GRID_NOTICE that says why and when. That is so, too, for one that
        is displaced by the control plane, and nobody takes that notice back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from distributed_grid.agent.execution.cpu_control import RunningTree, Throttler
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files import job_signals
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.eviction import Borrowed, CancelEviction, Evict, OwnerOnGpu, UsageSample, Warn
from distributed_grid.agent.owner.sampling_rate import FAST_MS, WATCHFUL_MS, SamplingRate
from distributed_grid.agent.owner.sampling_rate import ActivitySample as Seen
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.owner.yield_policy import Action, Continue, OwnerState, Pause, Throttle, YieldStep, decide
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import OwnerRules

ReportPause = Callable[[str, int, bool, str], None]
log = logging.getLogger(__name__)


class OwnerGuard:
    """Gives way to the owner by `rules`, and does nothing while there are none."""

    def __init__(
        self,
        host: AttemptHost,
        meter: UsageMeter,
        *,
        report_pause: ReportPause,
        on_change: Callable[[], None] = lambda: None,
        marked_ago_ms: Callable[[str], int | None] = lambda attempt_id: None,
    ) -> None:
        self.rules: OwnerRules | None = None
        self.generation = 0
        self.state = OwnerState()
        self._host = host
        self._meter = meter
        self._report_pause = report_pause
        self._on_change = on_change
        self._marked_ago_ms = marked_ago_ms
        self._throttler = Throttler(host)
        self._why = ""
        self._paused: dict[str, int] = {}  # attempts reported as paused, with their fences
        self._warned: set[str] = set()
        self._displaced: set[str] = set()
        self._gpu_look: asyncio.Task[tuple[OwnerOnGpu, ...]] | None = None

    @property
    def yields(self) -> bool:
        """Whether borrowed work gives way to the owner now."""
        return self.state.yields

    async def watch(self) -> None:
        """Look, decide and act, for ever: often while something is borrowed, hardly ever while nothing is."""
        pace = SamplingRate()
        while True:
            wait_ms = WATCHFUL_MS
            try:
                wait_ms = await self._look_once(pace)
            except Exception as failure:  # the outermost loop: the owner needs the next look
                log.warning("looking for the owner failed", exc_info=failure)
            await asyncio.sleep(wait_ms / 1000)

    def let_go(self) -> None:
        """Everything runs freely again, and nobody stays warned. Safe twice."""
        if self._gpu_look is not None:
            self._gpu_look.cancel()
            self._gpu_look = None
        self._throttler.release()
        self._tell_continued()
        for attempt_id in tuple(self._warned):
            self._take_notice_back(attempt_id)
        self.state = OwnerState()

    def displace(self, attempt_id: str, why: str) -> int:
        """Give notice to an attempt that has to make room for another; how many milliseconds it has.

        As long as the owner's rules give, and where there are none it is stopped at once, knowing why.
        """
        self._displaced = {one for one in self._displaced if one in self._host.running()} | {attempt_id}
        notice_ms = self.rules.notice_ms if self.rules is not None else 0
        in_ms = job_signals.give_notice(self._host.root, attempt_id, why, notice_ms)
        self._throttler.resume(attempt_id)  # who stands still could not read it
        return in_ms

    # ------------------------------------------------------------------ looking

    async def _look_once(self, pace: SamplingRate) -> int:
        trees, rules = self._host.running_trees(), self.rules
        if rules is None or not trees:
            if self.state != OwnerState():
                self.let_go()
                self._on_change()
            return min(WATCHFUL_MS, pace.after(Seen(False, ())))
        look = self._look(trees)
        yielded = self.yields
        self.state, actions = decide(self.state, look, rules, boot_ms())
        if self.yields and not yielded:
            self.generation = boot_ms()
        for action in actions:
            await self._act(action)
        if self.state.step is YieldStep.PAUSED:
            self._keep_still()
        if self.yields != yielded:
            self._on_change()
        wait_ms = pace.after(_seen(look, rules))
        return FAST_MS if self.yields else wait_ms

    def _lost_with(self, one: RunningTree) -> int:
        """How much work would have to be done again: thousandths of cores times milliseconds."""
        ran_ms, marked_ago_ms = boot_ms() - one.launched_boot_ms, self._marked_ago_ms(one.attempt_id)
        return (one.spec.cpu_milli or 1000) * (ran_ms if marked_ago_ms is None else min(ran_ms, marked_ago_ms))

    def _look(self, trees: tuple[RunningTree, ...]) -> UsageSample:
        trees = tuple(sorted(trees, key=self._lost_with, reverse=True))
        usage = self._host.usage()
        moment = self._meter.now(usage)
        attempts = tuple(
            Borrowed(
                attempt_id=one.attempt_id,
                node=one.spec.node,
                cpu_milli=one.spec.cpu_milli,
                memory_leased_bytes=one.spec.memory_bytes,
                memory_bytes=usage[one.attempt_id].memory_bytes if one.attempt_id in usage else 0,
                gpu_indexes=one.spec.gpu_indexes,
                at_stake=self._lost_with(one),
            )
            for one in trees
        )
        return UsageSample(
            machine_milli=moment.machine_milli,
            outside_milli=moment.outside_milli,
            own_milli=moment.own_milli,
            attempts=attempts,
            memory_bytes=moment.memory_bytes,
            memory_available_bytes=moment.memory_available_bytes,
            memory_outside_bytes=moment.memory_outside_bytes,
            gpus=self._gpus(trees),
        )

    def _gpus(self, trees: tuple[RunningTree, ...]) -> tuple[OwnerOnGpu, ...] | None:
        """What the last question to the driver brought; it is asked aside, as it may hang."""
        if not any(one.spec.gpu_indexes for one in trees):
            return None
        asked = self._gpu_look
        if asked is not None and not asked.done():
            return None
        pids = {proc.pid for one in trees for proc in process_tree.listed_descendants(one.shim.pid)}
        self._gpu_look = asyncio.create_task(asyncio.to_thread(self._meter.owner_on_gpus, pids))
        return None if asked is None else asked.result()

    # ------------------------------------------------------------------ acting

    async def _act(self, action: Action) -> None:
        match action:
            case Throttle(cores, running_milli):
                self._throttler.throttle(cores, running_milli)
            case Pause(why):
                log.info("borrowed work stands still: %s", why)
                self._why = why
            case Continue():
                self._throttler.resume()
                self._tell_continued()
            case Warn(attempt_id, why, in_ms):
                self._give_notice(attempt_id, why, in_ms)
                self._throttler.resume(attempt_id)  # who stands still could not read it
            case CancelEviction(attempt_id):
                self._take_notice_back(attempt_id)
            case Evict(attempt_id, why, grace_ms):
                log.info("%s is evicted: %s", attempt_id, why)
                self._warned.discard(attempt_id)
                await self._host.stop_attempt(attempt_id, kind="reclaimed", detail=why, grace_ms=grace_ms)

    def _keep_still(self) -> None:
        """Stop what runs, what has started since included; who was warned may use the little that is left."""
        warned = {going.attempt_id for going in self.state.going}
        for one in self._throttler.pause(frozenset(warned | self._displaced)):
            if one.attempt_id not in self._paused:
                self._paused[one.attempt_id] = one.fence
                self._report_pause(one.attempt_id, one.fence, True, self._why)

    def _tell_continued(self) -> None:
        running = set(self._host.running())
        for attempt_id, fence in self._paused.items():
            if attempt_id in running:
                self._report_pause(attempt_id, fence, False, "")
        self._paused = {}

    def _give_notice(self, attempt_id: str, why: str, in_ms: int) -> None:
        self._warned.add(attempt_id)
        job_signals.give_notice(self._host.root, attempt_id, why, in_ms)

    def _take_notice_back(self, attempt_id: str) -> None:
        self._warned.discard(attempt_id)
        if attempt_id not in self._displaced:
            job_signals.withdraw_notice(self._host.root, attempt_id)


def _seen(look: UsageSample, rules: OwnerRules) -> Seen:
    """The same for the pace of looking, in thousandths of the machine."""
    cpu = 1000 * look.outside_milli // max(1, look.machine_milli)
    memory = 1000 - 1000 * look.memory_available_bytes // max(1, look.memory_bytes)
    most = 1000 - 1000 * rules.memory_min_bytes // max(1, look.memory_bytes)
    return Seen(True, ((cpu, rules.cpu_busy_max_milli), (memory, most)))
