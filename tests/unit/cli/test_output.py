"""Sizes and times as people write and read them, tables, and the progress bar."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.cli.output import (
    MAX_BLOCK_BYTES,
    cut_to_width,
    detached_lines,
    display_width,
    format_amount,
    format_outcome,
    format_size,
    format_span,
    narrowed,
    parse_seconds,
    parse_size,
    printable,
    progress_bar,
    table,
    unique_prefixes,
)
from distributed_grid.errors import BadInput
from tests.support.records import records


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1", 1),
        ("5GB", 5 * 1024**3),
        ("5 gb", 5 * 1024**3),
        ("512MB", 512 * 1024**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("2k", 2048),
        ("7B", 7),
        ("1T", 1024**4),
        ("70368744177664", MAX_BLOCK_BYTES),
    ],
)
def test_a_size_means_what_people_mean_by_it(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "5XB", "GB", "nan", "inf", "1e9", "9" * 400, "65TB", "1,5GB"])
def test_invalid_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadInput) as no:
        parse_size(text)
    assert len(str(no.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_seconds(text)


@given(st.integers(1, MAX_BLOCK_BYTES))
def test_a_size_that_is_shown_is_about_the_size_it_stands_for(size: int) -> None:
    shown = format_size(size)
    assert abs(parse_size(shown.replace(" bytes", "").replace(" byte", "")) - size) <= size / 1000


def test_sizes_and_times_are_shown_in_one_unit() -> None:
    assert [format_size(size) for size in (0, 1, 1023, 1024, 1536 * 1024**2)] == [
        "0 bytes",
        "1 byte",
        "1023 bytes",
        "1 KB",
        "1.5 GB",
    ]
    assert [format_span(seconds) for seconds in (-5, 59.6, 119, 3600, 86400, 200_000)] == [
        "0 s",
        "60 s",
        "119 s",
        "60 min",
        "24 h",
        "2 d",
    ]


def test_a_span_has_the_digits_and_the_least_count_that_are_asked_for() -> None:
    assert [format_span(seconds, ".3g", least=1) for seconds in (0.792, 90, 5400)] == ["0.792 s", "1.5 min", "1.5 h"]
    assert [format_span(seconds, ".1f") for seconds in (90, 150)] == ["90.0 s", "2.5 min"]


def test_a_table_has_columns_as_wide_as_needed_and_no_control_characters() -> None:
    shown = table(("NODE", "STATE"), [("gpu1", "alive"), ("a-long-name", "\x1b[2J")], empty="no nodes")
    assert shown.splitlines() == ["NODE         STATE", "gpu1         alive", "a-long-name  \\x1b[2J"]
    assert table(("NODE",), [], empty="no nodes") == "no nodes"


def test_values_are_one_printable_word() -> None:
    assert [printable(value) for value in (None, "", 2.0, 2.5, "two\nlines")] == ["-", "-", "2", "2.5", "two\\nlines"]
    assert [format_amount("cpu", 1), format_amount("gpu", 2), format_amount("tpu", 3)] == ["1 core", "2 GPUs", "3 tpu"]
    shown = [format_amount("memory", value) for value in (4.0429, 0.25, 0.0004, 100 / 1024**3, 0)]
    assert shown == ["4.04 GB", "0.25 GB", "0.4 MB", "100 bytes", "-"]
    assert [format_amount("cpu", 1e6), format_amount("memory", 1e6)] == ["1000000 cores", "1000000 GB"]


def test_an_outcome_is_a_few_words() -> None:
    jobs: list[dict[str, Any]] = [
        {"outcome": None},
        {"outcome": "exited", "exit_code": 3},
        {"outcome": "signalled", "signal": 9},
        {"outcome": "waited_too_long"},
    ]
    assert [format_outcome(job) for job in records(jobs)] == ["-", "exit 3", "signal 9", "waited too long"]


def test_the_bar_is_empty_at_first_and_full_at_the_end() -> None:
    assert progress_bar(0, 0) == progress_bar(0, 10) == "[" + "." * 30 + "]"
    assert progress_bar(10, 10) == "[" + "#" * 30 + "]"


@given(st.text(), st.integers(1, 60))
def test_a_cut_line_fits_its_columns_and_is_the_beginning_of_the_text(text: str, columns: int) -> None:
    cut = cut_to_width(text, columns)
    assert display_width(cut) <= columns
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


def test_a_wide_character_takes_two_columns_and_a_combining_one_none() -> None:
    assert display_width("語") == 2
    assert display_width("e\u0301") == 1
    assert cut_to_width("語語語", 5) == "語語…"
    assert cut_to_width("語語語", 4) == "語…"
    assert cut_to_width("anything", 0) == ""


def detached_job(name: str, **changes: Any) -> Any:
    found = {"job_id": name, "state": "running", "detached_at": "2026-05-01T13:00:00Z", "detached_reason": "gone"}
    return records(found | changes)


def test_detached_jobs_that_go_on_are_listed_with_the_command_that_follows_them() -> None:
    jobs = [detached_job("one"), detached_job("two", state="ended"), detached_job("three", detached_at=None)]
    (line,) = detached_lines(jobs)
    assert line.startswith("one was detached at ")
    assert line.endswith(": grid jobs logs -f one")


def test_of_many_detached_jobs_the_newest_are_listed() -> None:
    lines = detached_lines([detached_job(f"job-{number}") for number in range(9)])
    assert [line.split()[0] for line in lines] == [*(f"job-{number}" for number in range(4, 9)), "and"]
    assert lines[-1] == "and 4 more"


@given(st.lists(st.text("abc-", min_size=1, max_size=40), unique=True))
def test_shortened_ids_are_told_apart_and_stand_for_one_id_each(ids: list[str]) -> None:
    shown = unique_prefixes(ids)
    assert list(shown) == sorted(ids)
    for id_, short in shown.items():
        assert id_.startswith(short)
        assert [other for other in ids if other == short or (short not in ids and other.startswith(short))] == [id_]


def test_an_id_is_shown_with_eight_characters_of_its_own_and_a_name_as_it_is() -> None:
    names = ["auto-gpu1-memory-1", "boost-of-monday"]
    shown = unique_prefixes(["job-0123456789ab", "0123456789abcdef", "0123456799abcdef.1", *names])
    assert shown == {
        "job-0123456789ab": "job-01234567",
        "0123456789abcdef": "012345678",
        "0123456799abcdef.1": "012345679",
        **{name: name for name in names},
    }


HEADS = ("WORKER", "ZONE", "WHY")
ROWS = [("worker-1", None, "the queue calls for it"), ("worker-2", "", "")]


def test_a_table_that_fits_is_left_as_it_is() -> None:
    assert narrowed(HEADS, ROWS, 0) == (HEADS, ROWS)
    assert narrowed(HEADS, ROWS, 80) == (HEADS, ROWS)


def test_on_a_narrow_terminal_empty_columns_go_first_then_the_last_one_is_cut() -> None:
    heads, rows = narrowed(HEADS, ROWS, 34)
    assert list(heads) == ["WORKER", "WHY"]
    assert rows[0] == ["worker-1", "the queue calls for it"]
    _, rows = narrowed(HEADS, ROWS, 24)
    assert rows[0] == ["worker-1", "the queue cal…"]
    assert max(len(line) for line in table(*narrowed(HEADS, ROWS, 24), empty="").splitlines()) == 24
    _, rows = narrowed(HEADS, ROWS, 10)
    assert rows[0] == ["worker-1", "the queue c…"], "so much is always shown"
