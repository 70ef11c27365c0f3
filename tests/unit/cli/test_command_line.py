"""The parser of command lines: click, given the same declarations, accepts and refuses the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distributed_grid.cli.command_line import (
    GLOBAL_OPTIONS,
    CommandSpec,
    Group,
    HelpRequest,
    Option,
    UsageError,
    VersionRequest,
    parse,
)
from distributed_grid.cli.root_command import GRID
from distributed_grid.errors import BadInput
from tests.support.click_commands import click_command

VALUES = (
    "",
    "-",
    "--",
    "0",
    "1",
    "-1",
    "1e3",
    "1_0",
    "nan",
    "9999999",
    "x",
    "a=b",
    "30d",
    "5GB",
    "user",
    "SPREAD",
    "true",
)


def commands(group: Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CommandSpec]]:
    """Every command with the words that name it."""
    for name in group.names:
        command = group.find(name)
        assert command is not None
        if isinstance(command, Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(GRID))


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[tuple[str, ...], list[str]]:
    """A command, and options, values and words in any order; many of them are correct."""
    path = draw(st.sampled_from(sorted(ALL)))
    options = [one for one in ALL[path].parameters if isinstance(one, Option)]
    value = st.sampled_from(VALUES)
    spelling = st.sampled_from(sorted(word for one in options for word in one.spellings))
    parts = st.one_of(
        st.tuples(value),
        st.tuples(spelling, value),
        st.tuples(spelling),
        st.builds(lambda name, text: (f"{name}={text}",), spelling, value),
        st.builds(lambda name, text: (f"{name}{text}",), spelling, value),
        st.sampled_from([("-h",), ("--help",), ("--nothing",)]),
    )
    return path, [word for part in draw(st.lists(parts, max_size=6)) for word in part]


def as_click_reads_it(command: CommandSpec, words: list[str]) -> dict[str, Any] | None:
    try:
        return click_command(command).make_context(command.name, list(words)).params
    except (click.ClickException, click.exceptions.Exit, BadInput):
        return None


@given(command_lines())
@example((("daemon", "token", "create"), ["--user", "ann"]))
@example((("daemon", "start"), ["--no-tls", "--listen=:0"]))
@example((("memory", "allocate"), ["5GB", "--ttl", "60"]))
@example((("run-shared",), ["-e", "A=1", "-e", "B", "--", "sh", "-c", "x"]))
@example((("jobs", "fetch"), ["job", "--to", ".", "a", "b"]))
@example((("jobs", "list"), ["-al5"]))
@example((("jobs", "list"), ["-a-"]))
@example((("jobs", "list"), ["-l=5"]))
def test_click_reads_every_command_line_in_the_same_way(line: tuple[tuple[str, ...], list[str]]) -> None:
    path, words = line
    expected = as_click_reads_it(ALL[path], words)
    try:
        _, options, global_options = parse(GRID, [*path, *words])
    except (UsageError, HelpRequest, BadInput):
        assert expected is None, f"click accepts {words}"
        return
    values = {one.name: one.default for one in GLOBAL_OPTIONS} | global_options | options
    assert expected is not None, f"click refuses {words}"
    assert repr(sorted(values.items())) == repr(sorted(expected.items()))


@pytest.mark.parametrize(
    "words",
    [
        "status",
        "--json status",
        "jobs --json list -a --limit 5",
        "run-shared -r cpu -a 1 true",
        "run-shared --strategy=SPREAD -n a -n b --wait 0 -- sh -c x",
        "boost request gpu1 cpu 2 --priority High",
        "memory store key -",
        "daemon start --listen 127.0.0.1:0 --no-tls",
        "cluster start",
    ],
)
def test_a_usual_command_line_is_understood(words: str) -> None:
    parse(GRID, words.split())


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("--json", "Missing command."),
        ("statsu", "no command 'statsu'; did you mean 'status'?"),
        ("jobs nonesuch", "no command 'nonesuch'"),
        ("status extra", "Got unexpected extra argument (extra)"),
        ("status --jsn", "No such option '--jsn'. Did you mean '--json'?"),
        ("run-shared", "Missing argument 'COMMAND...'."),
        ("run-shared -acpu true", "Invalid value for '-a' / '--amount': 'cpu' is not a valid float."),
        ("run-shared --detach=1 true", "Option '--detach' does not take a value."),
        ("jobs list --limit", "Option '--limit' requires an argument."),
        ("jobs list --limit 0", "Invalid value for '-l' / '--limit': 0 is not in the range 1<=x<=10000."),
        ("ledger --by USER", "Invalid value for '--by': 'USER' is not one of 'user', 'node', 'day'."),
        ("daemon token create", "Missing option '--user'."),
    ],
)
def test_a_mistake_is_named(words: str, mistake: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(GRID, words.split())
    assert str(caught.value) == mistake


@pytest.mark.parametrize(
    ("words", "names", "is_mistake"),
    [
        ("", ["grid"], True),
        ("-h", ["grid"], False),
        ("jobs", ["grid", "jobs"], True),
        ("status extra --help", ["grid", "status"], False),
        ("daemon token -h", ["grid", "daemon", "token"], False),
    ],
)
def test_help_is_of_the_last_command_that_is_named(words: str, names: list[str], is_mistake: bool) -> None:
    with pytest.raises(HelpRequest) as caught:
        parse(GRID, words.split())
    assert ([command.name for command in caught.value.path], caught.value.is_mistake) == (names, is_mistake)


def test_the_version_is_asked_for_at_the_root() -> None:
    with pytest.raises(VersionRequest):
        parse(GRID, ["--version", "status"])
