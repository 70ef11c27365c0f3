"""Grammar of the command line: commands declared as data, and the parser of command lines.

The pages of help, the messages about mistakes in full, and completion are in `help_pages.py`, which no correct command
loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

Values = dict[str, Any]
_NOUNS: dict[Any, str] = {int: "integer", float: "float"}


class FloatRange:
    number: type[float] = float
    name = "float range"

    def __init__(
        self, at_least: float | None = None, at_most: float | None = None, *, above: float | None = None
    ) -> None:
        self.at_least, self.at_most, self.above = at_least, at_most, above

    def __call__(self, text: str) -> float:
        try:
            value = self.number(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a valid {self.name}.") from None
        if (
            (self.at_least is not None and value < self.at_least)
            or (self.at_most is not None and value > self.at_most)
            or (self.above is not None and value <= self.above)
        ):
            raise ValueError(f"{value} is not in the range {self.bounds}.")
        return value

    @property
    def bounds(self) -> str:
        if self.above is not None:
            return f"x>{self.above}"
        if self.at_most is None:
            return f"x>={self.at_least}"
        return f"{self.at_least}<=x<={self.at_most}"


class IntRange(FloatRange):
    number = int
    name = "integer range"


class WordChoice:
    def __init__(self, words: Sequence[str], *, case_sensitive: bool = True) -> None:
        self.words, self.case_sensitive = words, case_sensitive

    def __call__(self, text: str) -> str:
        for word in self.words:
            if word == text or (not self.case_sensitive and word.casefold() == text.casefold()):
                return word
        raise ValueError(f"{text!r} is not one of {', '.join(map(repr, self.words))}.")


class Parameter:
    def __init__(
        self,
        name: str,
        kind: Callable[[str], Any],
        default: Any,
        *,
        metavar: str,
        required: bool,
        many: bool,
        description: str,
    ) -> None:
        self.name = name
        self.kind = kind
        self.metavar = metavar
        self.required = required
        self.many = many
        """The value is a tuple: the option may be given several times, the argument takes all words that are left."""
        self.help = description
        self.default = kind(default) if isinstance(default, str) else default

    @property
    def label(self) -> str:
        """The parameter's name in messages about mistakes."""
        raise NotImplementedError

    def convert(self, text: str) -> Any:
        """The value that a word means; UsageError where it means none."""
        try:
            return self.kind(text)
        except ValueError as mistake:
            reason = f"{text!r} is not a valid {_NOUNS[self.kind]}." if self.kind in _NOUNS else str(mistake)
            raise UsageError(f"Invalid value for {self.label}: {reason}") from None


class Option(Parameter):
    """An option; `--on/--off` is a flag with two spellings."""

    def __init__(
        self,
        *words: str,
        type: Callable[[str], Any] = str,  # noqa: A002, reads well in declarations
        default: Any = None,
        is_flag: bool = False,
        multiple: bool = False,
        required: bool = False,
        show_default: bool = False,
        metavar: str = "",
        help: str = "",  # noqa: A002
    ) -> None:
        self.is_flag = is_flag
        self.show_default = show_default
        self.spellings: dict[str, bool | None] = {}  # every spelling, with its value; None: a value follows it
        for word in words:
            on, slash, off = word.partition("/")
            if on.startswith("-"):
                self.spellings[on] = True if is_flag or slash else None
                self.spellings |= {off: False} if slash else {}
        longest = next((word[2:].replace("-", "_") for word in self.spellings if word.startswith("--")), "")
        name = next((word for word in words if not word.startswith("-")), longest)
        default = () if multiple else False if is_flag else default
        super().__init__(name, type, default, metavar=metavar, required=required, many=multiple, description=help)

    @property
    def label(self) -> str:
        return " / ".join(repr(word) for word, value in self.spellings.items() if value is not False)


class Argument(Parameter):
    """An argument; with `nargs=-1` it takes all that are left."""

    def __init__(
        self,
        name: str,
        *,
        type: Callable[[str], Any] = str,  # noqa: A002
        nargs: int = 1,
        required: bool | None = None,
        metavar: str = "",
    ) -> None:
        many = nargs == -1
        is_required = not many if required is None else required
        shown = metavar or (name.upper() if is_required else f"[{name.upper()}]") + ("..." if many else "")
        super().__init__(
            name, type, () if many else None, metavar=shown, required=is_required, many=many, description=""
        )

    @property
    def label(self) -> str:
        return repr(self.metavar)


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
VERSION = Option("--version", is_flag=True, help="Show the version and exit.")
HELP = Option("-h", "--help", is_flag=True, help="Show this message and exit.")


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
        self.interspersed = interspersed  # options may follow the first argument; else they belong to it
        self.parameters = (*parameters, *GLOBAL_OPTIONS)

    @property
    def options(self) -> list[Option]:
        return [*(parameter for parameter in self.parameters if isinstance(parameter, Option)), HELP]

    @property
    def arguments(self) -> list[Argument]:
        return [parameter for parameter in self.parameters if isinstance(parameter, Argument)]


class Group(CommandSpec):
    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name, function, interspersed=False)
        self.commands: dict[str, CommandSpec] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self.commands)

    def find(self, name: str) -> CommandSpec | None:
        return self.commands.get(name)

    def add(self, command: CommandSpec) -> None:
        self.commands[command.name] = command

    def command(
        self, *parameters: Parameter, name: str = "", interspersed: bool = True
    ) -> Callable[[Callable[..., Any]], CommandSpec]:
        def declare(function: Callable[..., Any]) -> CommandSpec:
            made = command(*parameters, name=name, interspersed=interspersed)(function)
            self.add(made)
            return made

        return declare


class LazyGroup(Group):
    """The root; its commands are imported when they are used: name → (file, attribute, one line of help)."""

    def __init__(self, name: str, function: Callable[..., Any], table: dict[str, tuple[str, str, str]]) -> None:
        super().__init__(name, function)
        self.parameters = (*GLOBAL_OPTIONS, VERSION)
        self.table = table

    @property
    def names(self) -> list[str]:
        return list(self.table)

    def find(self, name: str) -> CommandSpec | None:
        if name not in self.table:
            return None
        module, attribute, _ = self.table[name]
        command: CommandSpec = getattr(import_module(f"distributed_grid.cli.commands.{module}"), attribute)
        return command


def command(
    *parameters: Parameter, name: str = "", interspersed: bool = True
) -> Callable[[Callable[..., Any]], CommandSpec]:
    """Declare a function as a command; its docstring is the help."""
    return lambda function: CommandSpec(
        name or function.__name__.replace("_", "-"), function, parameters, interspersed=interspersed
    )


def group(name: str = "") -> Callable[[Callable[[], None]], Group]:
    """Declare a group of commands; the docstring of the function, which does nothing, is the help."""
    return lambda function: Group(name or function.__name__.replace("_", "-"), function)


class UsageError(Exception):
    """A command line that is wrong; `path` are the commands down to the one with the mistake."""

    path: Sequence[CommandSpec] = ()


class HelpRequest(Exception):
    """A command line that asks for the help of the last command of the path, or names a group only."""

    def __init__(self, path: Sequence[CommandSpec], *, is_mistake: bool = False) -> None:
        super().__init__()
        self.path, self.is_mistake = path, is_mistake


class VersionRequest(Exception):
    """A command line that asks for the version."""


def parse(root: Group, words: Sequence[str]) -> tuple[CommandSpec, Values, Values]:
    """The command that is meant, the values of its parameters, and the global options that were given."""
    path: list[CommandSpec] = [root]
    global_options: Values = {}
    rest = list(words)
    try:
        while True:
            command, given_words = path[-1], rest
            given, rest = _read_options(command, rest)
            if HELP in given:
                raise HelpRequest(path)
            if VERSION in given:
                raise VersionRequest
            values: Values = {}
            for option, texts in given.items():
                counted = texts if option.many else texts[-1:]
                converted = [option.convert(text) if isinstance(text, str) else text for text in counted]
                values[option.name] = tuple(converted) if option.many else converted[-1]
            global_options |= {
                option.name: values.pop(option.name) for option in GLOBAL_OPTIONS if option.name in values
            }
            if not isinstance(command, Group):
                return command, _fill(command, values, rest), global_options
            if not given_words:
                raise HelpRequest(path, is_mistake=True)
            if not rest:
                raise UsageError("Missing command.")
            inner = command.find(rest[0])
            if inner is None:
                from difflib import get_close_matches

                near = get_close_matches(rest[0], command.names, 1)
                raise UsageError(f"no command {rest[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            del rest[0]
            path.append(inner)
    except UsageError as mistake:
        mistake.path = path
        raise


def _read_options(command: CommandSpec, words: list[str]) -> tuple[dict[Option, list[str | bool]], list[str]]:
    """The options that are given, with their values as they were written, and the other words."""
    spelled = {word: option for option in command.options for word in option.spellings}
    given: dict[Option, list[str | bool]] = {}
    others: list[str] = []
    ahead = list(reversed(words))
    while ahead:
        word = ahead.pop()
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            others.append(word)
            if not command.interspersed:
                break
            continue
        name, equals, text = word.partition("=") if word.startswith("--") else (word[:2], "", "")
        option = spelled.get(name)
        if option is None:
            from difflib import get_close_matches

            long_ones = [spelling for spelling in spelled if spelling.startswith("--")]
            near = sorted(get_close_matches(name, long_ones)) if name.startswith("--") else []
            hint = f" (Did you mean one of: {', '.join(map(repr, near))}?)" if near else ""
            hint = f" Did you mean {near[0]!r}?" if len(near) == 1 else hint
            raise UsageError(f"No such option {name!r}." + hint)
        value: str | bool | None = option.spellings[name]
        if value is not None:
            if equals:
                raise UsageError(f"Option {name!r} does not take a value.")
            if not word.startswith("--") and len(word) > 2:  # several short flags in one word
                if word[2] == "-":
                    raise UsageError("No such option '--'.")
                ahead.append(f"-{word[2:]}")
        elif equals or (not word.startswith("--") and len(word) > 2):
            value = text if equals else word[2:]
        elif ahead:
            value = ahead.pop()
        else:
            raise UsageError(f"Option {name!r} requires an argument.")
        given.setdefault(option, []).append(value)
    return given, others + ahead[::-1]


def _fill(command: CommandSpec, values: Values, words: list[str]) -> Values:
    """The values of all parameters but the global ones: those given, those of the words, and the defaults."""
    for argument in command.arguments:
        if argument.required and not words:
            raise UsageError(f"Missing argument {argument.label}.")
        if argument.many:
            values[argument.name], words = tuple(map(argument.convert, words)), []
        elif words:
            values[argument.name], words = argument.convert(words[0]), words[1:]
    for parameter in command.parameters:
        if parameter.name not in values and parameter not in GLOBAL_OPTIONS:
            if parameter.required:
                raise UsageError(f"Missing option {parameter.label}.")
            values[parameter.name] = parameter.default
    if words:
        raise UsageError(f"Got unexpected extra argument{'' if len(words) == 1 else 's'} ({' '.join(words)})")
    return values
