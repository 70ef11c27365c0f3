"""The checkpoint directory of a job with real commands: laid out before the start, and told of at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.files.attempt_files import StoredWorkDirs
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.jobs import Ending
from distributed_grid.trees.content_store import ContentStore, ContentStores
from distributed_grid.trees.manifest import encode
from distributed_grid.trees.scan import scan_directory
from tests.component.agent.execution.test_checkpoints import a_start
from tests.component.agent.execution.test_refusals import Control, until

pytestmark = pytest.mark.e2e
Scenario = Callable[[Agent, Control], Awaitable[None]]


class Place:
    """The machine of the control plane: its stores, and an agent that lays out what is in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = folder / "jobs"
        self.stores = [ContentStore(folder / name) for name in ("content", "checkpoints")]

    def stored(self, which: int, **files: str) -> str:
        """The digest of a tree of these files in a store."""
        tree = self.folder / f"tree{which}"
        tree.mkdir()
        for name, text in files.items():
            (tree / name).write_text(text)
        return self.stores[which].add(encode(scan_directory(tree, self.stores[which]).manifest))

    def play(self, scenario: Scenario) -> None:
        async def whole() -> None:
            control, dirs = Control(), StoredWorkDirs(ContentStores(*self.stores))
            agent = Agent(("gpu1",), self.jobs, UsageMeter(MachineProbe()), control, workdirs=lambda send: dirs)
            await agent.start()
            try:
                async with asyncio.timeout(30):
                    await scenario(agent, control)
            finally:
                await agent.stop()

        asyncio.run(whole())

    def out(self, lease: str) -> str:
        return (self.jobs / lease / "stdout").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_it_is_empty_at_first_and_what_is_left_there_is_told(place: Place) -> None:
    async def scenario(agent: Agent, control: Control) -> None:
        agent.send(a_start('cd "$GRID_CHECKPOINT_DIR" && stat -c %a . && ls -A | wc -l'))
        agent.send(a_start('echo 1 > "$GRID_CHECKPOINT_DIR/.hidden"', lease="b.1"))
        agent.send(a_start('rmdir "$GRID_CHECKPOINT_DIR"', lease="c.1"))
        await until(lambda: len(control.ends()) == 3)
        assert place.out("a.1") == "700\n0\n"
        told = {end.lease_id: end.has_checkpoint for end in control.ends()}
        assert told == {"a.1": False, "b.1": True, "c.1": True}, "of one that is not there nobody knows"

    place.play(scenario)


def test_an_attempt_finds_its_checkpoint_and_in_its_own_directory_its_files(place: Place) -> None:
    mine, saved = place.stored(0, data="input\n"), place.stored(1, step="7\n")

    async def scenario(agent: Agent, control: Control) -> None:
        order = a_start('cat data "$GRID_CHECKPOINT_DIR/step"; echo 8 > "$GRID_CHECKPOINT_DIR/step"')
        agent.send(replace(order, command=replace(order.command, workdir=mine), checkpoint=saved))
        await until(control.ends)
        assert place.out("a.1") == "input\n7\n"
        with place.stores[1].open(place.stores[1].add(b"7\n")) as file:
            assert file.read() == b"7\n", "the job has written into its own copy"

    place.play(scenario)


def test_in_the_callers_directory_nothing_is_laid_out(place: Place) -> None:
    mine, saved = place.stored(0, data="input\n"), place.stored(1, step="7\n")
    here = place.folder / "here"
    here.mkdir()

    async def scenario(agent: Agent, control: Control) -> None:
        order = a_start('ls; ls "$GRID_JOB_DIR" "$GRID_CHECKPOINT_DIR"', cwd=str(here))
        agent.send(replace(order, command=replace(order.command, workdir=mine), checkpoint=saved))
        await until(control.ends)
        folder = place.jobs / "a.1"
        assert place.out("a.1") == f"{folder}/checkpoints:\nstep\n\n{folder}/work:\n"

    place.play(scenario)


def test_what_is_not_in_any_store_is_refused_for_good(place: Place) -> None:
    async def scenario(agent: Agent, control: Control) -> None:
        agent.send(replace(a_start("true"), checkpoint="0" * 64))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.NEVER_STARTED

    place.play(scenario)


def test_trouble_of_the_machine_costs_no_checkpoint(place: Place) -> None:
    saved = place.stored(1, step="7\n")

    async def scenario(agent: Agent, control: Control) -> None:
        (place.jobs / "a.1").write_text("in the way")
        agent.send(replace(a_start("true"), checkpoint=saved))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.RECLAIMED
        os.unlink(place.jobs / "a.1")
        shutil.rmtree(place.jobs / ".control" / "a.1", ignore_errors=True)

    place.play(scenario)
