"""Packages of the agent: packed once for many that ask, refused with a reason, and what they have in them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import platform
import zipfile
from pathlib import Path

import pytest

from distributed_grid.adapters.node.installation import Wheel, zip_files
from distributed_grid.api.requests import FetchAgentPackage
from distributed_grid.errors import GridError, Refused
from distributed_grid.server.workers.agent_packages import AgentPackage, AgentPackages, machine_facts, merge_wheels


def own_machine(python: str = platform.python_version()) -> FetchAgentPackage:
    _, version = platform.libc_ver()
    return FetchAgentPackage("token", python, platform.machine(), "glibc", version)


def test_many_machines_at_once_get_one_and_the_same_package(tmp_path: Path) -> None:
    async def scenario() -> None:
        packages = AgentPackages(tmp_path)
        found = await asyncio.gather(*(packages.package(own_machine()) for _ in range(200)))
        assert all(one is found[0] for one in found)
        again = await packages.package(own_machine())
        assert again is found[0]
        assert hashlib.sha256(found[0].data).digest() == found[0].sha256
        with zipfile.ZipFile(io.BytesIO(found[0].data)) as archive:
            names = archive.namelist()
        assert "distributed_grid/agent/__main__.py" in names
        assert "psutil/__init__.py" in names
        await packages.close()

    asyncio.run(scenario())


def test_the_loop_goes_on_while_a_package_is_packed(tmp_path: Path) -> None:
    async def scenario() -> None:
        packages = AgentPackages(tmp_path)
        packing = asyncio.create_task(packages.package(own_machine()))
        turns = 0
        while not packing.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert turns > 5, "somebody else had the loop meanwhile"
        assert isinstance(await packing, AgentPackage)

    asyncio.run(scenario())


def test_whoever_hangs_up_does_not_stop_the_packing_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        packages = AgentPackages(tmp_path)
        first = asyncio.create_task(packages.package(own_machine()))
        second = asyncio.create_task(packages.package(own_machine()))
        await asyncio.sleep(0.01)
        first.cancel()
        assert isinstance(await second, AgentPackage)

    asyncio.run(scenario())


@pytest.mark.parametrize("python", ["3.10.12", "2.7.18", "3.99.0", "4.0"])
def test_a_python_for_which_there_is_no_agent_is_refused(python: str) -> None:
    with pytest.raises(Refused, match=f"the machine has Python {python}, and the agent needs Python 3.11"):
        machine_facts(own_machine(python))


def test_what_cannot_be_had_is_looked_for_once_however_many_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        index = tmp_path / "pip.conf"
        index.write_text(f"[global]\nindex-url = file://{tmp_path}/nothing\ntimeout = 1\nretries = 0\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(index))
        packages = AgentPackages(tmp_path / "wheels")
        asked = [packages.package(own_machine("3.29.0")) for _ in range(5)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, GridError) for one in outcomes)
        assert "there is no agent for this machine: " in str(outcomes[0])
        assert " for Python 3.29 on " in str(outcomes[0])
        with pytest.raises(GridError) as again:
            await packages.package(own_machine("3.29.0"))
        assert again.value is outcomes[0]

    asyncio.run(scenario())


def test_the_same_wheels_make_the_same_archive_with_the_files_where_python_finds_them() -> None:
    wheel = Wheel(
        "a-1-py3-none-any.whl", zip_files({"a/b.py": b"1", "a-1.data/purelib/c.py": b"2", "a-1.data/scripts/d": b"3"})
    )
    merged = merge_wheels([wheel])
    assert merged == merge_wheels([wheel])
    with zipfile.ZipFile(io.BytesIO(merged)) as archive:
        assert archive.namelist() == ["a/b.py", "c.py"]
