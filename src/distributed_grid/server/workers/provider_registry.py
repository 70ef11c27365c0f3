"""Registry of providers: the built-in ones that the config names, those of other packages, and a check of each.

A package plugs a provider in by an entry point of the group `distributed_grid.providers`, whose name is the provider's
and whose object is a subclass of `CloudProviderBase`. It is made with its section of the config, `providers.<name>`, as
a mapping with its variables expanded. Nothing is made before it is used.

A check says what a provider lacks before it can be used, and what a call that changes nothing says. It needs no control
plane. Nothing that it says has a credential in it, whoever said it first.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.providers import PLUG_IN_GROUP, plugged_in_names
from distributed_grid.config.value_kinds import is_loopback
from distributed_grid.errors import BadInput, GridError, TimedOut
from distributed_grid.number_text import counted, plain_number, rounded
from distributed_grid.ports import CloudProviderBase, WorkerOffer
from distributed_grid.server.workers.credential_mask import CredentialMask

_CLOUDS = "distributed_grid.adapters.clouds"
BUILT_IN = {
    "aws": (f"{_CLOUDS}.aws", "AWSCloudProvider"),
    "docker_local": (f"{_CLOUDS}.docker_local", "DockerLocalProvider"),
    "gcp": (f"{_CLOUDS}.gcp", "GCPCloudProvider"),
    "slurm": (f"{_CLOUDS}.slurm", "SlurmProvider"),
}
"""The providers of this package: the module of each, loaded where it is used, and its class."""
T = TypeVar("T")


class ProviderRegistry:
    """Makes each provider once, on first use; safe in threads."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._made: dict[str, CloudProviderBase] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The providers that the config names."""
        return list(self._config.providers)

    def default(self) -> str:
        """The provider that is meant where none is named."""
        names = self.names()
        if self._config.scaling.provider:
            return self._config.scaling.provider
        if len(names) == 1:
            return names[0]
        raise BadInput(f"name a provider with --provider; the config has: {', '.join(names) or 'none'}")

    def open(self, name: str) -> CloudProviderBase:
        """The provider of this name; BadInput where there is none or its settings cannot be used. What is said about
        that has no credential in it."""
        with self._lock:
            found = self._made.get(name)
            if found is None:
                try:
                    found = self._made[name] = self._make(name)
                except GridError as failure:
                    raise self.mask(name).error(failure) from None
            return found

    def mask(self, name: str) -> CredentialMask:
        """What takes the credentials of a provider out of what it says."""
        return CredentialMask.of_providers(self._config, [name])

    def _make(self, name: str) -> CloudProviderBase:
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            raise BadInput(f"no provider {name!r} in the config (there: {known}); add it under providers")
        if name in plugged_in_names():
            return self._plugged_in(name)
        module, provider = BUILT_IN[name]
        made: CloudProviderBase = getattr(importlib.import_module(module), provider)(self._config.provider(name))
        return made

    def _plugged_in(self, name: str) -> CloudProviderBase:
        from importlib.metadata import entry_points

        (point, *_) = entry_points(group=PLUG_IN_GROUP, name=name)
        try:
            made = point.load()(self._config.plugged_in_provider(name))
        except GridError:
            raise
        except Exception as failure:  # somebody else's code
            raise GridError(f"the provider {name} ({point.value}) cannot be used: {failure}") from failure
        if not isinstance(made, CloudProviderBase):
            raise GridError(f"the provider {name} ({point.value}) is no CloudProviderBase")
        return made


class ProviderReport(Struct, frozen=True):
    """What a provider lacks (`problems`: it cannot be used until they are solved), and what works (`checks`)."""

    provider: str
    problems: tuple[str, ...]
    checks: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        return not self.problems


def check_providers(config: ClusterConfig, *, listens_on: str = "") -> list[ProviderReport]:
    """A report of each provider; `listens_on` is where the control plane listens, unless as the config says."""
    registry = ProviderRegistry(config)
    host = listens_on or config.server.host
    return [check_provider(config, registry, name, host) for name in registry.names()]


def check_provider(config: ClusterConfig, registry: ProviderRegistry, name: str, host: str) -> ProviderReport:
    """What one provider lacks. Of its calls each has the deadline of the config."""
    problems: list[str] = []
    checks: list[str] = []
    try:
        provider = registry.open(name)
        reach = reach_problem(provider, host)
        problems += [reach] if reach else []
        checks += _answered(f"{name} check", provider.check, config.workers.call_seconds)
        offers = _answered(f"{name} offers", provider.offers, config.workers.call_seconds)
        offered, missing = offer_lines(config, offers)
        checks += offered
        problems += missing
    except ConfigProblems as found:
        problems += str(found).splitlines()
    except Exception as failure:  # an SDK's own, and those of other packages, too: it is what is wrong
        problems.append(_one_line(failure))
    mask = CredentialMask.of_providers(config, [name])
    return ProviderReport(name, tuple(map(mask.text, problems)), tuple(map(mask.text, checks)))


def reach_problem(provider: CloudProviderBase, host: str) -> str:
    """Why its machines could not reach the control plane; empty where they can."""
    if provider.is_on_this_host or not (host == "local" or is_loopback(host)):
        return ""
    return (
        "its machines could not reach the control plane, which listens on this machine only; "
        "set server.host and server.names, or type: grid daemon start --listen 0.0.0.0:7433"
    )


def offer_lines(config: ClusterConfig, offers: Sequence[WorkerOffer]) -> tuple[list[str], list[str]]:
    """What is offered and why some of it cannot be had; and what is wrong where nothing of it could be started."""
    scaling = config.scaling
    is_limited = scaling.budget_usd_per_hour is not None or scaling.budget_usd_per_day is not None
    lines, usable = [], 0
    for offer in offers:
        problem = offer.unavailable
        if not problem and is_limited and offer.price_micro is None:
            problem = "its price is not known, and there is a budget: set price_per_hour"
        usable += not problem
        lines.append(f"{offer.id}: {problem or _price(offer)}")
    if usable:
        return lines, []
    return lines, ["nothing that it offers can be started" if offers else "it offers nothing"]


def _price(offer: WorkerOffer) -> str:
    has = offer.resources
    price = (
        "price not known" if offer.price_micro is None else f"${plain_number(offer.price_micro / 1_000_000)} an hour"
    )
    gpus = f", {counted(has.gpu_count, 'GPU')}" if has.gpu_count else ""
    return f"{counted(has.cpu_milli / 1000, 'core')}, {rounded(has.memory_bytes / 2**30)} GB{gpus}, {price}"


def report_view(report: ProviderReport) -> Mapping[str, Any]:
    """A report as JSON."""
    return {
        "provider": report.provider,
        "ok": report.is_usable,
        "problems": list(report.problems),
        "checks": list(report.checks),
    }


def _answered(what: str, call: Callable[[], T], seconds: float) -> T:
    """What a call answers within its time; it may go on in its thread, which keeps no process alive."""
    outcome: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as failure:  # it is raised where it is waited for
            failed.append(failure)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not outcome:
        raise TimedOut(f"{what}: no answer within {plain_number(seconds)} s")
    return outcome[0]


def _one_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split()) or type(failure).__name__
    return text if isinstance(failure, GridError) else f"{type(failure).__name__}: {text}"
