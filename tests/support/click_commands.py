"""The commands of `grid` as click commands: an independent reading of every command line, and of every help page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from distributed_grid.cli.command_line import (
    Argument,
    CommandSpec,
    FloatRange,
    Group,
    IntRange,
    LazyGroup,
    Option,
    Parameter,
    WordChoice,
)

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def click_command(command: CommandSpec) -> click.Command:
    """A command and its subcommands."""
    settings: dict[str, Any] = {
        "params": [_parameter(one) for one in command.parameters],
        "help": command.function.__doc__,
    }
    if isinstance(command, Group):
        inner = {name: _found(command, name) for name in command.names}
        if isinstance(command, LazyGroup):
            for name, one in inner.items():
                one.short_help = command.table[name][2]
        group = click.Group(command.name, commands=inner, context_settings=CONTEXT, **settings)
        group.list_commands = lambda ctx: command.names  # type: ignore[method-assign]
        return group
    context = {**CONTEXT, "allow_interspersed_args": command.interspersed}
    return click.Command(command.name, context_settings=context, **settings)


def _found(group: Group, name: str) -> click.Command:
    command = group.find(name)
    assert command is not None
    return click_command(command)


def _text_converter(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda value: kind(value) if isinstance(value, str) else value


def _parameter(one: Parameter) -> click.Parameter:
    kind: Any = one.kind
    if isinstance(kind, FloatRange):
        made: Any = click.IntRange if isinstance(kind, IntRange) else click.FloatRange
        low = kind.at_least if kind.above is None else kind.above
        kind = made(low, kind.at_most, min_open=kind.above is not None)
    elif isinstance(kind, WordChoice):
        kind = click.Choice(kind.words, case_sensitive=kind.case_sensitive)
    elif kind not in (str, int, float):
        kind = _text_converter(kind)  # click converts the default, too
    if isinstance(one, Argument):
        return click.Argument(
            [one.name], type=kind, nargs=-1 if one.many else 1, required=one.required, metavar=one.metavar
        )
    assert isinstance(one, Option)
    off = [word for word, value in one.spellings.items() if value is False]
    on = [word for word, value in one.spellings.items() if value is not False]
    words = [one.name, *("/".join([word, *off]) for word in on)]
    if one.is_flag or off:
        return click.Option(words, is_flag=True, default=one.default, help=one.help)
    return click.Option(
        words,
        type=kind,
        multiple=one.many,
        required=one.required,
        default=None if one.many else one.default,
        show_default=one.show_default,
        metavar=one.metavar or None,
        help=one.help,
    )
