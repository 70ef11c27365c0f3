"""Value kinds: accepted spellings of a key, their normal form, and their display."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.value_kinds import (
    COMMAND,
    CORES,
    CUSTOM_NAME,
    FLAG,
    GIGABYTES,
    HOST,
    JUMPS,
    LOGIN,
    MAX_SECONDS,
    MIB,
    NODE_NAME,
    PERCENT,
    PORT,
    RATIO,
    SOME_CORES,
    TEXT,
    WEB_ADDRESS,
    Amount,
    Count,
    InvalidValue,
    KeyPath,
    MemorySize,
    OneOf,
    ParseContext,
    PlainNumber,
    Seconds,
    Secret,
    SlurmTime,
    Unexpanded,
    ValueKind,
    describe,
    is_loopback,
)
from distributed_grid.config.yaml_document import YamlNode, from_plain
from distributed_grid.domain.resources import MAX_AMOUNT
from tests.unit.config.texts import load


def test_a_secret_is_compared_and_never_shown():
    secret = Secret("hunter2")
    assert (repr(secret), str(secret), f"{secret}") == ("Secret('**********')", "**********", "**********")
    assert secret.reveal() == "hunter2"
    assert {secret, Secret("hunter2")} == {secret}
    assert secret not in (Secret("hunter3"), "hunter2")
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)


def test_only_loopback_is_loopback():
    assert all(map(is_loopback, ["local", "localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "127.a.b.c", "127.0.0.1.evil.example", "10.0.0.1", "box"]))


def read(kind: ValueKind, value: object, **env: str) -> Any:
    context = ParseContext("c.yaml", env)
    return kind.read(from_plain(value), KeyPath("key", "key"), context)


def refused(kind: ValueKind, value: object) -> str:
    with pytest.raises(InvalidValue) as caught:
        read(kind, value)
    return f"{caught.value.expected} {caught.value.hint}"


@pytest.mark.parametrize("kind", [CORES, GIGABYTES, Amount(1024), Amount(10**6, "dollars")], ids=lambda kind: kind.what)
@given(amount=st.integers(1, MAX_AMOUNT))
def test_an_amount_that_is_shown_is_read_as_the_same(kind, amount):
    assert abs(read(kind, kind.show(amount)) - amount) <= amount // 2**52


@given(st.integers(1, 2**50))
def test_memory_that_is_shown_is_read_as_the_same(size):
    kind = MemorySize()
    assert read(kind, kind.show(size)) == size


@given(st.integers(60, MAX_SECONDS // 3600))
def test_a_time_of_slurm_that_is_shown_is_read_as_the_same(seconds):
    kind = SlurmTime()
    assert read(kind, kind.show(seconds)) == seconds


@given(st.integers(0, 10_000).map(lambda number: number / 100))
def test_a_percentage_is_a_ratio_and_is_shown_as_it_was_written(percent):
    ratio = read(PERCENT, percent)
    assert 0 <= ratio <= 1
    assert read(PERCENT, PERCENT.show(ratio)) == pytest.approx(ratio)
    assert PERCENT.show(ratio) == pytest.approx(percent)


@given(st.text(max_size=20))
def test_a_text_that_is_read_is_one_line_and_is_shown_as_what_reads_the_same(text):
    try:
        found = read(TEXT, text)
    except InvalidValue:
        return
    assert found == found.strip() != ""
    assert found.isprintable()
    assert read(TEXT, TEXT.show(found)) == found


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (Count(1, 5), 5.0, 5),
        (PORT, "${P}", 2200),
        (CORES, 0.5, 500),
        (GIGABYTES, 0, 0),
        (RATIO, 1, 1.0),
        (Seconds(unit=60, unit_name="minutes"), 1.5, 90.0),
        (SlurmTime(), "4:00:00", 14_400.0),
        (SlurmTime(), "1-12", 129_600.0),
        (SlurmTime(), "1-12:30:05", 131_405.0),
        (PlainNumber(), 3, 3.0),
        (MemorySize(), "512m", 512 * MIB),
        (MemorySize(), "1.5 GiB", 1536 * MIB),
        (FLAG, "${T}", True),
        (OneOf(("share_and_offload",), {"both": "share_and_offload"}), "Share-And-Offload", "share_and_offload"),
        (OneOf(("share_and_offload",), {"both": "share_and_offload"}), "both", "share_and_offload"),
        (HOST, "LOCAL", "local"),
        (HOST, "[fe80::1%eth0]", "[fe80::1%eth0]"),
        (CUSTOM_NAME, "TPU", "tpu"),
        (JUMPS, "ana@gate:22, box", "ana@gate:22, box"),
    ],
)
def test_accepted_spelling_becomes_its_normal_form(kind, written, value):
    found = read(kind, written, P="2200", T="yes")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "written", "says"),
    [
        (Count(1, 5), 6, "1-5"),
        (Count(1), 1.5, "1 or more"),
        (SOME_CORES, 0, "more than 0"),
        (SOME_CORES, 0.0001, "more than 0"),
        (CORES, 0.0001, "0 or more"),
        (CORES, -1, "0 or more"),
        (CORES, True, "CPU cores"),
        (CORES, "4", "without quotes"),
        (RATIO, 70, "write 0.7"),
        (PERCENT, 101, "0 to 100"),
        (Seconds(low=1.0), 0.5, "at least 1"),
        (Seconds(), 10**12, "ten years"),
        (SlurmTime(), "4:00", "HOURS:MINUTES:SECONDS"),
        (SlurmTime(), 240, "HOURS:MINUTES:SECONDS"),
        (SlurmTime(), "0:00:59", "a minute or more"),
        (MemorySize(), "16", "such as 16g"),
        (MemorySize(), 16, "such as 16g"),
        (COMMAND, 7, "put it in quotes"),
        (COMMAND, "a\nb", "a command"),
        (COMMAND, ["a"], "a command"),
        (FLAG, "true", "true or false"),
        (HOST, "ana@box", "user:"),
        (HOST, "box:22", "port:"),
        (HOST, "-oProxyCommand=x", "host name"),
        (LOGIN, "-l", "login name"),
        (NODE_NAME, "../up", "a name"),
        (CUSTOM_NAME, "GPU", "not cpu"),
        (WEB_ADDRESS, "ftp://a", "http://"),
    ],
)
def test_refused_spelling_states_the_expectation(kind, written, says):
    assert says in refused(kind, written)


def test_a_percentage_below_one_is_asked_about():
    context = ParseContext("c.yaml", {})
    PERCENT.read(from_plain(0.7), KeyPath("cpu_percent_max"), context)
    assert context.warnings == ["cpu_percent_max: 0.7 means 0.7 %; if 70 % is meant, write 70"]


def test_a_secret_that_is_refused_is_not_told():
    with pytest.raises(InvalidValue) as caught:
        read(WEB_ADDRESS, "geheim")
    assert caught.value.found == "a value (not shown)"


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
