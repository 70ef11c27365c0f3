"""Kinds made of other kinds: a table of known keys, a list, a mapping with free names.

A `KeyTable` is the whole truth about a section: each `Key` names every spelling a user may write (dotted where
it is nested), the one field it means in the normal form, and the kind of its value. Reading, refusing unknown
keys, showing and the documentation's test all walk the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from distributed_grid.config.parse_context import InvalidValue, KeyPath, ParseContext, Unexpanded, ValueKind
from distributed_grid.config.yaml_document import YamlNode

Normal = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """One thing that can be set: its normal field, its kind, its spellings (the first is the one shown)."""

    field: str
    kind: ValueKind
    spellings: tuple[str, ...]
    overrides: bool = False
    """True: what is said here wins, key by key, over an earlier key of the same field."""


def key(
    spelling: str, kind: ValueKind, *, to: str | None = None, also: tuple[str, ...] = (), overrides: bool = False
) -> Key:
    """A key whose field has the same name unless `to` says otherwise."""
    return Key(to or spelling, kind, (spelling, *also), overrides)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A mapping with known keys; `shorthand` reads the one-word form, if there is one."""

    keys: tuple[Key, ...]
    required: tuple[str, ...] = ()
    shorthand: ValueKind | None = None
    names: dict[str, dict[str, bool]] = field(init=False, repr=False, compare=False)
    """The names known under each prefix; True where the name is a key itself."""

    def __post_init__(self) -> None:
        names: dict[str, dict[str, bool]] = {"": {}}
        for spelling in (spelling for entry in self.keys for spelling in entry.spellings):
            prefix = ""
            *way, last = spelling.split(".")
            for name in way:
                names.setdefault(prefix, {})[name] = False
                prefix = f"{prefix}{name}."
            names.setdefault(prefix, {})[last] = True
        object.__setattr__(self, "names", names)

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Normal:
        if self.shorthand and isinstance(spot.value, str):
            normal: Normal = self.shorthand.read(spot, place, desk)
            return normal
        if not isinstance(spot.value, dict):
            raise InvalidValue("a mapping with keys such as " + ", ".join(list(self.names[""])[:4]))
        for name in self.required:
            if name not in spot.value or spot.value[name].value is None:
                desk.say(place, spot.line, f"the key '{name}' is missing", expected=name)
        said = dict(self._said("", spot, place, desk))
        values: Normal = {}
        for entry in self.keys:
            self._read_key(entry, said, values, place, desk)
        return values

    def _said(
        self, prefix: str, spot: YamlNode, place: KeyPath, desk: ParseContext
    ) -> Iterator[tuple[str, tuple[YamlNode, KeyPath]]]:
        """Everything that was set here, by its dotted spelling; unknown keys are refused on the way."""
        assert isinstance(spot.value, dict)
        known = self.names[prefix]
        for name, child in spot.value.items():
            dotted, inner = prefix + name, place.down(name, "")
            if name not in known:
                _refuse_unknown(name, child, known, place, desk)
            elif child.value is None:
                continue
            elif known[name]:
                yield dotted, (child, inner)
            elif isinstance(child.value, dict):
                yield from self._said(f"{dotted}.", child, inner, desk)
            else:
                keys = ", ".join(list(self.names[f"{dotted}."])[:4])
                desk.refuse(inner, child, InvalidValue(f"a mapping with keys such as {keys}"))

    def _read_key(
        self, entry: Key, said: dict[str, tuple[YamlNode, KeyPath]], normal: Normal, place: KeyPath, desk: ParseContext
    ) -> None:
        first: tuple[str, Any] | None = None
        for spelling in entry.spellings:
            if spelling not in said:
                continue
            spot, at = said[spelling]
            at = KeyPath(at.spelled, place.down("", entry.field).normal)
            value = read_or_refuse(entry.kind, spot, at, desk)
            if value is None:
                continue
            if first is not None and first[1] != value:
                desk.say(at, spot.line, f"says the same as {first[0]}, but differently; keep one of the two")
            first = first or (at.spelled, value)
            desk.note(at, spot)
            _put(normal, entry.field, value, merge=entry.overrides)

    def show(self, value: Any) -> Normal:
        shown: Normal = {}
        for entry in self.keys:
            inside = value
            for name in entry.field.split("."):
                inside = None if inside is None else getattr(inside, name)
            if inside is not None and inside != () and inside != {} and not entry.overrides:
                _put(shown, entry.spellings[0], entry.kind.show(inside), merge=False)
        return shown


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose items are all of one kind."""

    kind: ValueKind
    what: str

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> list[Any]:
        if not isinstance(spot.value, list):
            raise InvalidValue(f"a list of {self.what}")
        values = []
        for index, item in enumerate(spot.value):
            at = place.down(f"[{index}]", str(index))
            desk.note(at, item)
            values.append(read_or_refuse(self.kind, item, at, desk))
        return values  # with None where a problem was noted, so that positions stay true

    def show(self, value: Any) -> list[Any]:
        return [self.kind.show(item) for item in value]


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping whose keys are names the user chose."""

    name: ValueKind
    kind: ValueKind
    what: str

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Normal:
        if not isinstance(spot.value, dict):
            raise InvalidValue(f"a mapping of {self.what}")
        values: Normal = {}
        for name, item in spot.value.items():
            at = place.down(name, name)
            chosen = read_or_refuse(self.name, YamlNode(name, item.line, name), at, desk)
            desk.note(at, item)
            value = read_or_refuse(self.kind, item, at, desk)
            if chosen in values:
                desk.say(at, item.line, f"the same name as another key here, '{chosen}'")
            if chosen is not None and value is not None:
                values[chosen] = value
        return values

    def show(self, value: Any) -> Normal:
        return {self.name.show(name): self.kind.show(item) for name, item in value.items()}


def homes(kind: ValueKind, at: str = "") -> dict[str, list[str]]:
    """Every place where a name is known, for the one who wrote it in another."""
    if isinstance(kind, ListOf):
        return homes(kind.kind, f"{at}[].")
    if isinstance(kind, MapOf):
        return homes(kind.kind, f"{at}.NAME.")
    places: dict[str, list[str]] = {}
    for entry in kind.keys if isinstance(kind, KeyTable) else ():
        for spelling in entry.spellings:
            within = "" if isinstance(entry.kind, ListOf | MapOf) else "."
            found = {} if entry.overrides else homes(entry.kind, f"{at}{spelling}{within}")
            way = spelling.split(".")
            for depth, name in enumerate(way):
                found.setdefault(name, []).append(at + ".".join(way[: depth + 1]))
            for name, where in found.items():
                known = places.setdefault(name, [])
                known += [place for place in where if place not in known]
    return places


def read_or_refuse(kind: ValueKind, spot: YamlNode, place: KeyPath, desk: ParseContext) -> Any:
    """The value in the normal form, or None after the problem was noted."""
    try:
        return kind.read(spot, place, desk)
    except InvalidValue as slip:
        desk.refuse(place, spot, slip)
    except Unexpanded:
        pass
    return None


def _refuse_unknown(name: str, spot: YamlNode, known: dict[str, bool], place: KeyPath, desk: ParseContext) -> None:
    if 1 <= len(desk.homes.get(name, ())) <= 2:
        expected = " or ".join(f"'{place}'" for place in desk.homes[name])
        hint = f"it belongs at {expected}"
    elif near := get_close_matches(name[:80], known, n=1):
        expected = f"'{near[0]}'"
        hint = f"did you mean {expected}?"
    else:
        expected = "one of " + ", ".join(sorted(known))
        hint = f"expected {expected}"
    desk.say(place.down(name, ""), spot.line, f"unknown key; {hint}", found=name[:80], expected=expected)


def _put(into: Normal, dotted: str, value: Any, *, merge: bool) -> None:
    *way, last = dotted.split(".")
    for name in way:
        into = into.setdefault(name, {})
    if merge and isinstance(into.get(last), dict):
        merge_over(into[last], value)
    else:
        into[last] = value


def merge_over(under: Normal, over: Normal) -> None:
    """Lay one mapping over another, key by key, at every depth."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(name), dict):
            merge_over(under[name], value)
        else:
            under[name] = value
