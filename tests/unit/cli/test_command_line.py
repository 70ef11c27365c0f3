"""The parser of correct command lines never disagrees with click, which answers everything else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distributed_grid.cli.click_commands import click_command
from distributed_grid.cli.command_line import CommandSpec, Group, NotUnderstood, Option, parse
from distributed_grid.cli.root_command import COMMANDS, GRID
from distributed_grid.cli.session import CliSession
from distributed_grid.errors import BadInput

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
    for name in COMMANDS if group is GRID else group.commands:
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


def as_click_reads_it(command: CommandSpec, words: list[str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    session = CliSession()
    try:
        context = click_command(command).make_context(command.name, list(words), obj=session)
    except (click.ClickException, click.exceptions.Exit, BadInput):
        return None
    return context.params, {name: value for name, value in vars(session).items() if value}


@given(command_lines())
@example((("daemon", "token", "create"), ["--user", "ann"]))
@example((("daemon", "start"), ["--no-tls", "--listen=:0"]))
@example((("memory", "allocate"), ["5GB", "--ttl", "60"]))
@example((("run-shared",), ["-e", "A=1", "-e", "B", "--", "sh", "-c", "x"]))
@example((("jobs", "fetch"), ["job", "--to", ".", "a", "b"]))
def test_what_it_understands_click_understands_in_the_same_way(line: tuple[tuple[str, ...], list[str]]) -> None:
    path, words = line
    try:
        command, options, global_options = parse(GRID, [*path, *words])
    except NotUnderstood:
        return
    found = as_click_reads_it(command, words)
    given = {name: value for name, value in global_options.items() if value}
    assert found is not None, f"click refuses {words}"
    assert (repr(sorted(options.items())), given) == (repr(sorted(found[0].items())), found[1])


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
    "words",
    [
        "",
        "-h",
        "--version",
        "statsu",
        "jobs",
        "status --help",
        "status extra",
        "run-shared",
        "run-shared -acpu true",
        "run-shared -a x true",
        "run-shared --detach=1 true",
        "jobs list --limit",
        "jobs list --limit 0",
        "ledger --by USER",
        "daemon token create",
    ],
)
def test_help_mistakes_and_rare_spellings_are_left_to_click(words: str) -> None:
    with pytest.raises(NotUnderstood):
        parse(GRID, words.split())
