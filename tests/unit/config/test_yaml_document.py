"""Documents: plain scalars without traps, files that are refused politely, and problems of one line each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig, ConfigProblems, check_config
from distributed_grid.config.yaml_document import (
    MAX_FILE_BYTES,
    ConfigProblem,
    decode_content,
    from_plain,
    parse,
    plain_scalar,
    printable,
    read_content,
    render,
    to_plain,
)
from tests.unit.config.texts import problems_of


def test_a_hopeless_file_is_told_in_part():
    lines = problems_of("\n".join(f"k{i}: 1" for i in range(300)), all_placed=False)
    assert len(lines) == 101
    assert lines[-1] == "and 200 more problems"


def test_nested_plain_data_is_refused_too():
    data: dict = {}
    data["nodes"] = data
    with pytest.raises(ConfigProblems, match="nested deeper"):
        ClusterConfig.from_mapping(data)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty"),
        (b"\0\1\2\3", "is not text"),
        (random.Random(7).randbytes(64).replace(b"\0", b"\1") + b"\xff\xfe", "is not UTF-8"),
        ("name: ä".encode("latin-1"), "is not UTF-8 (line 1)"),
        ("name: a".encode("utf-16"), "is not text"),
        (b"name: " + b"x" * 10_000_000, "larger than 1024 KiB"),
    ],
)
def test_invalid_cluster_file_is_refused_in_one_line(tmp_path, content, line):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    (problem,) = check_config(path)
    assert line in str(problem)
    assert str(problem).startswith(str(path))


def test_a_missing_file_a_directory_and_an_impossible_name_are_refused_politely(tmp_path):
    assert "no such file" in str(check_config(tmp_path / "none.yaml")[0])
    assert "is a directory" in str(check_config(tmp_path)[0])
    assert "cannot be read" in str(check_config("a\0b")[0])
    assert "cannot be read" in str(check_config("x" * 5000)[0])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("Null", None),
        ("yes", True),
        ("OFF", False),
        ("oFF", "oFF"),
        ("12", 12),
        ("-1_000", -1000),
        ("0", 0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x1f", "0x1f"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1.2.3", "1.2.3"),
        ("١٢", "١٢"),
    ],
)
def test_a_plain_scalar_is_what_most_people_mean_by_it(text, value):
    found = plain_scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_a_number_with_very_many_digits_is_read_at_once():
    assert plain_scalar("9" * 100_000) == math.inf


@given(st.text())
def test_any_text_is_a_scalar_and_a_number_is_one_for_python_too(text):
    found = plain_scalar(text)
    if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
        assert found == float(text.replace("_", ""))


@given(st.text())
def test_printable_text_is_one_line_without_control_characters(text):
    shown = printable(text)
    assert shown.isprintable()
    assert not text.isprintable() or shown == text


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value):
    assert to_plain(from_plain(value)) == value


def test_a_problem_without_a_line_names_the_file_alone():
    problem = ConfigProblem(file="c.yaml", line=3, key="nodes[0].name", message="is missing\x1b[31m")
    assert str(problem) == "c.yaml:3: nodes[0].name: is missing\\x1b[31m"
    assert str(ConfigProblem(file="c.yaml", message="is empty")) == "c.yaml: is empty"


@given(st.binary(max_size=50))
def test_any_bytes_are_text_or_refused(data):
    with contextlib.suppress(ConfigProblems):
        assert decode_content(data, "c.yaml").encode() == data.removeprefix(b"\xef\xbb\xbf")


def test_a_file_of_the_largest_size_is_read_and_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert len(read_content(path)) == MAX_FILE_BYTES
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigProblems, match="is no regular file"):
        read_content(pipe)


def problem_of(text: str) -> str:
    lines = problems_of(text)
    assert len(lines) == 1, lines
    return lines[0]


def test_deep_nesting_is_refused_without_recursion():
    for text in ("[" * 100_000, "{a: " * 50_000, "\n".join(" " * i + "a:" for i in range(1000))):
        assert "nested deeper" in problem_of(text)


def test_aliases_cannot_grow_without_bound():
    bomb = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    bomb += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    started = time.monotonic()
    assert "more than 200000 values" in problem_of("\n".join(bomb))
    labels = ", ".join(f"k{i}: v" for i in range(5000))
    merges = "\n".join(f"- {{<<: *m, name: n{i}}}" for i in range(5000))
    assert "more than 200000 values" in problem_of(f"quotas: &m {{{labels}}}\nnodes:\n{merges}")
    assert time.monotonic() - started < 10


def test_anchors_merges_json_windows_line_ends_and_a_byte_order_mark_are_fine(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\r\nnodes:\r\n- &n {name: x, port: 23}\r\n- <<: *n\r\n  name: y\r\n")
    config = ClusterConfig.from_yaml(path)
    assert [(node.name, node.port) for node in config.nodes] == [("x", 23), ("y", 23)]
    path.write_text('{\n\t"hold_seconds": 1e2,\n\t"nodes":[{"name":"a"}]}')
    assert ClusterConfig.from_yaml(path).hold_seconds == 100


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text("abc: -#'\"\n{}[]&*!|>%@`ä", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdef", min_size=1), inner, max_size=3),
    max_leaves=10,
)


def read(text: str) -> object:
    return to_plain(parse(text, "c.yaml"))


@given(st.dictionaries(st.text("abcdef", min_size=1), TREES, max_size=4))
def test_rendered_yaml_and_json_read_back_the_same(tree):
    assert read(render(tree)) == tree
    assert read(json.dumps(tree)) == tree
    assert read(json.dumps(tree, indent="\t")) == tree


@given(st.text())
def test_any_text_is_a_document_or_has_problems(text):
    with contextlib.suppress(ConfigProblems):
        assert parse(text, "c.yaml").line >= 1


def test_a_value_has_the_line_of_its_key_and_how_it_was_written():
    root = parse("# cluster\nname:\n  a\nport: 0022\nnodes:\n- host: b", "c.yaml").value
    assert isinstance(root, dict)
    assert (root["name"].line, root["name"].value) == (2, "a")
    assert (root["port"].raw, root["port"].value) == ("0022", "0022")
    (node,) = root["nodes"].value if isinstance(root["nodes"].value, list) else ()
    assert node.line == 6


def test_quotes_and_tags_keep_a_number_text():
    assert read("[7, '7', !!str 7]") == [7, "7", "7"]


def test_a_merge_gives_way_to_what_is_written_and_the_first_source_wins():
    assert read("{x: &x {a: 1, b: 1}, y: &y {b: 2, c: 2}, z: {<<: [*x, *y], a: 9}}") == {
        "x": {"a": 1, "b": 1},
        "y": {"b": 2, "c": 2},
        "z": {"a": 9, "b": 1, "c": 2},
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_text_is_nothing(text):
    assert read(text) is None


def test_parser_messages_quote_no_content():
    with pytest.raises(ConfigProblems) as caught:
        parse("password: geheim: geheim\n\t: [", "c.yaml")
    assert "geheim" not in str(caught.value)
    assert str(caught.value).startswith("c.yaml:")


@pytest.mark.parametrize(
    ("text", "problem"), [("a: \ud800", "half characters"), ("#" * (MAX_FILE_BYTES + 1), "larger than 1024 KiB")]
)
def test_a_text_that_no_file_can_hold_is_refused(text, problem):
    with pytest.raises(ConfigProblems, match=problem):
        parse(text, "c.yaml")
