"""Registry of providers: the built-in ones that the config names, and those of other packages by entry point.

A package plugs a provider in by an entry point of the group `distributed_grid.providers`, whose name is the provider's
and whose object is a subclass of `CloudProviderBase`. It is made with its section of the config, `providers.<name>`, as
a mapping with its variables expanded. Nothing is made before it is used.
"""

from __future__ import annotations

import importlib
import threading

from distributed_grid.config import ClusterConfig
from distributed_grid.config.providers import PLUG_IN_GROUP, plugged_in_names
from distributed_grid.errors import BadInput, GridError
from distributed_grid.ports import CloudProviderBase
from distributed_grid.server.workers.credential_mask import CredentialMask

_CLOUDS = "distributed_grid.adapters.clouds"
BUILT_IN = {
    "aws": (f"{_CLOUDS}.aws", "AWSCloudProvider"),
    "docker_local": (f"{_CLOUDS}.docker_local", "DockerLocalProvider"),
    "gcp": (f"{_CLOUDS}.gcp", "GCPCloudProvider"),
    "slurm": (f"{_CLOUDS}.slurm", "SlurmProvider"),
}
"""The providers of this package: the module of each, loaded where it is used, and its class."""


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
