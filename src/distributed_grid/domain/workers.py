"""Workers: machines that a provider starts for the grid, their cost, and the rules of scaling.

A worker is a row before anything is asked of its provider. Its id is the idempotency key of the call, the name and tag
of the machine, and the name of the node that it becomes. It leaves the ledger only when it is proven gone: until then
it counts as spending. Money is in millionths of a dollar.

Levels of scaling are thousandths: of what the grid has, or of the time of a window.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct, field

from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.rows import HistoryEntry, Row
from distributed_grid.domain.states import WorkerState

DEFAULT_TARGET_UTILIZATION = 0.7
DEFAULT_SCALE_UP_THRESHOLD = 0.8
DEFAULT_SCALE_DOWN_THRESHOLD = 0.3
DEFAULT_EVALUATION_WINDOW = 300.0
DEFAULT_SCALE_UP_COOLDOWN = 300.0
DEFAULT_SCALE_DOWN_COOLDOWN = 600.0
DEFAULT_WORKER_REASSESSMENT_INTERVAL = 3600.0
DEFAULT_HISTORY_RETENTION = 86400.0
SCALED_UP, SCALED_DOWN = "scaled_up_ms", "scaled_down_ms"
"""The counters that say when a worker last joined, and when one was last given back."""
MAX_LEVEL = 10_000
"""The level of a resource that is wanted and that the grid has none of."""
MAX_UTILIZATION_SAMPLES = 128
ScalingAction = Literal["scale_up", "scale_down", "none"]


class WorkerResources(Struct, frozen=True, omit_defaults=True):
    """How much of everything a worker has, or is asked to have."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_count: int = 0


MAX_NOTICE_MS = 7 * 86_400_000
"""The longest time ahead that the end of a machine may be announced."""
STOP_MARGIN_MS = 30_000
"""How long before the end of a machine its jobs must be over, so that their ends and outputs are known; where less time
is left, a quarter of that."""


class EndNotice(Struct, frozen=True, omit_defaults=True):
    """The announced end of a machine: at `ends_at_ms`, and everything there must be over at `stop_by_ms`. Both are 0
    where it may be taken away, but nobody has said when: then it only takes nothing new. `drained`: it drains because
    of this, and would be used again without it."""

    why: str
    ends_at_ms: int = 0
    stop_by_ms: int = 0
    drained: bool = False

    def stop_at_ms(self, grace_ms: int) -> int:
        """When a job with this grace has to be told to stop."""
        return self.stop_by_ms - grace_ms


def stop_margin_ms(left_ms: int) -> int:
    """How long before the end of a machine its jobs must be over, where so much time is left."""
    return min(STOP_MARGIN_MS, left_ms // 4)


class Worker(Row, frozen=True, omit_defaults=True, kw_only=True):
    """One machine of a provider, from the intent to its end."""

    kind: ClassVar[str] = "worker"

    id: str
    provider: str
    worker_type: str  # `cpu` or `gpu`
    resources: WorkerResources
    created_at_ms: int
    offer: str = ""  # the provider's name of the machine type
    price_micro: int | None = None  # of an hour; None: unknown
    state: WorkerState = WorkerState.WANTED
    instance: str = ""  # the provider's id, once it is known
    by: str = ""  # user that asked for it
    why: str = ""  # reason of its state
    asked_at_ms: int = 0  # first call to create it
    booted_at_ms: int = 0
    joined_at_ms: int = 0
    terminate_at_ms: int = 0
    ended_at_ms: int = 0
    problem: str = ""  # last error of its provider
    zone: str = ""
    market: str = ""
    on_this_machine: bool = False  # its resources come out of the control plane's machine
    host: str = ""  # node of the control plane's machine, which lends it its resources
    warning: str = ""  # resources that are less than asked for
    unanswered: int = 0  # calls to create it without an answer
    called_at_ms: int = 0  # begin of the last call to create it
    tries: int = 0  # failed calls in a row
    next_call_at_ms: int = 0
    accepted_at_ms: int = 0  # when its provider accepted the termination
    missing: int = 0  # lists since then that lack it
    listed_at_ms: int = 0  # of the last list that lacks it
    unheard_since_ms: int = 0  # since its agent is silent; 0: it is not
    used_at_ms: int = 0  # end of its last lease
    surplus: bool = field(default=False, name="spare")  # it drains because nobody needs it
    end_requested: bool = False
    """A user has requested its end: scaling down rests after it, as after one that it has given back itself."""
    lifetime_ms: int = 0  # after which its provider ends it; 0: never
    ends_at_ms: int = 0  # end by its provider; 0: unknown
    queue_ms: int = 0  # longest wait in a queue of its provider's
    waits: bool = False  # in such a queue: there is no machine yet, and no cost
    waited_until_ms: int = 0  # last time at which it was known to wait
    notice: EndNotice | None = None  # announced end, which never is postponed
    notice_at_ms: int = 0  # last report of the agent about the notice

    @property
    def key(self) -> str:
        return self.id

    @property
    def node(self) -> str:
        """The name of the node that it is once it has joined."""
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is WorkerState.GONE

    def ended(self) -> HistoryEntry:
        return HistoryEntry(
            key=self.id,
            request_id=self.id,
            user=self.by,
            node=self.node,
            ended_at_ms=self.ended_at_ms,
            reason="gone",
            started_at_ms=self.created_at_ms,
            cpu_milli=self.resources.cpu_milli,
            memory_bytes=self.resources.memory_bytes,
            gpu_milli=1000 * self.resources.gpu_count,
            target=self.provider,
        )

    @property
    def is_on_its_way(self) -> bool:
        """Whether it will be capacity soon, as far as anybody knows."""
        return self.state in (WorkerState.WANTED, WorkerState.ASKED, WorkerState.BOOTING)

    @property
    def leaving_at_ms(self) -> int:
        """When it ends by an announcement; 0 where none was made, or not for when."""
        return self.notice.ends_at_ms if self.notice is not None else 0

    @property
    def is_leaving(self) -> bool:
        """Whether its end was announced: what runs there has to run elsewhere."""
        return self.leaving_at_ms > 0 and self.state in (WorkerState.JOINED, WorkerState.DRAINING)


class WorkerRules(Row, frozen=True, omit_defaults=True, kw_only=True):
    """What holds for all workers: budgets in millionths of a dollar (None: no limit), and times.

    `core_hour_budgets` limits what the workers of a provider use on a day, in thousandths of a core-hour.
    `consistency_ms` is how long a provider may not list what it has made, or list what it has ended. `exit_ms` is for
    how long the agent of a worker goes on without a control plane.
    """

    kind: ClassVar[str] = "worker-rules"

    budget_per_hour_micro: int | None = None
    budget_per_day_micro: int | None = None
    launch_ms: int = 300_000
    join_ms: int = 900_000
    consistency_ms: int = 30_000
    call_ms: int = 60_000
    exit_ms: int = 600_000
    closed_ms: int = 180_000
    set_aside_ms: int = 3_600_000
    core_hour_budgets: dict[str, int] = field(default_factory=dict)


class PastDay(Struct, frozen=True, array_like=True):
    """Cost of the workers of a provider on a day that is over, unless the wall clock was wrong about that."""

    day: int
    spent_micro: int
    core_ms: int


class Spending(Row, frozen=True, omit_defaults=True, kw_only=True):
    """Cost of the workers of a provider on one day (UTC, in days since 1970), and their core-milliseconds."""

    kind: ClassVar[str] = "spending"

    provider: str
    day: int
    spent_micro: int = 0
    as_of_ms: int = 0  # time of the last count
    core_ms: int = 0
    first_day: int = 0  # day before the wall clock jumped; 0: it did not
    past: tuple[PastDay, ...] = ()
    """Last days that were left, newest last: a wall clock that was ahead returns to one of them."""

    @property
    def key(self) -> str:
        return self.provider


class OfferClosure(Row, frozen=True, omit_defaults=True):
    """An offer of a provider (`offer:ID`), or all of its offers of a zone, market or kind (`zone:a`, `market:spot
    kind:gpu`), not to be tried until then."""

    kind: ClassVar[str] = "offer-closure"

    provider: str
    scope: str
    until_ms: int
    why: str = ""
    opened: bool = False

    @property
    def key(self) -> str:
        return f"{self.provider}/{self.scope}"

    @property
    def is_over(self) -> bool:
        return self.opened


class ScalingRules(Row, frozen=True, kw_only=True):
    """Scaling settings of the config, and the workers that the provider can start, the preferred ones first; the
    ledger has one. Without a `provider` nothing is started or given back. `types_known`: the provider was asked what it
    can start; until then a request that no node can serve waits."""

    kind: ClassVar[str] = "scaling"

    provider: str = ""
    min_workers: int = 0
    max_workers: int = 10
    target_milli: int = 700
    up_milli: int = 800
    down_milli: int = 300
    window_ms: int = 300_000
    up_cooldown_ms: int = 300_000
    down_cooldown_ms: int = 600_000
    types: tuple[Worker, ...] = ()
    types_known: bool = True


class UtilizationSample(Struct, frozen=True):
    """How much of each resource was taken or waited for at one moment; above 1000 where more waited than there was."""

    at_ms: int
    cpu: int = 0
    memory: int = 0
    gpu: int = 0

    def level(self, resource: ResourceType) -> int:
        found: int = getattr(self, str(resource))
        return found


class UtilizationWindow(Row, frozen=True):
    """The samples of the evaluation window, oldest first; the ledger has one. Never stored: it begins anew."""

    kind: ClassVar[str] = "utilization"
    is_volatile: ClassVar[bool] = True

    samples: tuple[UtilizationSample, ...] = ()

    def mean(self, resource: ResourceType, since_ms: int) -> int:
        """The mean level since that moment; 0 where there is no sample."""
        levels = [sample.level(resource) for sample in self.samples if sample.at_ms >= since_ms]
        return sum(levels) // len(levels) if levels else 0

    def added(self, sample: UtilizationSample, window_ms: int) -> UtilizationWindow:
        """With this sample. Samples that are too near to each other are one, so that a window of them is bounded."""
        gap_ms = window_ms // (MAX_UTILIZATION_SAMPLES // 2)
        kept = [one for one in self.samples if sample.at_ms - window_ms <= one.at_ms < sample.at_ms]
        if len(kept) > 1 and kept[-1].at_ms - kept[-2].at_ms < gap_ms:
            kept.pop()
        return UtilizationWindow((*kept, sample)[-MAX_UTILIZATION_SAMPLES:])


class ScalingPlan(Struct, frozen=True, kw_only=True):
    """What scaling would do now, and why.

    `worker` is what each of `count` new workers would be. `worker_ids` are those that would be given back, or that
    drain and would be kept. `utilization_milli` is the mean of the window for the bottleneck.
    """

    action: ScalingAction
    reason: str
    count: int = 0
    worker_ids: tuple[str, ...] = ()
    utilization_milli: int = 0
    bottleneck: ResourceType = ResourceType.CPU
    worker: Worker | None = None
