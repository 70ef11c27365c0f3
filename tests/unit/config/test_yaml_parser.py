"""YAML and JSON texts: lines are kept, and nothing in a text takes time or memory out of proportion."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig
from distributed_grid.config.yaml_document import MAX_FILE_BYTES, ConfigProblems, to_plain
from distributed_grid.config.yaml_parser import parse, render
from tests.unit.config.texts import problems_of


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
def test_what_is_rendered_or_json_reads_as_what_it_was(tree):
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


def test_what_the_parser_says_of_a_mistake_quotes_nothing():
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
