"""Session of one command: its global options, and clients of the control plane that they select."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, Part, ReconnectBackoff
from distributed_grid.errors import Unreachable
from distributed_grid.state_dir import StateDir

DEFAULT_CONFIG = os.path.join("config", "my-cluster-enhanced.yaml")


class CliSession:
    """The global options of one command, and clients of the control plane that they select."""

    def __init__(self) -> None:
        self.config: str | None = None
        self.state_dir_option: str | None = None
        self.json = False

    @cached_property
    def state_dir(self) -> StateDir:
        return StateDir(self.state_dir_option)

    def client(self, *, may_start: bool = True) -> Client:
        """A client of the control plane of these options."""
        return Client(self.state_dir, self._client_config(may_start), may_start=may_start)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request to the control plane, on a connection of its own."""
        with self.client() as client:
            return client.call(op, **arguments)

    def stream_steps(self, op: str, show: Callable[[str, str], None], **arguments: Any) -> dict[str, Any]:
        """A request that reports its steps, which are shown as (node, step); the answer, which comes last."""
        last: dict[str, Any] = {}
        with self.client() as client:
            for _, message in client.stream(op, **arguments):
                assert isinstance(message, dict)
                if "step" in message:
                    show(message["node_id"], message["step"])
                last = message
        return last

    def follow(
        self, op: str, arguments: Callable[[], dict[str, Any]], *, reconnect: bool = True
    ) -> Iterator[tuple[bytes, Part]]:
        """A stream that goes on with the next control plane where one goes away: `arguments` say from where."""
        backoff = ReconnectBackoff()
        while True:
            try:
                with self.client() as client:
                    for kind, part in client.stream(op, **arguments()):
                        backoff.reset()
                        yield kind, part
                return
            except Unreachable as loss:
                if not reconnect:
                    raise
                time.sleep(backoff.delay_after(loss))

    def running_client(self) -> Client:
        """A client of the control plane that runs, whatever config it has."""
        return Client(self.state_dir, may_start=False)

    def _client_config(self, may_start: bool) -> ClientConfig:
        """The config to use: the named one, else what the daemon runs, else a default, else this machine alone."""
        named = self.config or os.environ.get("GRID_CONFIG")
        if named:
            return ClientConfig(named, explicit=True)
        return ClientConfig(self.find_config(announce=may_start and not os.path.exists(self.state_dir.socket)))

    def find_config(self, *, announce: bool) -> str | None:
        """The config at its default path, if there is one."""
        if os.path.exists(DEFAULT_CONFIG):
            if announce:
                print(f"grid: using ./{DEFAULT_CONFIG}", file=sys.stderr)
            return DEFAULT_CONFIG
        cluster = self.state_dir.cluster_file
        return cluster if os.path.exists(cluster) else None  # False, not an error, where we may not look


def is_terminal() -> bool:
    """Whether a person reads the output and may be shown colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
