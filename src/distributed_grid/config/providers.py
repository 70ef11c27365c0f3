"""Cloud providers: stored as written; their variables are expanded only when a provider is used."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from distributed_grid.config import value_kinds as kinds
from distributed_grid.config.key_tables import Key, KeyTable, ListOf, MapOf, Section, read_or_report, setting
from distributed_grid.config.sections import Command, FilePath
from distributed_grid.config.value_kinds import InvalidValue, KeyPath, ParseContext, Secret, Text, ValueKind
from distributed_grid.config.yaml_document import YamlNode, from_plain, to_plain
from distributed_grid.errors import BadInput


class OneOrMore(ValueKind, frozen=True):
    """One value, or a list of them with the preferred first; each stays as it was written."""

    kind: ValueKind
    what: str
    may_be_empty: bool = False

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        if not isinstance(node.value, list):
            return self.kind.read(node, path, context)
        if not node.value and not self.may_be_empty:
            raise InvalidValue(f"one or more {self.what}")
        values = ListOf(self.kind, self.what).read(node, path, context)
        return tuple(value for value in values if value is not None)

    def show(self, value: Any) -> Any:
        return self.kind.show(value) if isinstance(value, str) else [self.kind.show(item) for item in value]


def _text(expected: str, pattern: str) -> Text:
    return Text(expected, re.compile(pattern, re.ASCII))


_EC2_TYPE = _text("an instance type such as c5.xlarge", r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_EC2_ZONE = _text("an availability zone such as us-west-2a", r"[a-z]{2}[a-z0-9-]+")
_EC2_ENDPOINT = Text(
    "an address that starts with https://, or with http:// on this machine",
    re.compile(r"(https://[^\s/@]+|http://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?)(/\S*)?"),
)
_MACHINE_TYPE = _text("a machine type, such as n2-standard-4", r"[a-z][a-z0-9-]{1,61}[a-z0-9]")
_PROJECT = _text("the id of a project", r"[a-z][a-z0-9.:-]{1,61}[a-z0-9]")
_ZONE = _text("a zone, such as us-central1-a", r"[a-z][a-z0-9-]{1,61}[a-z0-9]")
_WEB = Text("an address that starts with http:// or https://", re.compile(r"https?://[^\s/]+\S*"))
_IMAGE = _text("the name of an image, such as grid-worker:latest", r"[a-z0-9][\w.\-/:@]{0,254}")
_NETWORK = _text("host, bridge or the name of a network", r"[A-Za-z0-9][\w.-]{0,127}")
_ENGINE = Text("the Unix socket of a Docker engine, such as unix:///var/run/docker.sock", re.compile(r"unix:///\S+"))
_SLURM_NAME = _text("a name that Slurm knows", r"[A-Za-z0-9_][\w.-]{0,127}")
_PARTITIONS = _text("a partition, or several with commas between", r"[A-Za-z0-9_][\w.-]*(,[A-Za-z0-9_][\w.-]*)*")

Prices = Annotated[
    dict[str, float], MapOf(kinds.TEXT, kinds.PlainNumber("a price per hour"), "kinds of worker to prices per hour")
]
DiskGigabytes = Annotated[int, kinds.Count(1, 65536, "a whole number of GB")]
Credential = Annotated[Secret, kinds.SECRET]
Partitions = Annotated[str, _PARTITIONS]
SlurmName = Annotated[str, _SLURM_NAME]
SlurmSeconds = Annotated[float, kinds.SlurmTime()]


class AwsSettings(Section):
    """Where and as whom to rent EC2 instances; without credentials, the usual AWS sources are used."""

    region: Annotated[str, _text("a region such as us-west-2", r"[a-z0-9-]+")]
    zones: Annotated[tuple[str, ...], ListOf(_EC2_ZONE, "availability zones")] = ()
    instance_types: Annotated[
        dict[str, str | tuple[str, ...]],
        MapOf(
            kinds.TEXT,
            OneOrMore(_EC2_TYPE, "instance types"),
            "kinds of worker, such as cpu and gpu, to instance types",
        ),
    ] = {}
    access_key_id: Credential | None = setting(None, "credentials.access_key_id")
    secret_access_key: Credential | None = setting(None, "credentials.secret_access_key")
    session_token: Credential | None = setting(None, "credentials.session_token")
    spot_instance_enabled: bool = False
    spot_max_price: Prices = {}
    image_id: str | None = None
    disk_gb: DiskGigabytes | None = None
    subnet_id: str | None = None
    subnet_ids: Annotated[tuple[str, ...], ListOf(kinds.TEXT, "subnets")] = ()
    associate_public_ip: bool | None = None
    security_group_ids: Annotated[tuple[str, ...], ListOf(kinds.TEXT, "security groups")] = ()
    instance_profile: str | None = None
    key_name: str | None = None
    endpoint_url: Annotated[str, _EC2_ENDPOINT] | None = None
    price_per_hour: Prices = {}

    def types_of(self, kind: str) -> tuple[str, ...]:
        types = self.instance_types[kind]
        return (types,) if isinstance(types, str) else types


class GcpSettings(Section):
    """Where and as whom to rent Compute Engine instances; without a file, Google's usual sources are used."""

    project: Annotated[str, _PROJECT]
    zone: Annotated[str, _ZONE] | None = None
    zones: Annotated[tuple[str, ...], ListOf(_ZONE, "zones")] = ()
    machine_types: Annotated[
        dict[str, str | tuple[str, ...]],
        MapOf(
            kinds.TEXT, OneOrMore(_MACHINE_TYPE, "machine types", may_be_empty=True), "kinds of worker to machine types"
        ),
    ] = {}
    accelerators: Annotated[
        dict[str, str], MapOf(kinds.TEXT, kinds.TEXT, "kinds of worker to accelerators, TYPE or TYPE:COUNT")
    ] = {}
    credentials_file: FilePath | None = None
    anonymous: bool = False
    preemptible_enabled: bool = False
    max_run_seconds: Annotated[float, kinds.Seconds(300, 3600, "hours")] = setting(24 * 3600.0, "max_run_hours")
    image: str | None = None
    disk_gb: DiskGigabytes | None = None
    disk_type: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    external_ip: bool = True
    tags: Annotated[tuple[str, ...], ListOf(kinds.TEXT, "network tags")] = ()
    service_account: str | None = None
    endpoint_url: Annotated[str, _WEB] | None = None
    price_per_hour: Prices = {}

    @property
    def zone_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*([self.zone] if self.zone else []), *self.zones]))


class DockerLocalSettings(Section):
    """How worker containers are started on this machine, by the engine that listens on `endpoint_url`."""

    image: Annotated[str, _IMAGE] = "grid-worker:latest"
    cpu_limit_milli: Annotated[int, kinds.SOME_CORES] | None = setting(None, "cpu_limit")
    memory_limit_bytes: Annotated[int, kinds.MemorySize()] | None = setting(None, "memory_limit")
    network: Annotated[str, _NETWORK] = "host"
    endpoint_url: Annotated[str, _ENGINE] = "unix:///var/run/docker.sock"
    price_per_hour: Prices = {}


class SlurmWorkerType(Section):
    """Allocation for a type of worker; an unset field takes that of a whole node, or the provider's."""

    cpus: Annotated[int, kinds.Count(1, 100_000, "a whole number of cores")] | None = None
    memory_bytes: Annotated[int, kinds.SOME_GIGABYTES] | None = setting(None, "memory_gb")
    gpus: Annotated[int, kinds.DEVICES] = 0
    partition: Partitions | None = None
    constraint: str | None = None


class SlurmSettings(Section):
    """How and where workers are submitted to Slurm as jobs; the commands of Slurm know the cluster."""

    partition: Partitions | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    constraint: str | None = None
    time_limit_seconds: SlurmSeconds = setting(3600.0, "time_limit")
    notice_seconds: Annotated[float, kinds.Seconds(1)] = 120.0
    queue_limit_seconds: SlurmSeconds = setting(86400.0, "queue_limit")
    worker_types: Annotated[
        dict[str, SlurmWorkerType],
        MapOf(kinds.TEXT, SlurmWorkerType.key_table, "kinds of worker, such as cpu and gpu, to what they ask for"),
    ] = {}
    config_file: FilePath | None = None
    command: Command | None = None
    directory: FilePath = "~/.distributed_grid/slurm"
    scratch: FilePath | None = None
    budget_core_hours: Annotated[float, kinds.PlainNumber("a number of core-hours")] | None = None
    price_per_hour: Prices = {}


Provider = AwsSettings | GcpSettings | DockerLocalSettings | SlurmSettings
P = TypeVar("P", AwsSettings, GcpSettings, DockerLocalSettings, SlurmSettings)

PROVIDERS: dict[str, type[Provider]] = {
    "aws": AwsSettings,
    "gcp": GcpSettings,
    "docker_local": DockerLocalSettings,
    "slurm": SlurmSettings,
}
PLUG_IN_GROUP = "distributed_grid.providers"  # the group of entry points by which other packages plug providers in


def plugged_in_names() -> frozenset[str]:
    """The providers of other packages that are installed here."""
    from importlib.metadata import entry_points

    return frozenset(point.name for point in entry_points(group=PLUG_IN_GROUP)) - PROVIDERS.keys()


class _UnexpandedSettings(ValueKind, frozen=True):
    """One provider's settings, checked as far as their variables allow and stored as written."""

    table: KeyTable

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
        draft = ParseContext(context.file, env=None)
        read_or_report(self.table, node, path, draft)
        context.problems += draft.problems
        return to_plain(node)


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
        providers = _BY_NAME.read(YamlNode(others, node.line) if plugged_in else node, path, context)
        for name in sorted(plugged_in):
            settings = to_plain(written[name])
            if settings is not None and not isinstance(settings, dict):
                raise InvalidValue(f"a mapping with the settings of {name}")
            providers[name] = settings or {}
        return providers

    def show(self, value: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: _masked(settings) for name, settings in value.items()}


_SECRET_NAME = re.compile(r"secret|password|passwd|token|credential|access_key|api_key|private_key", re.IGNORECASE)
_FILE_NAME = re.compile(r"(file|path|dir)$", re.IGNORECASE)


def _is_secret(name: str) -> bool:
    """True for a key that holds a credential, False for the path of one."""
    return _SECRET_NAME.search(name) is not None and _FILE_NAME.search(name) is None


def _masked(settings: Any, is_secret: bool = False) -> Any:
    """Settings with their credentials masked; the mere name of a variable is shown."""
    if isinstance(settings, Mapping):
        return {name: _masked(value, is_secret or _is_secret(str(name))) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_masked(value, is_secret) for value in settings]
    if not is_secret or settings is None or isinstance(settings, bool):
        return settings
    text = str(settings)
    return settings if text.startswith("${") and text.find("}") == len(text) - 1 else kinds.MASK


def written_secrets(settings: Any, is_secret: bool = False) -> Iterator[str]:
    """The credentials in the settings of a provider, as written."""
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
            return {key: expanded(item, f"{at}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [expanded(item, at) for item in value]
        if not isinstance(value, str):
            return value
        try:
            return context.expand(value)
        except InvalidValue as invalid:
            raise BadInput(f"{at}: found {invalid.found}, expected {invalid.expected}") from None

    settings: dict[str, Any] = expanded(written.get(name) or {}, f"providers.{name}")
    return settings


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


def provider_settings(name: str, model: type[P], settings: P | Mapping[str, Any]) -> P:
    opened = open_provider(name, {name: settings}) if isinstance(settings, Mapping) else settings
    assert isinstance(opened, model)
    return opened
