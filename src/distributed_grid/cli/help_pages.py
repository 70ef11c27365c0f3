"""Help of commands, messages about wrong command lines, and completion in shells; made from the declarations."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from distributed_grid.cli.command_line import CommandSpec, FloatRange, Group, LazyGroup, Option, Parameter, WordChoice

MAX_WIDTH, MIN_WIDTH = 100, 50
MAX_FIRST_COLUMN = 30
TYPE_NAMES: dict[Any, str] = {str: "TEXT", int: "INTEGER", float: "FLOAT"}
COMPLETION_SCRIPTS = {
    "bash": """\
_grid_completion() {
    local IFS=$'\\n' line
    COMPREPLY=()
    for line in $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _GRID_COMPLETE=bash_complete $1); do
        COMPREPLY+=("${line#*,}")
    done
}
complete -o nosort -o default -F _grid_completion grid
""",
    "zsh": """\
#compdef grid
_grid_completion() {
    local -a lines described
    lines=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) _GRID_COMPLETE=zsh_complete grid)}")
    for kind name text in ${lines}; do described+=("${name//:/\\\\:}:${text}"); done
    _describe -V unsorted described
}
compdef _grid_completion grid
""",
    "fish": """\
function _grid_completion
    for line in (env _GRID_COMPLETE=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) grid)
        string replace -r '^plain,' '' -- $line
    end
end
complete --no-files --command grid --arguments "(_grid_completion)"
""",
}
"""What `eval "$(_GRID_COMPLETE=bash_source grid)"` gets; the functions ask with `bash_complete`."""


def help_page(path: Sequence[CommandSpec]) -> str:
    command, width = path[-1], _width()
    lines = [usage_line(path), ""]
    for paragraph in inspect.cleandoc(command.function.__doc__ or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            lines += [f"  {line}".rstrip() for line in paragraph.splitlines()[1:]]
        else:
            lines.append(textwrap.fill(paragraph, width, initial_indent="  ", subsequent_indent="  "))
        lines.append("")
    lines += ["Options:", *_definitions([_option_row(option) for option in command.options], width)]
    if isinstance(command, Group):
        rows = list(command_rows(command, width))
        lines += ["", "Commands:", *_definitions(rows, width)]
    return "\n".join(lines)


def usage_line(path: Sequence[CommandSpec]) -> str:
    start = f"Usage: {' '.join(command.name for command in path)} "
    last = path[-1]
    rest = ["COMMAND [ARGS]..."] if isinstance(last, Group) else [argument.metavar for argument in last.arguments]
    return textwrap.fill(" ".join(["[OPTIONS]", *rest]), _width(), initial_indent=start, subsequent_indent=" " * 8)


def usage_message(path: Sequence[CommandSpec], mistake: str) -> str:
    names = " ".join(command.name for command in path)
    return f"{usage_line(path)}\nTry '{names} --help' for help.\n\nError: {mistake}"


def command_rows(group: Group, width: int) -> Iterator[tuple[str, str]]:
    room = width - 6 - max(map(len, group.names))
    for name in group.names:
        if isinstance(group, LazyGroup):
            yield name, group.table[name][2]
        elif (command := group.find(name)) is not None:
            paragraph = inspect.cleandoc(command.function.__doc__ or "").partition("\n\n")[0]
            sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]
            yield name, textwrap.shorten(sentence, room, placeholder="...")


def _width() -> int:
    return max(min(shutil.get_terminal_size().columns, MAX_WIDTH) - 2, MIN_WIDTH)


def _definitions(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Two columns; a long name has its text on the next lines."""
    column = min(max(len(name) for name, _ in rows), MAX_FIRST_COLUMN) + 2
    for name, text in rows:
        lines = textwrap.wrap(text, max(width - column - 2, 10))
        if lines and len(name) <= column - 2:
            yield f"  {name:{column}}{lines.pop(0)}"
        else:
            yield f"  {name}"
        yield from (" " * (column + 2) + line for line in lines)


def _option_row(option: Option) -> tuple[str, str]:
    """Spelling and help of an option."""
    kind, extra = option.kind, [f"default: {option.default}"] if option.show_default else []
    if isinstance(kind, FloatRange):
        metavar = kind.name.upper()
        extra.append(kind.bounds)
    elif isinstance(kind, WordChoice):
        metavar = f"[{'|'.join(kind.words)}]"
    else:
        metavar = TYPE_NAMES.get(kind, "")
    extra += ["required"] if option.required else []
    on = [word for word, value in option.spellings.items() if value is not False]
    off = [word for word, value in option.spellings.items() if value is False]
    names = sorted(on, key=lambda word: len(word) - len(word.lstrip("-")))
    spelling = " / ".join([", ".join(names), *off])
    if True not in option.spellings.values():
        spelling += f" {option.metavar or metavar}"
    return spelling, "  ".join(part for part in (option.help, f"[{'; '.join(extra)}]" if extra else "") if part)


def completion(root: Group, instruction: str) -> str:
    """The answer to a shell that completes a command line: its script, or the words that fit."""
    shell, _, action = instruction.partition("_")
    if action == "source":
        return COMPLETION_SCRIPTS.get(shell, "")
    words = shlex.split(os.environ.get("COMP_WORDS", ""))
    place = os.environ.get("COMP_CWORD", "")
    if shell == "fish":
        begun = place
        words = words[1:-1] if words and begun and words[-1] == begun else words[1:]
    else:
        at = int(place) if place.isdecimal() else len(words)
        begun, words = words[at] if at < len(words) else "", words[1:at]
    lines = {"bash": "plain,{0}", "zsh": "plain\n{0}\n{1}", "fish": "plain,{0}\t{1}"}
    return "\n".join(lines[shell].format(*row) for row in _fitting_words(root, words, begun)) if shell in lines else ""


def _fitting_words(root: Group, words: Sequence[str], begun: str) -> Iterable[tuple[str, str]]:
    """The commands, options or choices that begin with these letters, each with its help."""
    command: CommandSpec = root
    awaiting: Parameter | None = None
    for word in words:
        spelled = {spelling: option for option in command.options for spelling in option.spellings}
        if awaiting is not None:
            awaiting = None
        elif word in spelled:
            awaiting = spelled[word] if spelled[word].spellings[word] is None else None
        elif isinstance(command, Group) and (inner := command.find(word)) is not None:
            command = inner
    rows: list[tuple[str, str]] = []
    if awaiting is not None:
        rows = [(word, "") for word in awaiting.kind.words] if isinstance(awaiting.kind, WordChoice) else []
    elif begun.startswith("-"):
        rows = [(word, option.help) for option in command.options for word in option.spellings]
    elif isinstance(command, Group):
        rows = list(command_rows(command, MAX_WIDTH))
    return [row for row in rows if row[0].startswith(begun)]
