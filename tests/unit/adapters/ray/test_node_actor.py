"""The actor as it is, without Ray around it: a class of its own that needs nothing of ours."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import ast
import asyncio
import json
import sys
from pathlib import Path

import pytest

from distributed_grid.adapters.node.script_session import SCRIPT, encode_request, parse_answer
from distributed_grid.adapters.ray import node_actor
from distributed_grid.adapters.ray.node_actor import CHUNK_BYTES, NodeActor

ECHO = b"import sys\nfor line in f:\n    sys.stdout.write(line.decode()); sys.stdout.flush()\n"
TO_STDERR = b"import sys; sys.exit('it broke')"


async def make_actor() -> NodeActor:
    actor = NodeActor("build")
    await actor.acquire("grid", "me")
    return actor


def test_it_imports_the_standard_library_only():
    tree = ast.parse(Path(node_actor.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_it_runs_the_very_script_that_ssh_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    async def story():
        actor = await make_actor()
        talk = await actor.open("me", SCRIPT.read_bytes())
        assert await actor.write("me", talk, encode_request("inspect", "grid", "n1", {}))
        line = await actor.read("me", talk)
        await actor.close("me", talk)
        return parse_answer(line, lambda step: None)

    seen = asyncio.run(story())
    assert seen["python"].startswith("3.")
    assert seen["versions"] == []


def test_a_script_gets_nothing_of_rays_environment(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    async def story():
        actor = await make_actor()
        talk = await actor.open("me", b"import json, os; print(json.dumps(dict(os.environ)))")
        said = await actor.read("me", talk)
        await actor.close("me", talk)
        return json.loads(said)

    found = asyncio.run(story())
    assert "PATH" in found
    assert not [name for name in found if name.startswith(("RAY_", "CUDA_"))]


def test_what_a_script_complains_about_is_told_when_it_is_closed():
    async def story():
        actor = await make_actor()
        talk = await actor.open("me", TO_STDERR)
        assert await actor.read("me", talk) == b""
        return await actor.close("me", talk)

    assert asyncio.run(story()).strip() == "it broke"


def test_a_connection_to_its_socket_becomes_a_stream_both_ways(tmp_path):
    async def story():
        actor, path = await make_actor(), str(tmp_path / "agent.sock")
        await actor.listen("me", path)
        reader, writer = await asyncio.open_unix_connection(path)
        stream = await actor.accept("me")
        writer.write(b"up")
        assert await actor.read("me", stream) == b"up"
        assert await actor.write("me", stream, b"down")
        assert await reader.readexactly(4) == b"down"
        writer.close()
        assert await actor.read("me", stream) == b""
        await actor.close("me", stream)
        assert await actor.read("me", stream) == b""
        assert not await actor.write("me", stream, b"too late")
        await actor.acquire("grid", "nobody")
        return Path(path).stat().st_mode & 0o777

    assert asyncio.run(story()) == 0o600


def test_it_takes_no_more_from_an_agent_than_somebody_reads(tmp_path):
    async def story():
        actor, path = await make_actor(), str(tmp_path / "agent.sock")
        await actor.listen("me", path)
        _, writer = await asyncio.open_unix_connection(path)
        stream = await actor.accept("me")
        writer.write(b"x" * (64 * CHUNK_BYTES))
        full = asyncio.ensure_future(writer.drain())
        taken = 0
        while not full.done():  # every read makes room for a little more
            data = await actor.read("me", stream)
            assert 0 < len(data) <= CHUNK_BYTES
            taken += len(data)
        writer.transport.abort()
        await actor.acquire("grid", "nobody")
        return taken

    assert asyncio.run(story()) > 32 * CHUNK_BYTES


def test_a_new_holder_ends_what_the_one_before_had_open(tmp_path):
    async def story():
        actor, path = await make_actor(), str(tmp_path / "agent.sock")
        await actor.listen("me", path)
        reader, writer = await asyncio.open_unix_connection(path)
        await actor.accept("me")
        await actor.acquire("grid", "another")
        assert await reader.read() == b""
        with pytest.raises(ConnectionAbortedError):
            await actor.accept("me")
        writer.close()

    asyncio.run(story())


def test_make_actor_that_another_grid_uses_stays_with_it():
    async def story():
        actor = await make_actor()
        assert (await actor.acquire("other", "them"))["grid"] == "grid"
        talk = await actor.open("me", ECHO)
        assert await actor.write("me", talk, b"still mine\n")
        assert await actor.read("me", talk) == b"still mine\n"
        await actor.close("me", talk)

    asyncio.run(story())
