"""Key tables: the known keys of a section, with their spellings, fields and value kinds.

A `Section` is a frozen struct. Each field states a key once: its type, with the value kind in `Annotated`, its
default, and with `setting` its spellings where they are not the field's name. Reading, refusing unknown keys, showing
and the test of the documentation all use the table made of these fields. The annotations are read when the class is
made, so a module with sections has no `from __future__ import annotations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import msgspec
from msgspec import Struct, field
from msgspec.structs import fields, force_setattr, replace

from distributed_grid.config.value_kinds import (
    FLAG,
    NAME_PATTERN,
    NODE_NAME,
    TEXT,
    InvalidValue,
    KeyPath,
    OneOf,
    ParseContext,
    Seconds,
    Unexpanded,
    ValueKind,
)
from distributed_grid.config.yaml_document import YamlNode
from distributed_grid.validation_text import describe_patterns

Normal = dict[str, Any]


class Key(Struct, frozen=True):
    """One setting: its field in the normal form (dotted where nested), its kind, and its spellings."""

    field: str
    kind: ValueKind
    spellings: tuple[str, ...]  # the first one is shown
    overrides: bool = False  # its values win, key by key, over an earlier key of the same field
    live: bool = False  # a running control plane applies another value without a restart


class KeyTable(ValueKind, frozen=True):
    """A mapping with known keys; `shorthand` reads the one-word form, if there is one."""

    keys: tuple[Key, ...]
    required: tuple[str, ...] = ()
    shorthand: ValueKind | None = None
    names: dict[str, dict[str, bool]] = field(default_factory=lambda: {"": {}})
    """The names known under each prefix, made from `keys`; True for the name of a key, False for a part of one."""

    def __post_init__(self) -> None:
        for spelling in (spelling for key in self.keys for spelling in key.spellings):
            prefix = ""
            *parents, last = spelling.split(".")
            for name in parents:
                self.names.setdefault(prefix, {})[name] = False
                prefix = f"{prefix}{name}."
            self.names.setdefault(prefix, {})[last] = True

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Normal:
        if self.shorthand and isinstance(node.value, str):
            normal: Normal = self.shorthand.read(node, path, context)
            return normal
        if not isinstance(node.value, dict):
            raise self._not_a_mapping("")
        for name in self.required:
            if name not in node.value or node.value[name].value is None:
                context.report(path, node.line, f"the key '{name}' is missing", expected=name)
        given = dict(self._given("", node, path, context))
        values: Normal = {}
        for key in self.keys:
            first: tuple[str, Any] | None = None
            for spelling in key.spellings:
                if spelling not in given:
                    continue
                child, at = given[spelling]
                at = KeyPath(at.spelled, path.child("", key.field).normal)
                value = read_or_report(key.kind, child, at, context)
                if value is None:
                    continue
                if first is not None and first[1] != value:
                    context.report(at, child.line, f"sets another value than {first[0]}; keep one of the two")
                first = first or (at.spelled, value)
                context.record(at, child)
                _put(values, key.field, value, merge=key.overrides)
        return values

    def _given(
        self, prefix: str, node: YamlNode, path: KeyPath, context: ParseContext
    ) -> Iterator[tuple[str, tuple[YamlNode, KeyPath]]]:
        """Every value in the document by its dotted spelling; unknown keys are reported."""
        assert isinstance(node.value, dict)
        known = self.names[prefix]
        for name, child in node.value.items():
            dotted, inner = prefix + name, path.child(name, "")
            if name not in known:
                if 1 <= len(context.known_paths.get(name, ())) <= 2:
                    expected = " or ".join(f"'{known_path}'" for known_path in context.known_paths[name])
                    hint = f"it belongs at {expected}"
                elif near := get_close_matches(name[:80], known, n=1):
                    expected = f"'{near[0]}'"
                    hint = f"did you mean {expected}?"
                else:
                    expected = "one of " + ", ".join(sorted(known))
                    hint = f"expected {expected}"
                context.report(
                    path.child(name, ""), child.line, f"unknown key; {hint}", found=name[:80], expected=expected
                )
            elif child.value is None:
                continue
            elif known[name]:
                yield dotted, (child, inner)
            elif isinstance(child.value, dict):
                yield from self._given(f"{dotted}.", child, inner, context)
            else:
                context.report_invalid(inner, child, self._not_a_mapping(f"{dotted}."))

    def _not_a_mapping(self, prefix: str) -> InvalidValue:
        return InvalidValue("a mapping with keys such as " + ", ".join(list(self.names[prefix])[:4]))

    def show(self, value: Any) -> Normal:
        shown: Normal = {}
        for key in self.keys:
            inside = value
            for name in key.field.split("."):
                inside = None if inside is None else getattr(inside, name)
            if inside is not None and inside != () and inside != {} and not key.overrides:
                _put(shown, key.spellings[0], key.kind.show(inside), merge=False)
        return shown


class ListOf(ValueKind, frozen=True):
    kind: ValueKind
    what: str

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> list[Any]:
        if not isinstance(node.value, list):
            raise InvalidValue(f"a list of {self.what}")
        values = []
        for index, item in enumerate(node.value):
            at = path.child(f"[{index}]", str(index))
            context.record(at, item)
            values.append(read_or_report(self.kind, item, at, context))
        return values  # with None where a problem was reported, so that indices stay right

    def show(self, value: Any) -> list[Any]:
        return [self.kind.show(item) for item in value]


class MapOf(ValueKind, frozen=True):
    """A mapping whose keys are names the user chose."""

    name: ValueKind
    kind: ValueKind
    what: str

    def read(self, node: YamlNode, path: KeyPath, context: ParseContext) -> Normal:
        if not isinstance(node.value, dict):
            raise InvalidValue(f"a mapping of {self.what}")
        values: Normal = {}
        for spelled, item in node.value.items():
            at = path.child(spelled, spelled)
            name = read_or_report(self.name, YamlNode(spelled, item.line, spelled), at, context)
            context.record(at, item)
            value = read_or_report(self.kind, item, at, context)
            if name in values:
                context.report(at, item.line, f"the same name as another key here, '{name}'")
            if name is not None and value is not None:
                values[name] = value
        return values

    def show(self, value: Any) -> Normal:
        return {self.name.show(name): self.kind.show(item) for name, item in value.items()}


def read_or_report(kind: ValueKind, node: YamlNode, path: KeyPath, context: ParseContext) -> Any:
    """The value in the normal form, or None after its problem was reported."""
    try:
        return kind.read(node, path, context)
    except InvalidValue as invalid:
        context.report_invalid(path, node, invalid)
    except Unexpanded:
        pass
    return None


def known_paths(kind: ValueKind, at: str = "") -> dict[str, list[str]]:
    """The paths at which each key name is known, for the report of a key in the wrong place."""
    if isinstance(kind, ListOf):
        return known_paths(kind.kind, f"{at}[].")
    if isinstance(kind, MapOf):
        return known_paths(kind.kind, f"{at}.NAME.")
    paths: dict[str, list[str]] = {}
    for key in kind.keys if isinstance(kind, KeyTable) else ():
        for spelling in key.spellings:
            joint = "" if isinstance(key.kind, ListOf | MapOf) else "."
            below = {} if key.overrides else known_paths(key.kind, f"{at}{spelling}{joint}")
            names = spelling.split(".")
            for depth, name in enumerate(names):
                below.setdefault(name, []).append(at + ".".join(names[: depth + 1]))
            for name, its_paths in below.items():
                known = paths.setdefault(name, [])
                known += [path for path in its_paths if path not in known]
    return paths


def _put(into: Normal, dotted: str, value: Any, *, merge: bool) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        into = into.setdefault(name, {})
    if merge and isinstance(into.get(last), dict):
        _merge(into[last], value)
    else:
        into[last] = value


def _merge(under: Normal, over: Normal) -> None:
    """Lay one mapping over another, key by key, at every depth."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(name), dict):
            _merge(under[name], value)
        else:
            under[name] = value


class Setting(Struct, frozen=True):
    default: Any = ...
    spellings: tuple[str, ...] = ()
    prefix: str | None = None
    overridden_at: str = ""
    acts: bool = False
    live: bool = False
    is_key: bool = True

    def keys(self, name: str, kind: ValueKind) -> Iterator[Key]:
        if self.prefix is not None:
            assert isinstance(kind, KeyTable)
            for key in kind.keys:
                spellings = tuple(self.prefix + spelling for spelling in key.spellings)
                yield Key(f"{name}.{key.field}", key.kind, spellings, live=self.live)
            return
        spellings = self.spellings or (name,)
        if isinstance(kind, Interval) and not self.spellings:
            spellings = name, name.removesuffix("_seconds")
        yield Key(name, kind, spellings, live=self.live)
        if self.overridden_at:
            yield Key(name, kind, (self.overridden_at,), overrides=True)


def setting(
    default: Any,
    *spellings: str,
    prefix: str | None = None,
    overridden_at: str = "",
    acts: bool = False,
    live: bool = False,
) -> Any:
    """A field that one key sets: under its own name, or only under the spellings given.

    With a `prefix`, it holds a section whose keys are keys of the surrounding one, under this prefix. The values at
    `overridden_at` win over its own, key by key. A key that `acts` (runs something, opens a port, uses a key, weakens a
    protection) counts only in a file that somebody named. A `live` field, with everything in it, can change under a
    running control plane.
    """
    return Setting(default, spellings, prefix, overridden_at, acts=acts, live=live)


def derived(default: Any) -> Any:
    return Setting(default, is_key=False)


class Interval(Seconds, frozen=True):
    """Seconds whose key may be written with or without `_seconds` at its end."""


class SectionMeta(msgspec.StructMeta):
    """Metaclass of sections: makes a frozen struct with the defaults of its settings, and the table of their keys."""

    settings: dict[str, Setting]
    shorthand: ValueKind | None
    key_table: KeyTable

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> SectionMeta:
        plain = {field: value.default if isinstance(value, Setting) else value for field, value in namespace.items()}
        options |= {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        section = super().__new__(cls, name, bases, plain, **options)
        declared = {field: namespace.get(field, ...) for field in section.__struct_fields__}
        settings = {field: value if isinstance(value, Setting) else Setting(value) for field, value in declared.items()}
        section.settings = {field: value for field, value in settings.items() if value.is_key}
        kinds = {field: kind_of(section.__annotations__[field]) for field in section.settings}
        keys = tuple(key for field, value in section.settings.items() for key in value.keys(field, kinds[field]))
        required = tuple(field for field, value in section.settings.items() if value.default is ...)
        section.key_table = KeyTable(keys, required, section.shorthand)
        return section


class Section(msgspec.Struct, metaclass=SectionMeta):
    """A part of the normal form: immutable, without unknown fields, and with the table of the keys that set it."""

    settings: ClassVar[dict[str, Setting]]
    shorthand: ClassVar[ValueKind | None] = None
    key_table: ClassVar[KeyTable]

    def __post_init__(self) -> None:
        """Refuse a value that its field cannot hold; defaults are not checked, so they cost no resolved annotations."""
        for name, declared in self.settings.items():
            value, default = getattr(self, name), declared.default
            if value != default or type(value) is not type(default):
                try:
                    force_setattr(self, name, msgspec.convert(value, _field_types(type(self))[name]))
                except msgspec.ValidationError as wrong:
                    problem = describe_patterns(str(wrong), {NAME_PATTERN: NODE_NAME.expected})
                    raise msgspec.ValidationError(f"{type(self).__name__}.{name}: {problem}") from None

    def without_acts(self) -> tuple[Self, list[str]]:
        """This section with every key that acts at its default, and the keys for which that made a difference."""
        changes: dict[str, Any] = {}
        keys: list[str] = []
        for name, declared in self.settings.items():
            value = getattr(self, name)
            parts = value if isinstance(value, tuple) else (value,)
            if declared.acts:
                if value != declared.default:
                    changes[name] = declared.default
                    keys.append(name)
            elif any(isinstance(part, Section) for part in parts):
                inert = [part.without_acts() for part in parts]
                if any(inner_keys for _, inner_keys in inert):
                    changes[name] = tuple(part for part, _ in inert) if isinstance(value, tuple) else inert[0][0]
                    keys += dict.fromkeys(f"{name}.{key}" for _, inner_keys in inert for key in inner_keys)
        return (replace(self, **changes) if changes else self), keys


@cache
def _field_types(section: type[Section]) -> dict[str, Any]:
    return {field.name: field.type for field in fields(section)}


def kind_of(annotation: Any) -> ValueKind:
    """The value kind of a field: the one in its `Annotated`, or that of a plain type."""
    for part in getattr(annotation, "__metadata__", ()):
        if isinstance(part, ValueKind):
            return part
    if isinstance(annotation, SectionMeta):
        return annotation.key_table
    if get_origin(annotation) is Literal:
        return OneOf(get_args(annotation))
    if type(None) in get_args(annotation):
        return kind_of(get_args(annotation)[0])
    return {bool: FLAG, str: TEXT}[annotation]
