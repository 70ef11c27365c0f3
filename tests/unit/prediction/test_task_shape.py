"""Shape of a command: what runs of one kind have in common, and the numbers in which they differ."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.task_shape import (
    MAX_FEATURES,
    MAX_KEY_CHARS,
    TaskShape,
    number_of,
    task_shape,
    typed_task_shape,
)


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


def test_what_differs_only_beyond_the_length_of_a_key_stays_apart() -> None:
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
