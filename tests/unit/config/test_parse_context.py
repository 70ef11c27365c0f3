"""Parse context: variables, places of problems, and secrets that are not quoted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.parse_context import InvalidValue, KeyPath, ParseContext, Unexpanded, describe
from distributed_grid.config.yaml_document import YamlNode
from tests.unit.config.texts import load


def test_variables_are_filled_in_everywhere_and_numbers_stay_numbers():
    config = load(
        "nodes: [{name: '${N}-1', port: '${P}', trust_declared: '${T}', user: '${U}'}]\nname: a $${x} ${N}",
        N="gpu",
        P="2200",
        T="yes",
        U="no",
    )
    node = config.nodes[0]
    assert (node.name, node.port, node.trust_declared, node.user) == ("gpu-1", 2200, True, "no")
    assert config.name == "a ${x} gpu"
    assert ClusterConfig.from_mapping(config.as_dict()).name == config.name


def test_a_missing_variable_is_named_with_its_place():
    with pytest.raises(ConfigProblems) as caught:
        load("name: a\nnodes:\n- name: b\n  user: ${NOBODY_SET_THIS}")
    assert str(caught.value) == (
        "<text>:4: nodes[0].user: found ${NOBODY_SET_THIS}, expected the environment variable NOBODY_SET_THIS to be set"
    )


def test_secrets_are_not_quoted_when_they_stand_in_the_wrong_place():
    texts = (
        "providers: {aws: hunter2}",
        "providers: {aws: {region: x, credentials: hunter2}}",
        "providers: {aws: {region: x, credentials: {secret_access_key: [hunter2]}}}",
        "providers: {aws: {region: x, secret_access_key: hunter2}}",
        "alerts: {webhook: hunter2}",
        "alerts: {webhook: '${W}'}",
        "alerts: {webhook: hunter2",
    )
    for text in texts:
        with pytest.raises(ConfigProblems) as caught:
            load(text, W="hunter2")
        assert "hunter" not in str(caught.value) + repr(caught.value.problems)


NAMES = st.text("ABC_", min_size=1, max_size=3)


def a_context(**env: str) -> ParseContext:
    return ParseContext("c.yaml", env)


@given(st.lists(st.text("ab $}", max_size=4).filter(lambda text: not text.endswith("$")) | NAMES, max_size=6))
def test_each_variable_is_replaced_by_its_value_and_what_is_in_it_is_not_looked_at(parts):
    env = {part: f"<${{{part}}}>" for part in parts if part.isupper()}
    written = "".join(f"${{{part}}}" if part in env else part for part in parts)
    assert a_context(**env).expand(written) == "".join(env.get(part, part) for part in parts)


@given(st.text("a$ {}", max_size=12))
def test_a_text_that_is_escaped_stays_as_it_is(text):
    assert a_context().expand(text.replace("${", "$${")) == text


def test_a_variable_that_is_not_set_or_not_finished_or_not_to_be_expanded_raises():
    with pytest.raises(InvalidValue, match="the environment variable NOBODY to be set"):
        a_context(SOMEBODY="a").expand("${SOMEBODY}${NOBODY}")
    with pytest.raises(InvalidValue):
        a_context().expand("${NOBODY")
    with pytest.raises(Unexpanded):
        ParseContext("c.yaml", None).expand("${NOBODY}")
    assert ParseContext("c.yaml", None).expand("$NOBODY {}") == "$NOBODY {}"


def test_a_path_is_spelled_as_the_user_does():
    node = KeyPath().child("nodes", "nodes").child("[1]", "").child("cores", "cpu_count")
    assert (node.spelled, node.normal) == ("nodes[1].cores", "nodes.cpu_count")
    long = KeyPath().child("x" * 500, "x").spelled
    assert len(long) < 50
    assert KeyPath().child("a\x1b[31m", "a").spelled.isprintable()


def test_a_problem_between_values_is_placed_at_the_nearest_key_that_was_written():
    context = a_context()
    context.record(KeyPath("scaling", "scaling"), YamlNode({}, 4))
    context.report_at("scaling.min_workers", "must be at most max_workers")
    context.report_at("alerts.cpu", "is nowhere")
    assert [(one.line, one.key) for one in context.problems] == [(4, "scaling"), (0, "")]
    context.warn_at("scaling.min_workers", "is large")
    assert context.warnings == ["scaling: is large"]


def test_problems_are_raised_once_each_in_the_order_of_the_file():
    context = a_context()
    context.raise_problems()
    for line in (3, 1, 3):
        context.report(KeyPath("name"), line, "is wrong")
    with pytest.raises(ConfigProblems) as caught:
        context.raise_problems()
    assert [problem.line for problem in caught.value.problems] == [1, 3]


@pytest.mark.parametrize(
    ("value", "raw", "key", "found"),
    [
        (None, "", "name", "nothing"),
        ({}, "", "name", "a mapping"),
        ([], "", "name", "a list"),
        ("lab", "lab", "name", "'lab'"),
        (True, "yes", "name", "the boolean yes"),
        (1.5, "1.50", "name", "the number 1.50"),
        ("geheim", "geheim", "ray.token", "a value (not shown)"),
        (7, "7", "providers.aws", "a value (not shown)"),
        ("x" * 100, "x" * 100, "name", repr("x" * 60 + "…")),
    ],
)
def test_a_value_is_described_shortly_and_a_secret_not_at_all(value, raw, key, found):
    assert describe(YamlNode(value, 1, raw), KeyPath(key)) == found
