"""Budget of workers: costs an hour and a day, and reasons for refusing another worker.

- An hour costs the prices of all that is not proven gone, creations without an answer included.
- A day (UTC) costs what was spent on it and the price of each of them until midnight, or until a minute after the end
  that its provider gives it, if that is sooner.
- The day is the wall clock's. One that is back by no more than a day waits there for midnight. One that jumped by days
  takes along what was spent, so that a wrong clock neither refuses workers for good nor pays for a day twice.
- A worker of unknown price is refused where there is a budget.
- The core-hours of a provider on a day are counted in the same way, but a worker that has not begun counts for its
  whole lifetime: nobody knows when it begins.
- One that waits in a queue of its provider's has its whole lifetime before it, and has cost nothing yet.

Money is in millionths of a dollar; times are the ledger's, only the day and its end are read off the wall clock.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import PastDay, Spending, Worker, WorkerRules
from distributed_grid.number_text import counted, plain_number

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MICRO = 1_000_000
END_GRACE_MS = 60_000  # for how long after its end a machine that its provider ends may still be charged for
FOR_EVER_MS = 10**15  # longer than anything lasts
MAX_PAST_DAYS = 3
CORE_MS = HOUR_MS // 1000  # milliseconds of a core in a thousandth of a core-hour


class CoreHours(Struct, frozen=True):
    """The core time of a provider on a day: `used_ms` so far, `ahead_ms` more if everything runs on, and the budget in
    thousandths of a core-hour."""

    provider: str
    limit_milli: int
    used_ms: int = 0
    ahead_ms: int = 0

    @property
    def limit_ms(self) -> int:
        return CORE_MS * self.limit_milli

    @property
    def day_ms(self) -> int:
        """Core time of the day if everything runs on."""
        return self.used_ms + self.ahead_ms


class BudgetState(Struct, frozen=True, kw_only=True):
    """Costs of workers at one moment: `rate_micro` an hour, `spent_micro` on `day` so far, `ahead_micro` more by
    midnight (in `until_midnight_ms`).

    `unpriced` are workers of unknown price; `cores` are the providers with a budget of core-hours.
    """

    day: int
    rate_micro: int
    spent_micro: int
    ahead_micro: int
    until_midnight_ms: int
    rules: WorkerRules = WorkerRules()
    unpriced: tuple[str, ...] = ()
    cores: tuple[CoreHours, ...] = ()

    @property
    def day_micro(self) -> int:
        """Cost of the day if everything runs on."""
        return self.spent_micro + self.ahead_micro

    @property
    def per_hour_micro(self) -> int | None:
        return self.rules.budget_per_hour_micro

    @property
    def per_day_micro(self) -> int | None:
        return self.rules.budget_per_day_micro

    @property
    def is_limited(self) -> bool:
        return self.per_hour_micro is not None or self.per_day_micro is not None

    def new_cost_micro(self, worker: Worker) -> int:
        """Largest cost of one more worker on this day."""
        return cost_micro(worker.price_micro or 0, min(_whole_life_ms(worker, self.rules), self.until_midnight_ms))

    def with_workers(self, worker: Worker, count: int = 1) -> BudgetState:
        """The state with this number of such workers more, from now on."""
        more_ms = count * core_ms(worker, _on_its_day_ms(_whole_life_ms(worker, self.rules), self.until_midnight_ms))
        return replace(
            self,
            rate_micro=self.rate_micro + count * (worker.price_micro or 0),
            ahead_micro=self.ahead_micro + count * self.new_cost_micro(worker),
            cores=tuple(
                replace(core, ahead_ms=core.ahead_ms + more_ms) if core.provider == worker.provider else core
                for core in self.cores
            ),
        )

    def refusal(self, worker: Worker) -> str | None:
        """The reason not to start one more such worker; None where it may be started."""
        after, price_micro = self.with_workers(worker), worker.price_micro
        kind = f"a {worker.worker_type} worker of {worker.provider}"
        if self.is_limited and price_micro is None:
            return f"what {kind} costs is not known, and there is a budget; set its price_per_hour"
        if self.is_limited and self.unpriced:
            return f"what {self.unpriced[0]} costs is not known, and there is a budget; terminate it first"
        if self.per_hour_micro is not None and after.rate_micro > self.per_hour_micro:
            return (
                f"{kind} at {usd(price_micro or 0)} an hour would make {usd(after.rate_micro)} an hour, "
                f"and scaling.budget_per_hour is {usd(self.per_hour_micro)}"
            )
        if self.per_day_micro is not None and after.day_micro > self.per_day_micro:
            return (
                f"{kind} at {usd(price_micro or 0)} an hour would make {usd(after.day_micro)} by midnight UTC "
                f"({usd(self.spent_micro)} spent today), and scaling.budget_per_day is {usd(self.per_day_micro)}"
            )
        for core in after.cores:
            if core.provider == worker.provider and core.day_ms > core.limit_ms:
                cores, life = counted(worker.resources.cpu_milli / 1000, "core"), worker.lifetime_ms / HOUR_MS
                size = f"{cores} for up to {plain_number(life)} h" if life else cores
                return (
                    f"{kind} with {size} would make {plain_number(core_hours(core.day_ms))} core-hours "
                    f"today ({plain_number(core_hours(core.used_ms))} used), and {core_budget_key(core.provider)} is "
                    f"{plain_number(core.limit_milli / 1000)}"
                )
        return None


def core_budget_key(provider: str) -> str:
    """Config key that limits the core-hours of a provider."""
    return f"providers.{provider}.budget_core_hours"


def cost_micro(rate_micro: int, elapsed_ms: int) -> int:
    """Cost of a duration at a price per hour, rounded up."""
    return -(-rate_micro * max(elapsed_ms, 0) // HOUR_MS)


def core_ms(worker: Worker, elapsed_ms: int) -> int:
    return worker.resources.cpu_milli * max(elapsed_ms, 0) // 1000


def core_hours(duration_ms: int) -> float:
    return round(duration_ms / HOUR_MS, 3)


def usd(micro: int) -> str:
    return f"${micro / MICRO:.4f}".rstrip("0").rstrip(".") if micro % 10_000 else f"${micro / MICRO:.2f}"


def current_day(ledger: Ledger, wall_ms: int) -> int:
    """The current day (UTC) of the wall clock, unless the next one has begun already."""
    day = wall_ms // DAY_MS
    return day + 1 if any(row.day == day + 1 for row in ledger.spending.values()) else day


def counted_until_ms(worker: Worker, rules: WorkerRules, now: int) -> int:
    """End of a worker's costs at the latest: a minute after the end that its provider sets.

    A pending creation and a queued worker have their whole lifetime ahead.
    """
    if worker.ends_at_ms and not worker.waits:
        return worker.ends_at_ms + END_GRACE_MS
    if not worker.lifetime_ms:
        return FOR_EVER_MS
    began_at = now if worker.waits else worker.booted_at_ms
    if not began_at:
        began_at = (worker.called_at_ms if worker.state is WorkerState.TERMINATING else now) + rules.call_ms
    return began_at + worker.lifetime_ms + END_GRACE_MS


def alone_ms(worker: Worker, rules: WorkerRules, now: int, lead_ms: int) -> int:
    """Remaining life of a machine if the control plane dies after `lead_ms`: until its agent, or its boot script, ends
    it."""
    left_ms = rules.exit_ms
    if not worker.joined_at_ms:
        booted_at = now if worker.waits else worker.booted_at_ms or now + rules.call_ms
        left_ms = max(booted_at + rules.launch_ms + rules.join_ms - now, 0)
    return min(left_ms + END_GRACE_MS + lead_ms, counted_until_ms(worker, rules, now) - now)


def _whole_life_ms(worker: Worker, rules: WorkerRules) -> int:
    """Longest time for which a worker started now is counted."""
    return rules.call_ms + worker.lifetime_ms + END_GRACE_MS if worker.lifetime_ms else FOR_EVER_MS


def settle(ledger: Ledger, provider: str, now: int, wall_ms: int) -> Spending:
    """Spending of a provider on the current day until now."""
    day = current_day(ledger, wall_ms)
    row = ledger.spending.get(provider)
    if row is None:
        return Spending(provider=provider, day=day, spent_micro=0, as_of_ms=now)
    if day > row.day and (day == row.day + 1 or wall_ms - (row.day + 1) * DAY_MS <= now - row.as_of_ms + HOUR_MS):
        midnight = now - (wall_ms - day * DAY_MS) if wall_ms >= day * DAY_MS else row.as_of_ms
        until_ms = min(max(midnight, row.as_of_ms), now)
        if day == row.day + 1:  # of a longer time nobody knows how much of it was on that day
            row = _charge_until(ledger, row, now, until_ms)
        left = PastDay(row.first_day or row.day, row.spent_micro, row.core_ms)
        row = Spending(
            provider=provider, day=day, spent_micro=0, as_of_ms=until_ms, past=(*row.past, left)[-MAX_PAST_DAYS:]
        )
    elif day != row.day:
        # The row under another day after a jump of the wall clock: spent amounts stay, and those of a day that was
        # left before count again.
        index = next((index for index, past in enumerate(row.past) if past.day == day), len(row.past))
        again, first_day = row.past[index:], row.first_day or row.day
        row = replace(
            row,
            day=day,
            first_day=0 if again or day == first_day else first_day,
            spent_micro=row.spent_micro + sum(past.spent_micro for past in again),
            core_ms=row.core_ms + sum(past.core_ms for past in again),
            past=row.past[:index],
        )
    return _charge_until(ledger, row, now, now)


def _charge_until(ledger: Ledger, row: Spending, now: int, until_ms: int) -> Spending:
    """The row with the costs of its workers between its last charge and `until_ms`, which is not after `now`."""
    spent, used_ms = row.spent_micro, row.core_ms
    for worker in ledger.workers.values():
        if worker.provider == row.provider:
            until = min(until_ms, counted_until_ms(worker, ledger.worker_rules, now))
            # It costs something since it was wanted, or since it was seen to have left the queue of its provider; what
            # it ran before that is charged then.
            began_at_ms = worker.booted_at_ms if worker.queue_ms and worker.booted_at_ms else worker.created_at_ms
            elapsed_ms = until - max(row.as_of_ms, now if worker.waits else began_at_ms)
            spent += cost_micro(worker.price_micro or 0, elapsed_ms)
            used_ms += core_ms(worker, elapsed_ms)
    return replace(row, spent_micro=spent, as_of_ms=until_ms, core_ms=used_ms)


def charge_unseen(spending: Spending, worker: Worker, now: int, began_at_ms: int = 0) -> Spending:
    """Charge for a possible run since the worker was last seen in the queue of its provider, or since `began_at_ms`."""
    ran_ms = now - max(worker.waited_until_ms or worker.booted_at_ms, began_at_ms)
    if worker.lifetime_ms:
        ran_ms = min(ran_ms, worker.lifetime_ms + END_GRACE_MS)
    return replace(
        spending,
        spent_micro=spending.spent_micro + cost_micro(worker.price_micro or 0, ran_ms),
        core_ms=spending.core_ms + core_ms(worker, ran_ms),
    )


def budget_state(ledger: Ledger, now: int, wall_ms: int, *, without: str = "") -> BudgetState:
    """The costs of workers now; `without` leaves one of them out that is known not to exist."""
    day = current_day(ledger, wall_ms)
    living = [worker for worker in ledger.workers.values() if worker.id != without]
    rules, until_midnight_ms = ledger.worker_rules, max((day + 1) * DAY_MS - wall_ms, 0)
    settled = {provider: settle(ledger, provider, now, wall_ms) for provider in ledger.spending}
    ahead_micro, core_ahead_ms = 0, dict.fromkeys(rules.core_hour_budgets, 0)
    for worker in living:
        left_ms = counted_until_ms(worker, rules, now) - now
        ahead_micro += cost_micro(worker.price_micro or 0, min(left_ms, until_midnight_ms))
        if worker.provider in core_ahead_ms:  # one that has not begun may use it all on the day that it begins
            has_begun = worker.booted_at_ms and not worker.waits
            day_ms = min(left_ms, until_midnight_ms) if has_begun else _on_its_day_ms(left_ms, until_midnight_ms)
            core_ahead_ms[worker.provider] += core_ms(worker, day_ms)
    return BudgetState(
        day=day,
        rate_micro=sum(worker.price_micro or 0 for worker in living),
        spent_micro=sum(row.spent_micro for row in settled.values()),
        ahead_micro=ahead_micro,
        until_midnight_ms=until_midnight_ms,
        rules=rules,
        unpriced=tuple(worker.id for worker in living if worker.price_micro is None),
        cores=tuple(
            CoreHours(
                provider,
                limit_milli,
                settled[provider].core_ms if provider in settled else 0,
                core_ahead_ms[provider],
            )
            for provider, limit_milli in sorted(rules.core_hour_budgets.items())
        ),
    )


def _on_its_day_ms(life_ms: int, until_midnight_ms: int) -> int:
    """Longest run on its first day of a worker with an unknown start."""
    return until_midnight_ms if life_ms >= DAY_MS else life_ms
