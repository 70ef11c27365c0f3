"""Budget of workers: what they cost an hour and have cost today, and why another one is refused.

- An hour costs the prices of all that is not proven gone, creations without an answer included.
- A day (UTC) costs what was spent on it and the price of each of them until midnight. The day never goes back.
- What costs nobody knows how much is refused where there is a budget.

Money is in millionths of a dollar; times are the ledger's, only the day and its end are read off the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.workers import Spending, Worker

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MICRO = 1_000_000


class BudgetState(Struct, frozen=True):
    """What workers cost at one moment: `rate_micro` an hour, `spent_micro` so far on `day`, and `until_midnight_ms`.

    `unpriced` are those of which nobody knows what they cost.
    """

    day: int
    rate_micro: int
    spent_micro: int
    until_midnight_ms: int
    per_hour_micro: int | None = None
    per_day_micro: int | None = None
    unpriced: tuple[str, ...] = ()

    @property
    def day_micro(self) -> int:
        """What the day will have cost if everything runs until midnight."""
        return self.spent_micro + cost_micro(self.rate_micro, self.until_midnight_ms)

    @property
    def is_limited(self) -> bool:
        return self.per_hour_micro is not None or self.per_day_micro is not None

    def with_one_more(self, price_micro: int | None) -> BudgetState:
        """The same with one more worker, from now on."""
        return replace(self, rate_micro=self.rate_micro + (price_micro or 0))

    def refusal(self, what: str, price_micro: int | None) -> str | None:
        """Why one more worker at this price is not to be started; None where it may be."""
        if not self.is_limited:
            return None
        if price_micro is None:
            return f"what {what} costs is not known, and there is a budget; set its price_per_hour"
        if self.unpriced:
            return f"what {self.unpriced[0]} costs is not known, and there is a budget; terminate it first"
        after = self.with_one_more(price_micro)
        if self.per_hour_micro is not None and after.rate_micro > self.per_hour_micro:
            return (
                f"{what} at {usd(price_micro)} an hour would make {usd(after.rate_micro)} an hour, "
                f"and scaling.budget_per_hour is {usd(self.per_hour_micro)}"
            )
        if self.per_day_micro is not None and after.day_micro > self.per_day_micro:
            return (
                f"{what} at {usd(price_micro)} an hour would make {usd(after.day_micro)} by midnight UTC "
                f"({usd(self.spent_micro)} spent today), and scaling.budget_per_day is {usd(self.per_day_micro)}"
            )
        return None


def cost_micro(rate_micro: int, elapsed_ms: int) -> int:
    """What a time costs at a price per hour, rounded up."""
    return -(-rate_micro * max(elapsed_ms, 0) // HOUR_MS)


def usd(micro: int) -> str:
    """An amount of money as it is shown."""
    return f"${micro / MICRO:.4f}".rstrip("0").rstrip(".") if micro % 10_000 else f"${micro / MICRO:.2f}"


def current_day(ledger: Ledger, wall_ms: int) -> int:
    """The day (UTC) that is spent on: the wall clock's, unless a later one has begun already."""
    return max([wall_ms // DAY_MS, *(row.day for row in ledger.spending.values())])


def settle(ledger: Ledger, provider: str, now: int, wall_ms: int) -> Spending:
    """What the workers of a provider have cost on the current day until now."""
    day = current_day(ledger, wall_ms)
    row = ledger.spending.get(provider)
    if row is None:
        return Spending(provider, day, 0, now)
    since, spent = row.as_of_ms, row.spent_micro
    if day != row.day:
        midnight = now - (wall_ms - day * DAY_MS) if wall_ms >= day * DAY_MS else since
        since, spent = max(since, midnight), 0
    for worker in ledger.workers.values():
        if worker.provider == provider:
            spent += cost_micro(worker.price_micro or 0, now - max(since, worker.created_at_ms))
    return Spending(provider, day, spent, now)


def budget_state(ledger: Ledger, now: int, wall_ms: int, *, without: str = "") -> BudgetState:
    """What workers cost now; `without` leaves one of them out that is known not to exist."""
    day = current_day(ledger, wall_ms)
    living: Iterable[Worker] = [worker for worker in ledger.workers.values() if worker.id != without]
    rules = ledger.worker_rules
    return BudgetState(
        day,
        sum(worker.price_micro or 0 for worker in living),
        sum(settle(ledger, provider, now, wall_ms).spent_micro for provider in ledger.spending),
        max((day + 1) * DAY_MS - wall_ms, 0),
        rules.budget_per_hour_micro,
        rules.budget_per_day_micro,
        tuple(worker.id for worker in living if worker.price_micro is None),
    )


def is_closed(ledger: Ledger, provider: str, offer: str, *, zone: str = "", market: str = "", kind: str = "") -> str:
    """Why an offer is not to be tried at present; empty where it may be."""
    for scope in (offer, zone, market, kind, provider):
        closure = ledger.offer_closures.get(f"{provider}/{scope}") if scope else None
        if closure is not None:
            return closure.why or "it is closed"
    return ""
