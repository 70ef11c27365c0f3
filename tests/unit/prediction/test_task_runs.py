"""Summaries of old runs: they add up, and typical values are spread as the runs were."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.jobs import MAX_RERUNS
from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.prediction.task_runs import (
    MAX_FEATURES,
    MAX_KEY_CHARS,
    MAX_QUANTITY,
    MIN_LIMIT_BYTES,
    TYPICAL_VALUES,
    Coverage,
    MemoryPrediction,
    RunSummary,
    TaskRun,
    TaskShape,
    Tier,
    limits_of,
    number_of,
    rounded_limit,
    task_shape,
    typed_task_shape,
)

quantities = st.integers(0, MAX_QUANTITY)


def a_run(memory_bytes: int, run_ms: int = 0, *, is_lower_bound: bool = False) -> TaskRun:
    return TaskRun(
        task_id="t",
        attempt=1,
        user="ana",
        key="x",
        memory_bytes=memory_bytes,
        run_ms=run_ms,
        is_lower_bound=is_lower_bound,
    )


@given(st.lists(st.builds(a_run, quantities, quantities), max_size=60), st.integers(0, 60))
def test_folding_in_pieces_gives_what_folding_at_once_gives(runs: list[TaskRun], split: int) -> None:
    at_once = RunSummary().plus(runs)
    assert RunSummary().plus(runs[:split]).plus(runs[split:]) == at_once
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(at_once), type=RunSummary) == at_once


@given(st.lists(st.integers(1, MAX_QUANTITY), min_size=1, max_size=TYPICAL_VALUES))
def test_a_typical_value_is_never_below_its_run_and_a_tenth_above_at_most(values: list[int]) -> None:
    typical = RunSummary().plus(map(a_run, values)).typical_memory_bytes()
    assert len(typical) == len(values)
    for value, shown in zip(sorted(values), typical, strict=True):
        assert value <= shown * (1 + 1e-9)
        assert shown <= value * 1.1 + 1


def test_many_runs_leave_so_many_values_with_the_largest() -> None:
    summary = RunSummary().plus(a_run(100 + i, 1000 * i) for i in range(5000))
    memory, times = summary.typical_memory_bytes(), summary.typical_run_ms()
    assert len(memory) == len(times) == TYPICAL_VALUES
    assert memory == sorted(memory)
    assert memory[-1] >= 5099
    assert times[TYPICAL_VALUES // 2] == pytest.approx(2_500_000, rel=0.15)
    assert summary.count == 5000


def test_runs_that_were_cut_short_are_not_counted() -> None:
    assert RunSummary().plus([a_run(5, 5, is_lower_bound=True)]) == RunSummary()
    assert RunSummary().plus([a_run(0, 5)]).count == 0


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_confidence_comes_to_the_true_share(share: float) -> None:
    dice = random.Random(3)
    seen = []
    coverage = Coverage()
    for _ in range(3000):
        coverage.add(dice.random() < share)
        seen.append(coverage.confidence)
    assert sum(seen[500:]) / len(seen[500:]) == pytest.approx(share, abs=0.03)


def test_nothing_measured_and_little_measured_is_no_certainty() -> None:
    coverage = Coverage()
    assert (coverage.total, coverage.confidence) == (0, 0.5)
    coverage.add(True)
    assert coverage.confidence < 0.7
    coverage.add(True)
    assert 0.7 < coverage.confidence < 0.8


def test_change_is_noticed_within_fifty_runs() -> None:
    coverage = Coverage()
    for _ in range(500):
        coverage.add(True)
    for _ in range(30):
        coverage.add(False)
    assert coverage.confidence < 0.7


@given(st.lists(st.booleans(), max_size=300))
def test_confidence_is_a_share_whatever_comes(results: list[bool]) -> None:
    coverage = Coverage()
    for covered in results:
        coverage.add(covered)
    assert 0 < coverage.confidence < 1
    assert 0 <= coverage.total <= 50.0001


MB = 1 << 20


def test_limits_grow_and_are_four_whatever_the_predictor_says() -> None:
    for following in ((), (200 * MB,), (50 * MB, 100 * MB, 100 * MB), tuple(range(MB, 9 * MB, MB))):
        limits = limits_of(
            MemoryPrediction(
                memory_bytes=100 * MB,
                next_memory_bytes=following,
                run_ms=None,
                tier=Tier.STATISTICS,
                confidence=0.8,
                samples=9,
            )
        )
        assert len(limits) == 1 + MAX_RERUNS
        assert list(limits) == sorted(set(limits))
        assert limits[-1] >= 10 * limits[0]
    assert limits_of(
        MemoryPrediction(
            memory_bytes=MAX_AMOUNT, next_memory_bytes=(), run_ms=None, tier=Tier.ML, confidence=0.8, samples=9
        )
    ) == (MAX_AMOUNT,)


@pytest.mark.parametrize("size", [1, MIN_LIMIT_BYTES, 100 * MB + 1, 1023 * MB, 1 << 40, MAX_AMOUNT, MAX_AMOUNT + 1])
def test_a_limit_is_rounded_up_by_less_than_a_hundredth(size: int) -> None:
    rounded = rounded_limit(size)
    most = size + size // 128
    assert min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT) <= rounded <= min(max(most, MIN_LIMIT_BYTES), MAX_AMOUNT)
    assert rounded_limit(rounded) == rounded


@pytest.mark.parametrize(
    ("command", "key", "features"),
    [
        ("true", "true", ()),
        ("sleep 400", "sleep #", (400.0,)),
        ("/usr/bin/sleep 4", "sleep #", (4.0,)),
        ("python3.11 /a/train.py --epochs 10 --data /d.csv", "python train.py --data … --epochs #", (10.0,)),
        ("python train.py --data=/other.csv --epochs=20", "python train.py --data … --epochs #", (20.0,)),
        ("python -m pytest -x tests", "python -m pytest -x …", ()),
        ("samtools sort -@ 4 a.bam b.bam", "samtools sort -@ # …", (4.0,)),
        ("make -j8 all", "make -j # …", (8.0,)),
        ("cat a b c d", "cat …", ()),
        ("cat a", "cat …", ()),
        ("env A=1 nice -n 5 timeout 60 /bin/ls -l", "ls -l", ()),
        ("sort -S 16G", "sort -S #", (16.0 * 2**30,)),
        ("convert -5 x", "convert …", ()),
        ("git clone url", "git clone …", ()),
    ],
)
def test_values_do_not_count_and_numbers_are_features(command: str, key: str, features: tuple[float, ...]) -> None:
    assert task_shape(command.split()) == TaskShape(key, features)


def test_code_on_the_command_line_is_told_apart_by_its_text_without_the_numbers() -> None:
    one, two = task_shape(["sh", "-c", "work --size 5"]), task_shape(["sh", "-c", "work --size 70"])
    assert one.key == two.key
    assert (one.features, two.features) == ((5.0,), (70.0,))
    assert task_shape(["sh", "-c", "other --size 5"]).key != one.key


def test_a_secret_is_no_part_of_a_shape_and_no_feature() -> None:
    assert "geheim" not in task_shape(["mysql", "-pgeheim", "work"]).key
    assert task_shape(["app", "--password", "4711", "--epochs", "3"]).features == (3.0,)


def test_the_order_of_options_does_not_matter() -> None:
    assert task_shape(["x", "--a", "1", "--b", "2"]) == task_shape(["x", "--b", "2", "--a", "1"])


def test_an_empty_command_has_an_empty_key() -> None:
    assert task_shape([]) == TaskShape("")


@given(st.lists(st.text(max_size=30), max_size=40))
def test_any_command_has_a_bounded_printable_shape(words: list[str]) -> None:
    shape = task_shape(words)
    assert len(shape.key) <= MAX_KEY_CHARS
    assert shape.key.isprintable()
    shape.key.encode()
    assert len(shape.features) <= MAX_FEATURES
    assert all(math.isfinite(feature) and feature >= 0 for feature in shape.features)


@given(
    st.lists(
        st.one_of(st.integers(0, 10**9).map(str), st.sampled_from(["--a", "--b=3", "-j4", "in.txt", "run"])), max_size=8
    ),
    st.integers(0, 10**9),
)
def test_other_numbers_make_the_same_shape_with_as_many_features(words: list[str], number: int) -> None:
    one = task_shape(["program", *words])
    other = task_shape(["program", *(str(number) if word.isdigit() else word for word in words)])
    assert one.key == other.key
    assert len(one.features) == len(other.features)


def test_keys_that_differ_beyond_their_length_stay_apart() -> None:
    one, two = (task_shape(["x", *(f"--{name}{i}" for i in range(100))]) for name in ("option", "other"))
    assert one.key != two.key
    assert task_shape(["x", *(f"--option{i}" for i in range(100))]) == one


@pytest.mark.parametrize(
    ("word", "number"),
    [("5", 5.0), ("1.5", 1.5), ("2k", 2048.0), ("1e3", 1000.0), ("x", None), ("1e999", None), ("", None)],
)
def test_a_number_may_have_a_unit(word: str, number: float | None) -> None:
    assert number_of(word) == number


def test_a_typed_task_has_its_batch_size_first_and_a_type_for_each_model() -> None:
    shape = typed_task_shape("train", {"alpha": 0.5, "batch_size": 8, "model": "bert", "comment": "hello"})
    assert shape == TaskShape("type:train model=bert batch_size=# alpha=#", (8.0, 0.5))
    assert typed_task_shape("train", {"model": "gpt"}).key != typed_task_shape("train", {"model": "bert"}).key
    assert typed_task_shape("train", {"a": math.nan, "b": -1.0}) == TaskShape("type:train")
