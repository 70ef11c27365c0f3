"""Runs of tasks as the predictor remembers them, predictions with their tiers and limits, and the summary of old runs.

Tiers: with enough runs all models predict; with a few, those of few parameters; below that, defaults. A tier that
covered too few of the runs that it had not seen gives way to the next one.

Runs that are too old to be kept one by one are histograms over logarithmic buckets. Summaries add up: folding in pieces
gives the same as folding at once. A typical value is the upper edge of its bucket, so it is never below the truth and
above it by a tenth at most.

Shape of a command. Two commands of one shape are the same program or script with the same options. File names and other
values do not count; numbers are features of the run; secrets are masked first. A shape is a short text that a person
recognises:

    python3 train.py --epochs 10 --data /data/a.csv      python train.py --data … --epochs #
"""

from __future__ import annotations

import enum
import hashlib
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.masking.command_line import mask_secrets

MAX_FEATURES: Final = 4
"""The numbers of a command that count: the first ones, those of options in the order of their names."""
MAX_KEY_CHARS: Final = 200
MAX_WORDS: Final = 200  # words of a command that are looked at
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_VERSION = re.compile(r"[-.]?[0-9][0-9.]*$")
_SUBCOMMAND = re.compile(r"[a-z][a-z-]{1,19}")
_OPTION = re.compile(r"--?[A-Za-z@][A-Za-z0-9_.-]*")
_WRAPPER_WORD = re.compile(r"-|[0-9]|[A-Za-z_][A-Za-z0-9_]*=")
"""Options, numbers and variables of a program that only runs another one."""
_SHORT_WITH_NUMBER = re.compile(r"(-[A-Za-z])([0-9]+)")
_UNITS: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SCRIPT_RUNNERS: Final = frozenset(
    {"bash", "dash", "julia", "node", "perl", "php", "python", "pypy", "r", "rscript", "ruby", "sh", "zsh"}
)
_WRAPPERS: Final = frozenset({"env", "nice", "nohup", "stdbuf", "time", "timeout"})


class TaskShape(Struct, frozen=True):
    """The key under which runs are remembered, and the numbers of this one, at the same places in every run."""

    key: str
    features: tuple[float, ...] = ()


def task_shape(argv: Sequence[str]) -> TaskShape:
    words = list(mask_secrets(argv[:MAX_WORDS])[0])
    return _ShapeReader(words).read() if words else TaskShape("")


BATCH_SIZE: Final = "batch_size"
_KINDS: Final = (
    "model",
    "model_name",
    "model_type",
    "model_family",
    "precision",
    "dtype",
    "device",
    "hardware",
    "backend",
)
"""Parameters whose words make a type of its own; of other words only the names count."""


def typed_task_shape(task_type: str, parameters: Mapping[str, float | str]) -> TaskShape:
    """The shape of a task that is a type with parameters instead of a command; the batch size is the first number."""
    numbers = {name: float(value) for name, value in parameters.items() if not isinstance(value, str)}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value) and value >= 0}
    order = sorted(numbers, key=lambda name: (name != BATCH_SIZE, name))[:MAX_FEATURES]
    kinds = [f"{name}={parameters[name]}" for name in _KINDS if isinstance(parameters.get(name), str)]
    key = " ".join([f"type:{task_type}", *kinds, *(f"{name}=#" for name in order)])
    return TaskShape(_shortened(key), tuple(numbers[name] for name in order))


PULL_ORIGIN: Final = "pull:"


def pulled_shape(shape: TaskShape) -> TaskShape:
    """The shape of a task as its pull worker reports it, with a history apart from that of jobs, which the grid
    measures itself. A task that is a type is run by pull workers only."""
    if not shape.key or shape.key.startswith("type:"):
        return shape
    return TaskShape(_shortened(f"{PULL_ORIGIN} {shape.key}"), shape.features)


class _ShapeReader:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0
        self._options: dict[str, str] = {}
        self._values: list[str] = []
        self._code_numbers: list[float] = []
        self._numbers: dict[str, float] = {}

    def read(self) -> TaskShape:
        program = self._program()
        while self._at < len(self._words):
            self._read_word()
        named = sorted(self._options)
        parts = [*program, *(" ".join(filter(None, (name, self._options[name]))) for name in named), *self._values]
        order = [*named, *(f"{i}" for i in range(len(self._values)))]
        numbers = [*self._code_numbers, *(self._numbers[name] for name in order if name in self._numbers)]
        return TaskShape(_shortened(" ".join(parts)), tuple(numbers[:MAX_FEATURES]))

    def _program(self) -> list[str]:
        """The program, and the script or subcommand it runs."""
        words = self._words
        while self._at < len(words) - 1 and _name_of(words[self._at]) in _WRAPPERS:
            self._at += 1
            while self._at < len(words) - 1 and _WRAPPER_WORD.match(words[self._at]):
                self._at += 1
        program = _name_of(words[self._at])
        self._at += 1
        if program not in _SCRIPT_RUNNERS:
            if self._at < len(words) and _SUBCOMMAND.fullmatch(words[self._at]):
                self._at += 1
                return [program, words[self._at - 1]]
            return [program]
        return [program, *self._script()]

    def _script(self) -> list[str]:
        """The script of an interpreter, its module, or the digest of the code on its command line."""
        words = self._words
        while self._at < len(words) and words[self._at].startswith("-") and len(words[self._at]) > 1:
            flag = words[self._at]
            self._at += 1
            if flag in ("-m", "-jar") and self._at < len(words):
                self._at += 1
                return [flag, posixpath.basename(words[self._at - 1])]
            if not flag.startswith("--") and flag.endswith(("c", "e")) and self._at < len(words):
                self._at += 1
                code = words[self._at - 1]  # by its digest without numbers, which are features
                self._code_numbers = [float(number) for number in _NUMBER.findall(code)[:MAX_FEATURES]]
                digest = hashlib.sha256(_NUMBER.sub("#", code).encode("utf-8", "replace")).hexdigest()[:8]
                return [flag, f"code:{digest}"]
        if self._at < len(words):
            self._at += 1
            return [posixpath.basename(words[self._at - 1]) or "…"]
        return []

    def _read_word(self) -> None:
        word = self._words[self._at]
        self._at += 1
        name, equals, value = word.partition("=")
        if not _OPTION.fullmatch(name):
            shown = self._value(f"{len(self._values)}", word)
            if not (self._values and shown == "…" and self._values[-1] == "…"):  # the files of a pattern are one value
                self._values.append(shown)
            return
        if not equals and (short := _SHORT_WITH_NUMBER.fullmatch(word)):
            name, value = short.groups()
        elif not equals and self._at < len(self._words) and not _OPTION.match(self._words[self._at]):
            value = self._words[self._at]
            self._at += 1
        self._options[name] = self._value(name, value) if value else ""

    def _value(self, name: str, word: str) -> str:
        number = number_of(word)
        if number is None:
            self._numbers.pop(name, None)
            return "…"
        self._numbers[name] = number
        return "#"


def number_of(word: str) -> float | None:
    """The number that a word is, with or without a unit of bytes (`64`, `0.5`, `16G`); None where it is none."""
    unit = _UNITS.get(word[-1:].lower(), 1)
    digits = word[:-1] if unit > 1 else word
    number = float(digits) * unit if _NUMBER.fullmatch(digits) else math.inf
    return number if math.isfinite(number) else None


def _name_of(word: str) -> str:
    """Name of a program without its folder and version."""
    name = posixpath.basename(word)
    return (_VERSION.sub("", name) or name).lower() or "…"


def _shortened(key: str) -> str:
    """A key of bounded length: a long one ends in a digest of the whole."""
    key = "".join(c if c.isprintable() else "?" for c in key)
    if len(key) <= MAX_KEY_CHARS:
        return key
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{key[: MAX_KEY_CHARS - 9]}~{digest}"


DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD: Final = 0.7
DEFAULT_PREDICTION_UPDATE_INTERVAL: Final = 3600  # seconds between two full trainings
DEFAULT_MIN_SAMPLES_FOR_ML: Final = 30
DEFAULT_MIN_SAMPLES_FOR_STATS: Final = 5
LEAST_SAMPLES_FOR_ML: Final = 5
LEAST_SAMPLES_FOR_STATS: Final = 3  # fewer say nothing about how far runs stray
DISCOUNT: Final = 0.98  # what an earlier run weighs beside the next one: about the last fifty count


class Tier(enum.StrEnum):
    """How a prediction was made: by all models, by those of few parameters, or not at all."""

    ML = "ml"
    STATISTICS = "statistics"
    DEFAULTS = "defaults"


class TierSettings(Struct, frozen=True):
    """How many runs a tier needs, and how many of those it had not seen it must have covered."""

    confidence_threshold: float = DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD
    min_samples_for_ml: int = DEFAULT_MIN_SAMPLES_FOR_ML
    min_samples_for_stats: int = DEFAULT_MIN_SAMPLES_FOR_STATS


class Coverage:
    """Measured coverage, later runs weighing more.

    The confidence is the mean of the possible true shares (Laplace's rule), so that two covered runs are not certainty,
    and it approaches the true share.
    """

    __slots__ = ("_covered", "_total")

    def __init__(self) -> None:
        self._covered = 0.0
        self._total = 0.0

    def add(self, covered: bool) -> None:
        self._covered = DISCOUNT * self._covered + covered
        self._total = DISCOUNT * self._total + 1

    @property
    def total(self) -> float:
        return self._total

    @property
    def confidence(self) -> float:
        """Between 0 and 1; one half without measurements."""
        return (self._covered + 1) / (self._total + 2)


MAX_QUANTITY = 2**60
Quantity = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]
BUCKETS_PER_DOUBLING: Final = 8
TYPICAL_VALUES: Final = 32
Histogram = dict[int, int]  # runs in each bucket


class TaskRun(Struct, frozen=True, kw_only=True):
    """One ended run; a task and an attempt are recorded once, however often they are reported.

    `key` and `features` come from `task_shape`. A quantity of 0 was not measured. A run that was cut short (over its
    limit, cancelled, preempted) is a lower bound. `measured_bytes` is the peak of memory measured by a shim of the
    grid; 0 if the usage was reported by another source.
    """

    task_id: str
    attempt: int
    user: str
    key: str
    features: tuple[float, ...] = ()
    input_bytes: Quantity = 0
    memory_bytes: Quantity = 0
    cpu_ms: Quantity = 0
    run_ms: Quantity = 0
    gpu_memory_bytes: Quantity = 0
    ended_at_ms: int = 0
    is_lower_bound: bool = False
    measured_bytes: Quantity = 0


class MemoryPrediction(Struct, frozen=True, kw_only=True):
    """Memory limits and run time of the next run.

    `next_memory_bytes` are the limits of its reruns, each above the one before. `run_ms` is the median; None if
    unknown. `confidence` is the share of earlier runs that this tier covered in advance.
    """

    memory_bytes: int
    next_memory_bytes: tuple[int, ...]
    run_ms: int | None
    tier: Tier
    confidence: float
    samples: int


class RunSummary(Struct, frozen=True, array_like=True):
    """Summary of old runs of one type: their number, and the spread of memory and run times."""

    count: int = 0
    memory: Histogram = {}
    run_time: Histogram = {}

    def plus(self, runs: Iterable[TaskRun]) -> RunSummary:
        """With these runs added; those that were cut short are not counted."""
        count, memory, run_time = self.count, dict(self.memory), dict(self.run_time)
        for run in runs:
            if run.is_lower_bound:
                continue
            count += run.memory_bytes > 0
            for histogram, value in ((memory, run.memory_bytes), (run_time, run.run_ms)):
                if value > 0:
                    bucket = math.ceil(math.log2(value) * BUCKETS_PER_DOUBLING - 1e-9)
                    histogram[bucket] = histogram.get(bucket, 0) + 1
        return RunSummary(count, memory, run_time)

    def typical_memory_bytes(self) -> list[int]:
        """Values spread like the memory of the runs, the smallest first."""
        return _typical(self.memory)

    def typical_run_ms(self) -> list[int]:
        """Values spread like the run times, the smallest first."""
        return _typical(self.run_time)


def _typical(histogram: Histogram) -> list[int]:
    """One value for each run, or for as many equal shares of them as are kept; the largest is always among them."""
    total = sum(histogram.values())
    count = min(total, TYPICAL_VALUES)
    values, seen, taken = [], 0, 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        upper = math.ceil(2 ** (bucket / BUCKETS_PER_DOUBLING))
        while taken < count and (taken + 1) * total <= seen * count:
            values.append(upper)
            taken += 1
    return values


MIN_LIMIT_BYTES: Final = 64 * 1024**2
"""The smallest limit: below that, a limit costs more reruns than it saves memory."""
LEAST_GROWTHS: Final = (1.25, 2.0, 4.0)  # of the limit before, for each rerun
STEP_BITS: Final = 7  # there are 2 ** 7 limits between a power of two and the next


def limits_of(predicted: MemoryPrediction) -> tuple[int, ...]:
    """Limits of the first run and its reruns: the predicted ones, each at least a fixed factor above the one before, so
    that a job that needs ten times as much is not ended by a guess. Limits are rounded up, so that waiting jobs are
    equal to each other."""
    limits = [rounded_limit(predicted.memory_bytes)]
    for at, growth in enumerate(LEAST_GROWTHS):
        sizes = predicted.next_memory_bytes[at : at + 1]
        bigger = rounded_limit(max((*sizes, int(limits[-1] * growth))))
        if bigger > limits[-1]:
            limits.append(bigger)
    return tuple(limits)


def rounded_limit(size: int) -> int:
    """The next limit of at least this size."""
    size = min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT)
    step = 1 << max(size.bit_length() - 1 - STEP_BITS, 0)
    return min(-(-size // step) * step, MAX_AMOUNT)
