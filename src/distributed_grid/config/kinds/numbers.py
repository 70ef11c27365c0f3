"""Kinds of numbers: what a user writes, and the unit it has inside."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from distributed_grid.config.kinds.scalars import plain_scalar
from distributed_grid.config.parse_context import InvalidValue, KeyPath, ParseContext
from distributed_grid.config.yaml_document import YamlNode
from distributed_grid.domain.resources import MAX_AMOUNT

GIB = 1024**3
MIB = 1024**2
LONGEST_SECONDS = 10 * 366 * 24 * 3600


def _number(spot: YamlNode, desk: ParseContext, expected: str) -> float:
    value = spot.value
    if isinstance(value, str) and "${" in value:
        value = plain_scalar(desk.expand(value).strip())
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue(expected, found=f"{spot.raw} set to something else")
    if isinstance(value, str) and not isinstance(plain_scalar(value.strip()), str | None):
        raise InvalidValue(expected, hint="without quotes")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(expected)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValue(expected)
    return value


def _shortest(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number within bounds."""

    low: int = 0
    high: int = 10**9
    what: str = "a whole number"

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> int:
        expected = f"{self.what} {self.low}-{self.high}" if self.high < 10**9 else f"{self.what}, {self.low} or more"
        value = _number(spot, desk, expected)
        if not self.low <= value <= self.high or value != int(value):
            raise InvalidValue(expected)
        return int(value)

    def show(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class Amount:
    """A decimal amount, kept as a whole number of a smaller unit."""

    scale: int
    what: str
    above_zero: bool = False

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> int:
        expected = f"{self.what}, {'more than 0' if self.above_zero else '0 or more'}"
        value = _number(spot, desk, expected)
        if value < 0 or value > MAX_AMOUNT / self.scale:
            raise InvalidValue(expected)
        inside = round(value * self.scale)
        if inside == 0 and (value > 0 or self.above_zero):
            raise InvalidValue(expected)
        return inside

    def show(self, value: int) -> float | int:
        for digits in range(18):
            outside = round(value / self.scale, digits)
            if round(outside * self.scale) == value:
                return _shortest(outside)
        return value / self.scale


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share from 0 to 1."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> float:
        expected = "a ratio from 0 to 1"
        value = _number(spot, desk, expected)
        if 1 < value <= 100:
            raise InvalidValue(expected, hint=f"it looks like a percent: write {_shortest(round(value / 100, 12))}")
        if not 0 <= value <= 1:
            raise InvalidValue(expected)
        return float(value)

    def show(self, value: float) -> float:
        return value


@dataclass(frozen=True, slots=True)
class Percent:
    """A percentage, kept as a ratio."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> float:
        expected = "a percentage from 0 to 100"
        value = _number(spot, desk, expected)
        if not 0 <= value <= 100:
            raise InvalidValue(expected)
        if 0 < value <= 1:
            shown, guess = _shortest(value), _shortest(round(value * 100, 9))
            desk.warn(place.spelled, f"{shown} means {shown} %; if {guess} % is meant, write {guess}")
        return value / 100

    def show(self, value: float) -> float:
        return round(value * 100, 12)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration, kept in seconds; `unit` is how many seconds the user's unit has."""

    low: float = 0.0
    unit: int = 1
    unit_name: str = "seconds"

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> float:
        bound = f"at least {_shortest(self.low / self.unit)}" if self.low else "0 or more"
        expected = f"a number of {self.unit_name}, {bound}"
        value = _number(spot, desk, expected)
        if value > LONGEST_SECONDS / self.unit:
            raise InvalidValue(expected + " and at most ten years")
        if value * self.unit < self.low or value < 0:
            raise InvalidValue(expected)
        return float(value * self.unit)

    def show(self, value: float) -> float | int:
        return _shortest(value / self.unit)


@dataclass(frozen=True, slots=True)
class Plain:
    """A number without a unit, such as a weight or a price."""

    what: str = "a number"
    above_zero: bool = False
    high: float = 1e12

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> float:
        expected = f"{self.what}, {'more than 0' if self.above_zero else '0 or more'}"
        value = _number(spot, desk, expected)
        if value < 0 or value > self.high or (self.above_zero and value == 0):
            raise InvalidValue(expected)
        return float(value)

    def show(self, value: float) -> float | int:
        return _shortest(value)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt])(?:i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Size:
    """Memory written with its unit, such as 16g, kept in bytes."""

    def read(self, spot: YamlNode, place: KeyPath, desk: ParseContext) -> int:
        expected = "an amount of memory with its unit, such as 16g or 512m"
        if not isinstance(spot.value, str):
            raise InvalidValue(expected)
        match = _SIZE.fullmatch(desk.expand(spot.value).strip())
        if match is None or len(match[1]) > 20:
            raise InvalidValue(expected)
        size: int = round(float(match[1]) * 1024 ** ("kmgt".index(match[2].lower()) + 1))
        if not 0 < size <= MAX_AMOUNT:
            raise InvalidValue(expected)
        return size

    def show(self, value: int) -> str:
        for power, letter in ((3, "g"), (2, "m")):
            if value % 1024**power == 0:
                return f"{value // 1024**power}{letter}"
        return f"{Amount(1024, '').show(value)}k"
