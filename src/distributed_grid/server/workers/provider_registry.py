"""Registry of providers: the built-in ones that the config names, those of other packages, a check of each, and the
mask of their credentials.

A package plugs a provider in by an entry point of the group `distributed_grid.providers`, whose name is the provider's
and whose object is a subclass of `CloudProviderBase`. It is made on first use, with its section of the config,
`providers.<name>`, as a mapping with its variables expanded. A check needs no control plane. Errors, answers and log
lines show credentials as `***`: an SDK or another package may repeat its configuration in them.
"""

from __future__ import annotations

import importlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import astuple, replace

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.providers import PLUG_IN_GROUP, PROVIDERS, plugged_in_names, written_secrets
from distributed_grid.config.value_kinds import MASK, Secret, is_loopback
from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, TimedOut, Unreachable
from distributed_grid.number_text import counted, plain_number, rounded
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer

MIN_SECRET_CHARS = 4  # a shorter one would match in every other word
_CLOUDS = "distributed_grid.adapters.clouds"
BUILT_IN = {
    "aws": (f"{_CLOUDS}.aws", "AWSCloudProvider"),
    "docker_local": (f"{_CLOUDS}.docker_local", "DockerLocalProvider"),
    "gcp": (f"{_CLOUDS}.gcp", "GCPCloudProvider"),
    "slurm": (f"{_CLOUDS}.slurm", "SlurmProvider"),
}
"""Modules and classes of the built-in providers, imported on first use."""
T = TypeVar("T")


def secrets_of(config: ClusterConfig, name: str) -> list[str]:
    """Credentials of a provider, as written and with their variables expanded."""
    secrets = list(written_secrets(config.providers.get(name)))
    try:
        if name in PROVIDERS:
            values = astuple(config.provider(name))
            secrets += [value.reveal() for value in values if isinstance(value, Secret)]
        else:
            secrets += written_secrets(config.plugged_in_provider(name))
    except GridError:
        pass  # a variable is missing, so nobody has its value
    return [secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS and "${" not in secret]


class CredentialMask:
    """Replaces credentials in texts, errors and answers by `***`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)

    @classmethod
    def of_providers(cls, config: ClusterConfig, names: Iterable[str] | None = None) -> CredentialMask:
        chosen = config.providers if names is None else names
        return cls(secret for name in chosen for secret in secrets_of(config, name))

    def text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def error(self, failure: GridError) -> GridError:
        """The same error without credentials, and without the errors that led to it."""
        failure.__cause__ = failure.__context__ = None
        failure.args = tuple(self.text(part) if isinstance(part, str) else part for part in failure.args)
        if isinstance(failure, Refused):
            failure.reasons = tuple(map(self.text, failure.reasons))
        if isinstance(failure, NoCapacity):
            failure.scope = self.text(failure.scope)
        text = str(failure)
        if self.text(text) == text:
            return failure
        return Unreachable(self.text(text)) if failure.retryable else Refused(self.text(text))

    def answer(self, answer: T) -> T:
        """The same answer of a provider with masked texts."""
        if not self._secrets:
            return answer
        if isinstance(answer, WorkerInstance):
            return replace(answer, detail=self.text(answer.detail))
        if isinstance(answer, WorkerOffer):
            return replace(answer, unavailable=self.text(answer.unavailable))
        if isinstance(answer, list | tuple):
            return type(answer)(map(self.answer, answer))
        return answer


class MaskedLog(logging.Filter):
    """Filter for log handlers: masks lines and tracebacks."""

    def __init__(self, mask: CredentialMask) -> None:
        super().__init__()
        self._mask = mask

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (masked := self._mask.text(message)) != message:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if (masked := self._mask.text(trace)) != trace:
                record.exc_info, record.exc_text = None, masked
        return True


class ProviderRegistry:
    """Makes each provider once, on first use; safe in threads."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._made: dict[str, CloudProviderBase] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return list(self._config.providers)

    def default(self) -> str:
        """The provider of a request that names none."""
        names = self.names()
        if self._config.scaling.provider:
            return self._config.scaling.provider
        if len(names) == 1:
            return names[0]
        raise BadInput(f"name a provider with --provider; the config has: {', '.join(names) or 'none'}")

    def open(self, name: str) -> CloudProviderBase:
        """The provider of this name; BadInput, without credentials, if there is none or its settings are invalid."""
        with self._lock:
            provider = self._made.get(name)
            if provider is None:
                try:
                    provider = self._made[name] = self._make(name)
                except GridError as failure:
                    raise self.mask(name).error(failure) from None
            return provider

    def mask(self, name: str) -> CredentialMask:
        return CredentialMask.of_providers(self._config, [name])

    def _make(self, name: str) -> CloudProviderBase:
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            raise BadInput(f"no provider {name!r} in the config (there: {known}); add it under providers")
        if name not in plugged_in_names():
            module, provider = BUILT_IN[name]
            built_in: CloudProviderBase = getattr(importlib.import_module(module), provider)(
                self._config.provider(name)
            )
            return built_in
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
    provider: str
    problems: tuple[str, ...]  # it cannot be used until they are solved
    checks: tuple[str, ...]  # lines about its working parts

    @property
    def is_usable(self) -> bool:
        return not self.problems


def check_providers(config: ClusterConfig, *, listens_on: str = "") -> list[ProviderReport]:
    """A report on each provider; `listens_on` is the address of the control plane if the config does not have it."""
    registry = ProviderRegistry(config)
    host = listens_on or config.server.host
    return [check_provider(config, registry, name, host) for name in registry.names()]


def check_provider(config: ClusterConfig, registry: ProviderRegistry, name: str, host: str) -> ProviderReport:
    """The report on one provider. Each of its calls has the deadline of the config."""
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
    except ConfigProblems as invalid:
        problems += str(invalid).splitlines()
    except Exception as failure:  # any error of an SDK or another package is a problem of the provider
        text = " ".join(str(failure).split()) or type(failure).__name__
        problems.append(text if isinstance(failure, GridError) else f"{type(failure).__name__}: {text}")
    mask = registry.mask(name)
    return ProviderReport(name, tuple(map(mask.text, problems)), tuple(map(mask.text, checks)))


def reach_problem(provider: CloudProviderBase, host: str) -> str:
    """Reason why its machines could not reach the control plane; empty if they can."""
    if provider.is_on_this_host or not (host == "local" or is_loopback(host)):
        return ""
    return (
        "its machines could not reach the control plane, which listens on this machine only; "
        "set server.host and server.names, or type: grid daemon start --listen 0.0.0.0:7433"
    )


def offer_lines(config: ClusterConfig, offers: Sequence[WorkerOffer]) -> tuple[list[str], list[str]]:
    """A line for each offer with its price or problem; and a problem if none of them can be started."""
    scaling = config.scaling
    is_limited = scaling.budget_usd_per_hour is not None or scaling.budget_usd_per_day is not None
    lines, usable = [], 0
    for offer in offers:
        problem = offer.unavailable
        if not problem and is_limited and offer.price_micro is None:
            problem = "its price is not known, and there is a budget: set price_per_hour"
        if problem:
            lines.append(f"{offer.id}: {problem}")
            continue
        usable += 1
        has, price = offer.resources, "price not known"
        if offer.price_micro is not None:
            price = f"${plain_number(offer.price_micro / 1_000_000)} an hour"
        gpus = f", {counted(has.gpu_count, 'GPU')}" if has.gpu_count else ""
        size = f"{counted(has.cpu_milli / 1000, 'core')}, {rounded(has.memory_bytes / 2**30)} GB{gpus}"
        lines.append(f"{offer.id}: {size}, {price}")
    if usable:
        return lines, []
    return lines, ["nothing that it offers can be started" if offers else "it offers nothing"]


def report_view(report: ProviderReport) -> Mapping[str, Any]:
    return {
        "provider": report.provider,
        "ok": report.is_usable,
        "problems": list(report.problems),
        "checks": list(report.checks),
    }


def _answered(name: str, call: Callable[[], T], seconds: float) -> T:
    """Answer of a call within its deadline. A late call continues in a daemon thread, which keeps no process alive."""
    outcome: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as failure:  # it is raised in the waiting thread
            failed.append(failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not outcome:
        raise TimedOut(f"{name}: no answer within {plain_number(seconds)} s")
    return outcome[0]
