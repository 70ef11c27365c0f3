"""One client's connection: an answer that the client could not take is refused, and the connection goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from distributed_grid.api.framing import JSON, MAX_FRAME_BYTES, Unpacker, frame
from distributed_grid.server.rpc import Connection


def test_an_answer_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    async def serve(client: Connection, body: bytes) -> None:
        client.send({"text": "x" * json.loads(body)})

    async def story() -> None:
        loop = asyncio.get_running_loop()
        path = str(tmp_path / "socket")
        server = await loop.create_unix_server(lambda: Connection(serve, set()), path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(JSON, str(MAX_FRAME_BYTES).encode()) + frame(JSON, b"3"))
        answers = Unpacker()
        found: list[dict[str, object]] = []
        while len(found) < 2:
            found += [json.loads(body) for _, body in answers.feed(await reader.read(1 << 20))]
        assert found[0]["error"]["type"] == "Refused"  # type: ignore[index]
        assert "ask for less" in found[0]["error"]["message"]  # type: ignore[index]
        assert found[1] == {"text": "xxx"}
        writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), 30))
