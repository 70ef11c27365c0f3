"""Availability of workers: which offers of a provider are closed for a while, and what this machine has for workers.

A scope of a closure is words of the form `zone:us-west-2a`, `market:spot` and `kind:gpu`: it holds for the offers that
all of them are true of. `offer:ID` is one offer alone, `provider:NAME` all of a provider. So a zone and a market of one
name never mean each other.

The control plane's own machine can be the host of workers, in containers: they get no more than it lends.
"""

from __future__ import annotations

from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, gigabytes
from distributed_grid.domain.workers import OfferClosure, Worker
from distributed_grid.number_text import counted, plain_number

WORDS = ("zone", "market", "kind")  # what a scope may name, in the order in which it does


class OfferPlace(Struct, frozen=True):
    """Where an offer stands among those of its provider."""

    provider: str
    offer: str
    zone: str = ""
    market: str = ""
    kind: str = ""

    def scopes(self) -> list[str]:
        words = [f"{name}:{value}" for name in WORDS if (value := getattr(self, name))]
        groups = [" ".join(group) for count in range(1, len(words) + 1) for group in combinations(words, count)]
        return [f"offer:{self.offer}", *groups, f"provider:{self.provider}"]

    def scope_like(self, text: str) -> str:
        """The scope named by this text if the offer is in it; else the offer alone."""
        names = {name: at for at, name in enumerate(WORDS)}
        scope = " ".join(sorted(text.split(), key=lambda word: names.get(word.partition(":")[0], len(WORDS))))
        return scope if scope in self.scopes() else f"offer:{self.offer}"


def place_of(worker: Worker) -> OfferPlace:
    """Place of a worker's offer."""
    offer = worker.offer or worker.worker_type
    return OfferPlace(worker.provider, offer, worker.zone, worker.market, worker.worker_type)


def closure_of(ledger: Ledger, place: OfferPlace) -> OfferClosure | None:
    """Why an offer is not to be tried at present, the closure that lasts longest; None where it may be."""
    if not ledger.offer_closures:
        return None
    keys = [f"{place.provider}/{scope}" for scope in place.scopes()]
    found = [ledger.offer_closures[key] for key in keys if key in ledger.offer_closures]
    return max(found, key=lambda closure: closure.until_ms, default=None)


def closed_text(closure: OfferClosure | None, now: int) -> str:
    """Reason and remaining time of a closure; empty without one."""
    if closure is None:
        return ""
    seconds = max(-(-(closure.until_ms - now) // 1000), 0)
    return f"{closure.why or 'it is closed'}; not tried for {seconds} s"


def close_scope(ledger: Ledger, provider: str, scope: str, until_ms: int, why: str) -> OfferClosure:
    """A scope closed until then, or for longer where it is already."""
    known = ledger.offer_closures.get(f"{provider}/{scope}")
    if known is not None and known.until_ms > until_ms:
        return known
    return OfferClosure(provider, scope, until_ms, why)


def own_machine(ledger: Ledger) -> str:
    """The node of the control plane's own machine; empty if there is none, or if it lends nothing."""
    own = (node for node in ledger.nodes.values() if node.host == "local" and not node.simulated)
    return next((node.name for node in own if node.caps.can_share), "")


def with_host(ledger: Ledger, worker: Worker) -> Worker:
    """The worker with the node on which it would run, and with no more than that lends in all.

    A warning says where that is less than was asked for.
    """
    host = own_machine(ledger) if worker.on_this_machine else ""
    if not host:
        return worker
    lends, asked = ledger.lends(host), worker.resources
    cpu_milli, memory_bytes = min(asked.cpu_milli, lends.cpu_milli), min(asked.memory_bytes, lends.memory_bytes)
    less = []
    if cpu_milli < asked.cpu_milli:
        less.append(f"{counted(cpu_milli / 1000, 'core')} instead of {plain_number(asked.cpu_milli / 1000)}")
    if memory_bytes < asked.memory_bytes:
        less.append(f"{gigabytes(memory_bytes)} of memory instead of {gigabytes(asked.memory_bytes)}")
    if not less or not cpu_milli or not memory_bytes:
        return replace(worker, host=host)
    resources = replace(asked, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    return replace(worker, host=host, resources=resources, warning=f"{' and '.join(less)}: {host} lends no more")


def host_amounts(worker: Worker) -> Amounts:
    has = worker.resources
    return Amounts(has.cpu_milli, has.memory_bytes, has.gpu_count * WHOLE_GPU)


def has_room(ledger: Ledger, worker: Worker) -> bool:
    """Whether the machine on which a worker would run has room for it now; one elsewhere needs none here."""
    hosted = with_host(ledger, worker)
    if not hosted.host:
        return True
    return ledger.claims_on(hosted.host).claim_for(host_amounts(hosted), ledger.lends(hosted.host)) is not None
