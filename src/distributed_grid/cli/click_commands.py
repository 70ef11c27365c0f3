"""The commands as click commands, for help, completion, mistakes and rare spellings."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import click

from distributed_grid import __version__
from distributed_grid.cli.command_line import (
    GLOBAL_OPTIONS,
    Argument,
    CommandSpec,
    FloatRange,
    Group,
    IntRange,
    LazyGroup,
    Parameter,
    WordChoice,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.cli.standard_streams import HungUp, OutputFailed


def run_with_click(root: LazyGroup, words: Sequence[str], session: CliSession) -> Any:
    """Run a command line; the exit code, or what the command returned."""
    try:
        return click_root(root).main(args=list(words), prog_name=root.name, standalone_mode=False, obj=session)
    except click.ClickException as problem:
        with contextlib.suppress(HungUp, OutputFailed, OSError):
            problem.show()
        return 2
    except click.Abort:
        return 130


def click_root(root: LazyGroup) -> click.Group:
    """All commands."""
    made = ClickRoot(root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
    return click.version_option(__version__, prog_name=root.name, message="%(prog)s %(version)s")(made)


class ClickRoot(click.Group):
    """The root group, whose commands are made when they are asked for."""

    def __init__(self, root: LazyGroup, **settings: Any) -> None:
        super().__init__(root.name, params=_parameters(root), help=root.function.__doc__, **settings)
        self._root = root

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._root.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self._root.find(cmd_name)
        return click_command(found) if found is not None else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._root.table:
            near = difflib.get_close_matches(args[0], self._root.table, 1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self._root.table.items()])


def click_command(command: CommandSpec) -> click.Command:
    """A command and its subcommands."""
    settings: dict[str, Any] = {"params": _parameters(command), "help": command.function.__doc__}
    if isinstance(command, Group):
        inner = {name: click_command(one) for name, one in command.commands.items()}
        return click.Group(command.name, commands=inner, **settings)
    context = {"allow_interspersed_args": command.interspersed}
    function = click.pass_obj(command.function)
    return click.Command(command.name, callback=function, context_settings=context, **settings)


def _parameters(command: CommandSpec) -> list[click.Parameter]:
    return [_click_parameter(one) for one in command.parameters]


def _click_parameter(one: Parameter) -> click.Parameter:
    settings = dict(one.settings)
    if "type" in settings:
        settings["type"] = _click_type(settings["type"])
    if isinstance(one, Argument):
        return click.Argument(one.words, **settings)
    if one in GLOBAL_OPTIONS:
        settings |= {"expose_value": False, "callback": _store(one.name)}
    return click.Option(one.words, **settings)


def _click_type(kind: Any) -> Any:
    if isinstance(kind, FloatRange):
        made: Any = click.IntRange if isinstance(kind, IntRange) else click.FloatRange
        lowest = kind.at_least if kind.above is None else kind.above
        return made(lowest, kind.at_most, min_open=kind.above is not None)
    if isinstance(kind, WordChoice):
        return click.Choice(kind.words, case_sensitive=kind.case_sensitive)
    return kind


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(context.find_object(CliSession), name, value)

    return callback
