"""Files of a node's directory on a full disk: an agent can be told of a new connection all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.adapters.node import node_script
from distributed_grid.agent.agent_process import AgentDir
from tests.support.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.e2e
__all__ = ["small_disk"]


def test_a_link_is_written_in_place_when_there_is_no_room(small_disk: Callable[..., SmallDisk], tmp_path: Path) -> None:
    disk = small_disk(tmp_path / "node")
    link = disk.place / "link.json"
    node_script.write_text(str(link), json.dumps({"node": "gpu1", "socket": "/run/first.sock"}))
    disk.fill()
    for socket in ("/run/another.sock", "/run/x.sock"):
        node_script.write_text(str(link), json.dumps({"node": "gpu1", "socket": socket}))
        assert json.loads(link.read_text()) == {"node": "gpu1", "socket": socket}
    assert sorted(path.name for path in disk.place.iterdir()) == ["ballast", "link.json"]
    with pytest.raises(OSError, match="No space left"):
        node_script.write_text(str(disk.place / "new.json"), "{}")


def test_an_agent_records_itself_on_a_full_disk(small_disk: Callable[..., SmallDisk], tmp_path: Path) -> None:
    disk = small_disk(tmp_path / "node")
    folder = AgentDir(str(disk.place))
    folder.write("agent.pid", {"pid": 1234567})
    disk.fill()
    folder.write("agent.pid", {"pid": 7})
    assert folder.read("agent.pid") == {"pid": 7}
