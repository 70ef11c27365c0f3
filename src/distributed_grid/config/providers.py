"""Cloud providers: kept as written, and opened, variables and all, only when one is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, SecretStr

from distributed_grid.config.kinds.containers import KeyTable, ListOf, MapOf, key, read_or_refuse
from distributed_grid.config.kinds.numbers import Amount, Plain, Size
from distributed_grid.config.kinds.text import FLAG, MASK, PATH, TEXT, Hidden
from distributed_grid.config.parse_context import KeyPath, ParseContext
from distributed_grid.config.sections import Frozen
from distributed_grid.config.yaml_document import YamlNode, from_plain, to_plain
from distributed_grid.errors import BadInput

_NAMED = MapOf(TEXT, TEXT, "kinds of worker, such as cpu and gpu, to machine types")
_PRICES = MapOf(TEXT, Plain("a price per hour"), "kinds of worker to prices per hour")


class AwsProvider(Frozen):
    """Where and as whom to rent EC2 instances; without credentials, the usual AWS sources are used."""

    region: str
    instance_types: dict[str, str] = Field(default_factory=dict)
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    spot_instance_enabled: bool = False
    image_id: str | None = None
    subnet_id: str | None = None
    security_group_ids: tuple[str, ...] = ()
    key_name: str | None = None
    endpoint_url: str | None = None
    price_per_hour: dict[str, float] = Field(default_factory=dict)


class GcpProvider(Frozen):
    """Where and as whom to rent Compute Engine instances."""

    project: str
    zone: str
    machine_types: dict[str, str] = Field(default_factory=dict)
    credentials_file: str | None = None
    preemptible_enabled: bool = False
    image: str | None = None
    network: str | None = None
    price_per_hour: dict[str, float] = Field(default_factory=dict)


class DockerLocalProvider(Frozen):
    """How worker containers are started on this machine."""

    image: str
    cpu_limit_milli: int | None = None
    memory_limit_bytes: int | None = None
    network: str | None = None
    price_per_hour: dict[str, float] = Field(default_factory=dict)


Provider = AwsProvider | GcpProvider | DockerLocalProvider

TABLES: dict[str, KeyTable] = {
    "aws": KeyTable(
        (
            key("region", TEXT),
            key("instance_types", _NAMED),
            key("credentials.access_key_id", Hidden(), to="access_key_id"),
            key("credentials.secret_access_key", Hidden(), to="secret_access_key"),
            key("credentials.session_token", Hidden(), to="session_token"),
            key("spot_instance_enabled", FLAG),
            key("image_id", TEXT),
            key("subnet_id", TEXT),
            key("security_group_ids", ListOf(TEXT, "security groups")),
            key("key_name", TEXT),
            key("endpoint_url", TEXT),
            key("price_per_hour", _PRICES),
        ),
        required=("region",),
    ),
    "gcp": KeyTable(
        (
            key("project", TEXT),
            key("zone", TEXT),
            key("machine_types", _NAMED),
            key("credentials_file", PATH),
            key("preemptible_enabled", FLAG),
            key("image", TEXT),
            key("network", TEXT),
            key("price_per_hour", _PRICES),
        ),
        required=("project", "zone"),
    ),
    "docker_local": KeyTable(
        (
            key("image", TEXT),
            key("cpu_limit", Amount(1000, "a number of CPU cores", above_zero=True), to="cpu_limit_milli"),
            key("memory_limit", Size(), to="memory_limit_bytes"),
            key("network", TEXT),
            key("price_per_hour", _PRICES),
        ),
        required=("image",),
    ),
}
_MODELS: dict[str, type[AwsProvider] | type[GcpProvider] | type[DockerLocalProvider]] = {
    "aws": AwsProvider,
    "gcp": GcpProvider,
    "docker_local": DockerLocalProvider,
}


@dataclass(frozen=True, slots=True)
class AsWritten:
    """Checks a provider as far as its variables allow, and keeps it as it was written."""

    table: KeyTable

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Any:
        draft = ParseContext(desk.file, env=None)
        read_or_refuse(self.table, spot, place, draft)
        desk.problems += draft.problems
        return to_plain(spot)

    def show(self, value: Any) -> Any:
        return _masked(value)


_KNOWN = KeyTable(tuple(key(name, AsWritten(table)) for name, table in TABLES.items()))


class Providers:
    """The providers of a cluster by name, each as it was written."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> dict[str, Any]:
        return _KNOWN.read(spot, place, desk)

    def show(self, value: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: _masked(settings) for name, settings in value.items()}


PROVIDERS = Providers()


def _masked(settings: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(settings)
    if isinstance(credentials := shown.get("credentials"), dict):
        shown["credentials"] = {
            name: value
            if isinstance(value, str) and value.startswith("${") and value.find("}") == len(value) - 1
            else MASK
            for name, value in credentials.items()
        }
    return shown


def open_provider(name: str, written: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Provider:
    """The provider's settings with every variable filled in; a missing one is named."""
    if name not in written or written[name] is None:
        known = ", ".join(n for n, settings in written.items() if settings is not None) or "none"
        raise BadInput(f"no provider {name!r} in the configuration (there: {known})")
    desk = ParseContext("", os.environ if env is None else env)
    place = KeyPath(f"providers.{name}", name)
    values = read_or_refuse(TABLES[name], from_plain(written[name]), place, desk)
    desk.finish()
    return _MODELS[name].model_validate(values)
