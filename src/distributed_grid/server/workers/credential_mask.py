"""Mask of the credentials of providers: errors, answers and log lines show them as `***`, whoever put them there.

What a provider says comes from an SDK or from another package, and both may repeat what they were configured with.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import astuple, replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config.providers import PROVIDERS, written_secrets
from distributed_grid.config.value_kinds import MASK, Secret
from distributed_grid.errors import GridError, NoCapacity, Refused, Unreachable
from distributed_grid.ports import WorkerInstance, WorkerOffer

MIN_SECRET_CHARS = 4
"""A shorter one would be found in every other word."""
T = TypeVar("T")


def secrets_of(config: ClusterConfig, name: str) -> list[str]:
    """The credentials of a provider, as written and with their variables expanded; none where they are missing."""
    found = list(written_secrets(config.providers.get(name)))
    try:
        if name in PROVIDERS:
            values = astuple(config.provider(name))
            found += [value.reveal() for value in values if isinstance(value, Secret)]
        else:
            found += written_secrets(config.plugged_in_provider(name))
    except GridError:
        pass  # a variable is missing, so nobody has its value
    return [secret for secret in found if len(secret) >= MIN_SECRET_CHARS and "${" not in secret]


class CredentialMask:
    """Takes credentials out of what is said."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)

    @classmethod
    def of_providers(cls, config: ClusterConfig, names: Iterable[str] | None = None) -> CredentialMask:
        """The mask of these providers of a config, or of all."""
        chosen = config.providers if names is None else names
        return cls(secret for name in chosen for secret in secrets_of(config, name))

    def text(self, said: str) -> str:
        """The same without credentials."""
        for secret in self._secrets:
            said = said.replace(secret, MASK)
        return said

    def error(self, failure: GridError) -> GridError:
        """The same error without credentials, and without the errors that led to it."""
        failure.__cause__ = failure.__context__ = None
        failure.args = tuple(self.text(one) if isinstance(one, str) else one for one in failure.args)
        if isinstance(failure, Refused):
            failure.reasons = tuple(map(self.text, failure.reasons))
        if isinstance(failure, NoCapacity):
            failure.scope = self.text(failure.scope)
        said = str(failure)
        if self.text(said) == said:
            return failure
        return Unreachable(self.text(said)) if failure.retryable else Refused(self.text(said))

    def answer(self, found: T) -> T:
        """What a provider has answered, its texts without credentials."""
        if not self._secrets:
            return found
        if isinstance(found, WorkerInstance):
            return replace(found, detail=self.text(found.detail))
        if isinstance(found, WorkerOffer):
            return replace(found, unavailable=self.text(found.unavailable))
        if isinstance(found, list | tuple):
            return type(found)(map(self.answer, found))
        return found


class MaskedLog(logging.Filter):
    """For handlers: lines without credentials, tracebacks included."""

    def __init__(self, mask: CredentialMask) -> None:
        super().__init__()
        self._mask = mask

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if (masked := self._mask.text(said)) != said:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if (masked := self._mask.text(trace)) != trace:
                record.exc_info, record.exc_text = None, masked
        return True
