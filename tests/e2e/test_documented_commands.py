"""Commands of the README and the docs are run here, in the order of the page, in a real grid.

How a page says what must happen:

- a ```bash block is commands; a ```console block is commands after `$ `, with what they show below them;
- a command succeeds, unless it ends in a comment such as `# exits 1`;
- in what is shown, `…` stands for anything (alone on a line: for any number of lines); times, ids, process numbers,
  percentages and the width of gaps may differ; `ana` is whoever runs this, `/home/you/grid` the clone;
- a ```python block stands for itself and may `await` at its top level, as in `python -m asyncio`.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.guides import Guide, page_blocks
from tests.support.project import NEVER_SECONDS, PROJECT, copy_configs, set_rebalance_interval
from tests.support.shell import GRID, Shell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
TOUR = PROJECT / "docs/guide/tour.md"
SHIPPED_INTERVAL_SECONDS = 30
"""For the tour, which waits until the grid borrows something by itself; on no other page it does."""
RUN = ("bash", "console", "python")
SHOWN = ("json", "sql", "text", "yaml", "")

NOT_RUN = {
    "make test\n": "it is this suite; tests/e2e/test_fresh_clone.py shows that a clone sets itself up",
    "grid cluster install && grid cluster start\ngrid status\n"
    "grid run-shared -r cpu -a 2 -n gpu2 --workdir . --fetch 'out/**' python train.py\ngrid cluster stop\n": (
        "it needs other machines: tests/lab/hosts/test_cluster.py and tests/lab/hosts/test_faults.py do it in a lab"
    ),
    "poetry install --only main   # without --only: also the tools of `make`, Ray among them\n"
    "poetry run grid status\n": "tests/e2e/test_installation.py runs it",
    "./grid --version\n": "tests/e2e/test_fresh_clone.py runs it",
    "uv tool install .            # or: pipx install .\ngrid status\n": "tests/e2e/test_installation.py runs both",
    "uv build --wheel             # or: pip wheel --no-deps .\n"
    "python3 -m venv env && env/bin/pip install dist/distributed_grid-*.whl\nenv/bin/grid status\n": (
        "tests/e2e/test_installation.py runs it"
    ),
    **{
        block.text: "tests/e2e/test_seed_001.py runs it"
        for block in Guide("intelligent_sharing").blocks
        if block.heading in ("Basic Usage", "Debug Commands", "Testing")
    },
    **dict.fromkeys(
        [
            *page_blocks("docs/guide/docker-workers.md", "bash"),
            *page_blocks("docs/guide/workers.md", "python"),
            *[block for block in page_blocks("docs/DISTRIBUTED_TESTING_GUIDE.md", "bash") if "testing.yaml" in block],
        ],
        "it needs a Docker engine: tests/e2e/docker/test_docker_workers.py runs it",
    ),
    **dict.fromkeys(
        page_blocks("docs/guide/slurm.md", "bash"),
        "it needs a Slurm cluster: tests/e2e/slurm/test_slurm_workers.py runs it",
    ),
    **dict.fromkeys(
        page_blocks("docs/guide/clouds.md", "bash"), "it needs a cloud: tests/e2e/clouds/test_guide.py runs it"
    ),
}

PYTHON = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), sys.argv[1], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
if code.co_flags & inspect.CO_COROUTINE:
    asyncio.run(eval(code, names))
else:
    exec(code, names)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command, its expected end, and its expected output (None where the page shows none)."""

    words: str
    exit_code: int
    shows: list[str] | None


def blocks_of(page: Path) -> Iterator[Block]:
    language: str | None = None
    begin, lines = 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = re.fullmatch(r"\s*```(\w*)", line)
        if fence and language is None:
            language, begin, lines = fence[1], number, []
        elif fence and language is not None:
            yield Block(page, begin, language, "".join(f"{line}\n" for line in lines))
            language = None
        else:
            lines.append(line)


def commands_of(block: Block) -> list[Command]:
    if block.language == "bash":
        lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
        return [Command(line, _exit_code(line), None) for line in lines]
    found: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], _exit_code(line), []))
        else:
            assert found, f"{block}: a console block begins with `$ `"
            shows = found[-1].shows
            assert shows is not None
            shows.append(line)
    return found


def _exit_code(line: str) -> int:
    said = re.search(r"# exits (\d+)$", line)
    return int(said[1]) if said else 0


class PageReader:
    """A person's clone and home, with one grid for a page."""

    def __init__(self, folder: Path) -> None:
        self.here = folder / "grid"
        home = folder / "home"
        home.mkdir()
        shutil.copytree(PROJECT / "examples", self.here / "examples")
        copy_configs(self.here / "config")
        wrapper = self.here / "grid"
        wrapper.write_text(f'#!/bin/sh\nexec {GRID[0]} "$@"\n')
        wrapper.chmod(0o755)
        self.shell = Shell(home / ".distributed_grid", self.here)
        self.shell.env["HOME"] = str(home)

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
            return
        commands = commands_of(block)
        for command, (code, said) in zip(commands, self._type(block, commands), strict=True):
            context = f"{block}: $ {command.words}\nexit {code}\n{said}"
            assert code == command.exit_code, context
            assert "Traceback" not in said, context
            if command.shows is not None:
                self._compare(command.shows, said.splitlines(), context)

    def _type(self, block: Block, commands: list[Command]) -> list[tuple[int, str]]:
        """All commands of a block in one shell; how each ended and what it showed."""
        mark = "=-=-= command ended: "
        script = "exec 2>&1\n" + "".join(f'{command.words}\nprintf "\\n{mark}%d\\n" "$?"\n' for command in commands)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.here,
            env=self.shell.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=90,
        )
        parts = re.split(rf"\n{mark}(\d+)\n", done.stdout)
        assert len(parts) == 2 * len(commands) + 1, f"{block}: the shell ended early\n{done.stdout}"
        return [(int(code), said) for said, code in zip(parts[:-1:2], parts[1::2], strict=True)]

    def _run_python(self, block: Block) -> None:
        done = subprocess.run(
            [sys.executable, "-c", PYTHON, str(block)],
            cwd=self.here,
            env=self.shell.env,
            input=block.text,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"

    def _compare(self, shown: list[str], said: list[str], context: str) -> None:
        wanted = [_pattern(line) for line in shown if line.strip()]
        rest = [self._anonymous(line) for line in said if line.strip()]
        assert re.fullmatch("".join(wanted), "".join(f"{line}\n" for line in rest)), (
            f"{context}\nThe page shows:\n" + "\n".join(shown) + "\nCompared as:\n" + "\n".join(rest)
        )

    def _anonymous(self, line: str) -> str:
        line = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "ana", line.replace(str(self.here), "/home/you/grid"))
        return _plain(line)


VARYING = (
    (r"\b\d{4}-\d\d-\d\dT[\d:.]+Z", "<moment>"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b|\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"\b[0-9a-f]{8,32}\b", "<id>"),
    (r"\bpid:? +\d+\b", "pid <pid>"),
    (r"\b\d+ %", "<percent>"),
    (r"\b\d+\.\d+ s\b", "<seconds>"),
    (r"\s+", " "),
)


def _plain(line: str) -> str:
    for pattern, word in VARYING:
        line = re.sub(pattern, word, line)
    return line.strip()


def _pattern(line: str) -> str:
    """A regular expression for a line as a page shows it."""
    if line.strip() == "…":
        return r"(?:.*\n)*?"
    return re.escape(_plain(line)).replace("…", ".*") + r"\n"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PageReader]:
    reader = PageReader(tmp_path)
    yield reader
    if reader.shell.state_dir.exists():
        reader.shell.close()


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in RUN and block.text not in NOT_RUN]


@pytest.mark.parametrize("page", [*filter(to_run, PAGES)], ids=lambda page: str(page.relative_to(PROJECT)))
def test_documented_commands_of_a_page_work(page: Path, reader: PageReader) -> None:
    if page == TOUR:
        set_rebalance_interval(reader.here / "config", SHIPPED_INTERVAL_SECONDS, was=NEVER_SECONDS)
    if page.parent.name == "internals":  # for contributors: typed in a clone, where the tests can be imported
        reader.shell.env["PYTHONPATH"] = str(PROJECT)
    for block in to_run(page):
        reader.run(block)


def test_no_block_escapes_by_its_language() -> None:
    odd = [str(block) for page in PAGES for block in blocks_of(page) if block.language not in (*RUN, *SHOWN)]
    assert odd == []


def test_unrun_commands_exist_and_are_tested_elsewhere() -> None:
    texts = {block.text for page in PAGES for block in blocks_of(page)}
    assert texts >= NOT_RUN.keys()
    for reason in NOT_RUN.values():
        for name in re.findall(r"tests/\S+\.py", reason):
            assert (PROJECT / name).is_file()


def test_a_page_that_lies_is_found_out(reader: PageReader) -> None:
    page = PROJECT / "README.md"
    for text, lie in (("$ echo 1\n2\n", "shows"), ("$ false\n", "exit 1"), ("$ true   # exits 3\n", "exit 0")):
        with pytest.raises(AssertionError, match=lie):
            reader.run(Block(page, 1, "console", text))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        reader.run(Block(page, 1, "python", "1 / 0\n"))
    reader.run(Block(page, 1, "console", "$ seq 5\n1\n…\n5\n$ false   # exits 1\n$ date +%H:%M:%S\n00:00:00\n"))
