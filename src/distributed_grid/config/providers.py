"""Cloud providers: stored as written; their variables are expanded only when a provider is used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from distributed_grid.config.key_tables import Key, KeyTable, ListOf, MapOf, Section, read_or_report, setting
from distributed_grid.config.parse_context import InvalidValue, KeyPath, ParseContext, ValueKind
from distributed_grid.config.value_kinds import (
    COMMAND,
    DEVICES,
    FLAG,
    MASK,
    PATH,
    SECRET,
    SOME_CORES,
    SOME_GIGABYTES,
    TEXT,
    Count,
    MemorySize,
    PlainNumber,
    Seconds,
    Secret,
    SlurmTime,
    Text,
)
from distributed_grid.config.yaml_document import YamlNode, from_plain, to_plain
from distributed_grid.errors import BadInput

_MACHINE_TYPES = MapOf(TEXT, TEXT, "kinds of worker, such as cpu and gpu, to machine types")
_IMAGE = Text("the name of an image, such as grid-worker:latest", re.compile(r"[a-z0-9][\w.\-/:@]{0,254}", re.ASCII))
_NETWORK = Text("host, bridge or the name of a network", re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII))
_ENGINE = Text("the Unix socket of a Docker engine, such as unix:///var/run/docker.sock", re.compile(r"unix:///\S+"))
_ZONE = Text("a zone, such as us-central1-a", re.compile(r"[a-z][a-z0-9-]{1,61}[a-z0-9]", re.ASCII))
_WEB = Text("an address that starts with http:// or https://", re.compile(r"https?://[^\s/]+\S*"))
_PRICES = MapOf(TEXT, PlainNumber("a price per hour"), "kinds of worker to prices per hour")
_SLURM_NAME = Text("a name that Slurm knows", re.compile(r"[A-Za-z0-9_][\w.-]{0,127}", re.ASCII))
_SLURM_NAMES = Text(
    "a partition, or several with commas between", re.compile(r"[A-Za-z0-9_][\w.-]*(,[A-Za-z0-9_][\w.-]*)*", re.ASCII)
)
_EC2_TYPE = Text("an instance type such as c5.xlarge", re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+"))
_EC2_ZONE = Text("an availability zone such as us-west-2a", re.compile(r"[a-z]{2}[a-z0-9-]+"))
_EC2_REGION = Text("a region such as us-west-2", re.compile(r"[a-z0-9-]+"))
_EC2_ENDPOINT = Text(
    "an address that starts with https://, or with http:// on this machine",
    re.compile(r"(https://[^\s/@]+|http://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?)(/\S*)?"),
)
_DISK = Count(1, 65536, "a whole number of GB")


class OneOrMore(ValueKind, frozen=True):
    """One value, or a list of them with the preferred first; each stays as it was written."""

    kind: ValueKind
    what: str

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        if not isinstance(node.value, list):
            return self.kind.read(node, path, context)
        if not node.value:
            raise InvalidValue(f"one or more {self.what}")
        return ListOf(self.kind, self.what).read(node, path, context)


_INSTANCE_TYPES = MapOf(
    TEXT, OneOrMore(_EC2_TYPE, "instance types"), "kinds of worker, such as cpu and gpu, to instance types"
)


class _TextOrList(ValueKind, frozen=True):
    """Text, or a list of it."""

    kind: ValueKind
    what: str

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        if not isinstance(node.value, list):
            return self.kind.read(node, path, context)
        found = ListOf(self.kind, self.what).read(node, path, context)
        return tuple(one for one in found if one is not None)

    def show(self, value: Any) -> Any:
        return self.kind.show(value) if isinstance(value, str) else [self.kind.show(one) for one in value]


_MACHINE_TYPE = Text("a machine type, such as n2-standard-4", re.compile(r"[a-z][a-z0-9-]{1,61}[a-z0-9]", re.ASCII))
_GCP_TYPES = MapOf(TEXT, _TextOrList(_MACHINE_TYPE, "machine types"), "kinds of worker to machine types")


class AwsSettings(Section):
    """Where and as whom to rent EC2 instances; without credentials, the usual AWS sources are used."""

    region: str = setting(_EC2_REGION)
    zones: tuple[str, ...] = setting(ListOf(_EC2_ZONE, "availability zones"), ())
    instance_types: dict[str, str | tuple[str, ...]] = setting(_INSTANCE_TYPES, {})
    access_key_id: Secret | None = setting(SECRET, None, "credentials.access_key_id")
    secret_access_key: Secret | None = setting(SECRET, None, "credentials.secret_access_key")
    session_token: Secret | None = setting(SECRET, None, "credentials.session_token")
    spot_instance_enabled: bool = setting(FLAG, False)
    spot_max_price: dict[str, float] = setting(_PRICES, {})
    image_id: str | None = setting(TEXT, None)
    disk_gb: int | None = setting(_DISK, None)
    subnet_id: str | None = setting(TEXT, None)
    subnet_ids: tuple[str, ...] = setting(ListOf(TEXT, "subnets"), ())
    associate_public_ip: bool | None = setting(FLAG, None)
    security_group_ids: tuple[str, ...] = setting(ListOf(TEXT, "security groups"), ())
    instance_profile: str | None = setting(TEXT, None)
    key_name: str | None = setting(TEXT, None)
    endpoint_url: str | None = setting(_EC2_ENDPOINT, None)
    price_per_hour: dict[str, float] = setting(_PRICES, {})

    def types_of(self, kind: str) -> tuple[str, ...]:
        """The instance types of a kind of worker, the preferred first."""
        found = self.instance_types[kind]
        return (found,) if isinstance(found, str) else tuple(found)


class GcpSettings(Section):
    """Where and as whom to rent Compute Engine instances; without a file, Google's usual sources are used."""

    project: str = setting(Text("the id of a project", re.compile(r"[a-z][a-z0-9.:-]{1,61}[a-z0-9]", re.ASCII)))
    zone: str | None = setting(_ZONE, None)
    zones: tuple[str, ...] = setting(ListOf(_ZONE, "zones"), ())
    machine_types: dict[str, str | tuple[str, ...]] = setting(_GCP_TYPES, {})
    accelerators: dict[str, str] = setting(MapOf(TEXT, TEXT, "kinds of worker to accelerators, TYPE or TYPE:COUNT"), {})
    credentials_file: str | None = setting(PATH, None)
    anonymous: bool = setting(FLAG, False)
    preemptible_enabled: bool = setting(FLAG, False)
    max_run_seconds: float = setting(Seconds(300, 3600, "hours"), 24 * 3600.0, "max_run_hours")
    image: str | None = setting(TEXT, None)
    disk_gb: int | None = setting(Count(1, 65536, "a whole number of GB"), None)
    disk_type: str | None = setting(TEXT, None)
    network: str | None = setting(TEXT, None)
    subnetwork: str | None = setting(TEXT, None)
    external_ip: bool = setting(FLAG, True)
    tags: tuple[str, ...] = setting(ListOf(TEXT, "network tags"), ())
    service_account: str | None = setting(TEXT, None)
    endpoint_url: str | None = setting(_WEB, None)
    price_per_hour: dict[str, float] = setting(_PRICES, {})

    @property
    def zone_names(self) -> tuple[str, ...]:
        """The zones in the order in which they are tried."""
        return tuple(dict.fromkeys([*([self.zone] if self.zone else []), *self.zones]))


class DockerLocalSettings(Section):
    """How worker containers are started on this machine, by the engine that listens on `endpoint_url`."""

    image: str = setting(_IMAGE, "grid-worker:latest")
    cpu_limit_milli: int | None = setting(SOME_CORES, None, "cpu_limit")
    memory_limit_bytes: int | None = setting(MemorySize(), None, "memory_limit")
    network: str = setting(_NETWORK, "host")
    endpoint_url: str = setting(_ENGINE, "unix:///var/run/docker.sock")
    price_per_hour: dict[str, float] = setting(_PRICES, {})


class SlurmWorkerType(Section):
    """What an allocation for a type of worker asks for; what is not set is that of a whole node, or the provider's."""

    cpus: int | None = setting(Count(1, 100_000, "a whole number of cores"), None)
    memory_bytes: int | None = setting(SOME_GIGABYTES, None, "memory_gb")
    gpus: int = setting(DEVICES, 0)
    partition: str | None = setting(_SLURM_NAMES, None)
    constraint: str | None = setting(TEXT, None)


class SlurmSettings(Section):
    """How and where workers are submitted to Slurm as jobs; the commands of Slurm know the cluster."""

    partition: str | None = setting(_SLURM_NAMES, None)
    account: str | None = setting(_SLURM_NAME, None)
    qos: str | None = setting(_SLURM_NAME, None)
    constraint: str | None = setting(TEXT, None)
    time_limit_seconds: float = setting(SlurmTime(), 3600.0, "time_limit")
    notice_seconds: float = setting(Seconds(1), 120.0)
    queue_limit_seconds: float = setting(SlurmTime(), 86400.0, "queue_limit")
    worker_types: dict[str, SlurmWorkerType] = setting(
        MapOf(TEXT, SlurmWorkerType.key_table, "kinds of worker, such as cpu and gpu, to what they ask for"), {}
    )
    config_file: str | None = setting(PATH, None)
    command: str | None = setting(COMMAND, None)
    directory: str = setting(PATH, "~/.distributed_grid/slurm")
    scratch: str | None = setting(PATH, None)
    budget_core_hours: float | None = setting(PlainNumber("a number of core-hours"), None)
    price_per_hour: dict[str, float] = setting(_PRICES, {})


Provider = AwsSettings | GcpSettings | DockerLocalSettings | SlurmSettings
P = TypeVar("P", AwsSettings, GcpSettings, DockerLocalSettings, SlurmSettings)

PROVIDERS: dict[str, type[Provider]] = {
    "aws": AwsSettings,
    "gcp": GcpSettings,
    "docker_local": DockerLocalSettings,
    "slurm": SlurmSettings,
}


class _UnexpandedSettings(ValueKind, frozen=True):
    """One provider's settings, checked as far as their variables allow and stored as written."""

    table: KeyTable

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        draft = ParseContext(context.file, env=None)
        read_or_report(self.table, node, path, draft)
        context.problems += draft.problems
        return to_plain(node)


PLUG_IN_GROUP = "distributed_grid.providers"
"""The group of entry points by which other packages plug providers in."""


def plugged_in_names() -> frozenset[str]:
    """The providers of other packages that are installed here."""
    from importlib.metadata import entry_points

    return frozenset(point.name for point in entry_points(group=PLUG_IN_GROUP)) - PROVIDERS.keys()


_BY_NAME = KeyTable(
    tuple(Key(name, _UnexpandedSettings(model.key_table), (name,)) for name, model in PROVIDERS.items())
)


class ProviderSettings(ValueKind, frozen=True):
    """The providers of a cluster by name, each as it was written."""

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> dict[str, Any]:
        written = node.value if isinstance(node.value, dict) else {}
        unknown = written.keys() - PROVIDERS.keys()
        plugged_in = unknown & plugged_in_names() if unknown else frozenset()
        others = {name: value for name, value in written.items() if name not in plugged_in}
        found = _BY_NAME.read(YamlNode(others, node.line) if plugged_in else node, path, context)
        for name in sorted(plugged_in):
            settings = to_plain(written[name])
            if settings is not None and not isinstance(settings, dict):
                raise InvalidValue(f"a mapping with the settings of {name}")
            found[name] = settings or {}
        return found

    def show(self, value: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: _masked(settings) for name, settings in value.items()}


_SECRET_NAME = re.compile(r"secret|password|passwd|token|credential|access_key|api_key|private_key", re.IGNORECASE)
_FILE_NAME = re.compile(r"(file|path|dir)$", re.IGNORECASE)


def _is_secret(name: str) -> bool:
    """Whether a key of a provider holds a credential, and not where one is."""
    return _SECRET_NAME.search(name) is not None and _FILE_NAME.search(name) is None


def _masked(settings: Any, is_secret: bool = False) -> Any:
    """Settings as they are shown: what is a credential is masked, unless it is only the name of a variable."""
    if isinstance(settings, Mapping):
        return {name: _masked(value, is_secret or _is_secret(str(name))) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_masked(value, is_secret) for value in settings]
    if not is_secret or settings is None or isinstance(settings, bool):
        return settings
    text = str(settings)
    return settings if text.startswith("${") and text.find("}") == len(text) - 1 else MASK


def written_secrets(settings: Any, is_secret: bool = False) -> Iterator[str]:
    """The credentials in the settings of a provider, as they are there."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from written_secrets(value, is_secret or _is_secret(str(name)))
    elif isinstance(settings, list):
        for value in settings:
            yield from written_secrets(value, is_secret)
    elif is_secret and settings is not None and not isinstance(settings, bool):
        yield str(settings)


def open_plugged_in(name: str, written: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings of another package's provider with every variable expanded; a missing one is named."""
    context = ParseContext("", os.environ if env is None else env)

    def expanded(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return {key: expanded(one, f"{at}.{key}") for key, one in value.items()}
        if isinstance(value, list):
            return [expanded(one, at) for one in value]
        if not isinstance(value, str):
            return value
        try:
            return context.expand(value)
        except InvalidValue as invalid:
            raise BadInput(f"{at}: found {invalid.found}, expected {invalid.expected}") from None

    settings: dict[str, Any] = expanded(written.get(name) or {}, f"providers.{name}")
    return settings


def provider_settings(name: str, model: type[P], settings: P | Mapping[str, Any]) -> P:
    """The settings of a provider, read as those of a config where they are a mapping of its keys."""
    found = open_provider(name, {name: settings}) if isinstance(settings, Mapping) else settings
    assert isinstance(found, model)
    return found


def open_provider(name: str, written: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Provider:
    """The provider's settings with every variable expanded; a missing one is named."""
    if name not in written or written[name] is None:
        known = ", ".join(n for n, settings in written.items() if settings is not None) or "none"
        raise BadInput(f"no provider {name!r} in the configuration (there: {known})")
    context = ParseContext("", os.environ if env is None else env)
    model = PROVIDERS[name]
    values = read_or_report(model.key_table, from_plain(written[name]), KeyPath(f"providers.{name}", name), context)
    context.raise_problems()
    return model(**values)
