"""Commands declared as data, and the parser of correct command lines.

`parse` understands every correct command line in its usual spelling, and nothing else: help, completion, mistakes and
rare spellings (`-ofile`) raise `NotUnderstood` and are left to click, which is made from the same declarations
(`click_commands.py`). So a correct command does not import click, which takes longer than all the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

Settings = dict[str, Any]


class NotUnderstood(Exception):
    """A command line that only click can answer."""


class FloatRange:
    """A number within bounds, as the type of a parameter."""

    number: type[float] = float

    def __init__(
        self, at_least: float | None = None, at_most: float | None = None, *, above: float | None = None
    ) -> None:
        self.at_least, self.at_most, self.above = at_least, at_most, above

    def __call__(self, text: str) -> float:
        value = self.number(text)
        if (
            (self.at_least is not None and value < self.at_least)
            or (self.at_most is not None and value > self.at_most)
            or (self.above is not None and value <= self.above)
        ):
            raise ValueError(f"{value} is out of range")
        return value


class IntRange(FloatRange):
    """A whole number within bounds, as the type of a parameter."""

    number = int


class WordChoice:
    """One of some words, as the type of a parameter."""

    def __init__(self, words: Sequence[str], *, case_sensitive: bool = True) -> None:
        self.words, self.case_sensitive = words, case_sensitive

    def __call__(self, text: str) -> str:
        for word in self.words:
            if word == text or (not self.case_sensitive and word.casefold() == text.casefold()):
                return word
        raise ValueError(f"no such choice: {text}")


class Parameter:
    """An option or an argument; the settings have the names and meanings of click's."""

    def __init__(self, words: tuple[str, ...], settings: Settings) -> None:
        self.words = words
        self.settings = settings
        self.type: Callable[[str], Any] = settings.get("type", str)
        self.name = next((word for word in words if not word.startswith("-")), "")

    @property
    def default(self) -> Any:
        """The value of a parameter that is not given; a text is converted like one that is given."""
        default = self.settings.get("default")
        return self.type(default) if isinstance(default, str) else default


class Option(Parameter):
    """An option; `--on/--off` is a flag with two spellings."""

    def __init__(self, *words: str, **settings: Any) -> None:
        super().__init__(words, settings)
        self.multiple: bool = settings.get("multiple", False)
        is_flag: bool = settings.get("is_flag", False)
        self.spellings: dict[str, bool | None] = {}
        """Every spelling, with what it means alone; None: a value follows it."""
        for word in words:
            on, slash, off = word.partition("/")
            if on.startswith("-"):
                self.spellings[on] = True if is_flag or slash else None
                self.spellings |= {off: False} if slash else {}
        self.name = self.name or next(word[2:] for word in self.spellings if word.startswith("--")).replace("-", "_")

    @property
    def default(self) -> Any:
        if self.settings.get("required"):
            raise NotUnderstood
        return () if self.multiple else False if self.settings.get("is_flag") else super().default


class Argument(Parameter):
    """An argument; with `nargs=-1` it takes all that are left."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__((name,), settings)
        self.takes_all: bool = settings.get("nargs") == -1
        self.required: bool = settings.get("required", not self.takes_all)


GLOBAL_OPTIONS = (
    Option(
        "-c",
        "--config",
        metavar="PATH",
        help="Cluster file; none: this machine alone (default: $GRID_CONFIG, else that of the running daemon, else the "
        "usual places).",
    ),
    Option(
        "--state-dir",
        "state_dir_option",
        metavar="DIR",
        help="State directory of the grid (default: $GRID_STATE_DIR, else ~/.distributed_grid).",
    ),
    Option("--json", is_flag=True, help="Answer in JSON."),
)
"""Accepted before and after every subcommand; each is an attribute of the session."""


class CommandSpec:
    """A command: its parameters, and the function that takes the session and their values."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        parameters: Iterable[Parameter] = (),
        *,
        interspersed: bool = True,
    ) -> None:
        self.name = name
        self.function = function
        self.parameters = (*parameters, *GLOBAL_OPTIONS)
        self.interspersed = interspersed
        """Whether options may follow the first argument; else they belong to it."""


class Group(CommandSpec):
    """A command with subcommands."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name, function, interspersed=False)
        self.commands: dict[str, CommandSpec] = {}

    def find(self, name: str) -> CommandSpec | None:
        """The subcommand with this name."""
        return self.commands.get(name)

    def add(self, command: CommandSpec) -> None:
        self.commands[command.name] = command

    def command(
        self, *parameters: Parameter, name: str = "", interspersed: bool = True
    ) -> Callable[[Callable[..., Any]], CommandSpec]:
        """Declare a function as a subcommand."""

        def declare(function: Callable[..., Any]) -> CommandSpec:
            made = command(*parameters, name=name, interspersed=interspersed)(function)
            self.add(made)
            return made

        return declare


class LazyGroup(Group):
    """A group whose commands are imported when they are used: name → (file, attribute, one line of help)."""

    def __init__(self, name: str, function: Callable[..., Any], table: dict[str, tuple[str, str, str]]) -> None:
        super().__init__(name, function)
        self.table = table

    def find(self, name: str) -> CommandSpec | None:
        if name not in self.table:
            return None
        module, attribute, _ = self.table[name]
        found: CommandSpec = getattr(import_module(f"distributed_grid.cli.commands.{module}"), attribute)
        return found


def command(
    *parameters: Parameter, name: str = "", interspersed: bool = True
) -> Callable[[Callable[..., Any]], CommandSpec]:
    """Declare a function as a command; its docstring is the help."""

    def declare(function: Callable[..., Any]) -> CommandSpec:
        return CommandSpec(name or _name_of(function), function, parameters, interspersed=interspersed)

    return declare


def group(name: str = "") -> Callable[[Callable[[], None]], Group]:
    """Declare a group of commands; the docstring of the function, which does nothing, is the help."""
    return lambda function: Group(name or _name_of(function), function)


def _name_of(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", "-")


def parse(root: Group, words: Sequence[str]) -> tuple[CommandSpec, Settings, Settings]:
    """The command that is meant, its options and the global ones; NotUnderstood for anything but a correct line."""
    command: CommandSpec | None = root
    rest, given = list(words), Settings()
    while isinstance(command, Group):
        options, rest = _parse_options(command, rest)
        given |= options
        command = command.find(rest.pop(0)) if rest else None
    if command is None:
        raise NotUnderstood
    options, rest = _parse_options(command, rest)
    given |= options
    values = _parse_arguments(command, rest)
    for one in command.parameters:
        if isinstance(one, Option):
            values[one.name] = given[one.name] if one.name in given else one.default  # noqa: SIM401, it may raise
    return command, values, {one.name: values.pop(one.name) for one in GLOBAL_OPTIONS}


def _parse_options(command: CommandSpec, words: list[str]) -> tuple[Settings, list[str]]:
    """The options that are given, and the words that are none."""
    spelled = {word: one for one in command.parameters if isinstance(one, Option) for word in one.spellings}
    given, rest = Settings(), list[str]()
    ahead = iter(words)
    for word in ahead:
        if word == "--":
            return given, [*rest, *ahead]
        if not word.startswith("-") or word == "-":
            rest.append(word)
            if not command.interspersed:
                return given, [*rest, *ahead]
            continue
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        one = spelled.get(name)
        if one is None:
            raise NotUnderstood
        value: Any = one.spellings[name]
        if value is None:
            value = _convert(one, text if equals else next(ahead, None))
        elif equals:
            raise NotUnderstood
        given[one.name] = (*given.get(one.name, ()), value) if one.multiple else value
    return given, rest


def _parse_arguments(command: CommandSpec, words: list[str]) -> Settings:
    values = Settings()
    for one in command.parameters:
        if not isinstance(one, Argument):
            continue
        if one.required and not words:
            raise NotUnderstood
        if one.takes_all:
            values[one.name], words = tuple(_convert(one, word) for word in words), []
        else:
            values[one.name] = _convert(one, words.pop(0)) if words else one.default
    if words:
        raise NotUnderstood
    return values


def _convert(parameter: Parameter, text: str | None) -> Any:
    if text is None:
        raise NotUnderstood
    try:
        return parameter.type(text)
    except Exception:  # click tries again, and says what is wrong
        raise NotUnderstood from None
