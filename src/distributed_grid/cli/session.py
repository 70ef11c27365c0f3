"""Session of one command: its global options, and clients of the control plane that they select."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from distributed_grid.cli.standard_streams import print_message
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import (
    MAX_CONFIG_BYTES,
    ClientConfig,
    JsonObject,
    Part,
    ReconnectBackoff,
    digest_of,
)
from distributed_grid.client.operations import Operations, keeps_config
from distributed_grid.errors import Unreachable
from distributed_grid.state_dir import NO_CONFIG, StateDir

if TYPE_CHECKING:
    from distributed_grid.client.daemon_start import StartedDaemon

DEFAULT_CONFIG = os.path.join("config", "my-cluster-enhanced.yaml")


class CliSession:
    """The global options of one command, and clients of the control plane that they select."""

    def __init__(self) -> None:
        self.config: str | None = None
        self.state_dir_option: str | None = None
        self.json = False
        self._noted: set[str] = set()

    @cached_property
    def state_dir(self) -> StateDir:
        return StateDir(self.state_dir_option)

    @property
    def named_config(self) -> str | None:
        return self.config or os.environ.get("GRID_CONFIG")

    def client(self, *, may_start: bool = True, query_only: bool = False, any_config: bool = False) -> Client:
        """A client of the control plane of these options.

        One that runs uses the named config from now on, or is replaced where that takes a new one and it holds
        nothing. For a command that is `query_only`, or does with `any_config`, it keeps its config.
        """
        return Client(
            self.state_dir,
            ClientConfig(self.named_config, explicit=True),
            may_start=may_start,
            query_only=query_only,
            any_config=any_config,
            find_config=self.find_config,
            on_started=self._announce,
            on_note=self._print_note,
            on_welcome=self._note_new_config,
        )

    @cached_property
    def ask(self) -> Operations:
        """Requests of a command, each on a connection of its own."""
        return _SingleRequests(lambda op: self.client(any_config=keeps_config(op)))

    @cached_property
    def query(self) -> Operations:
        """Requests of a command that only shows something, each on a connection of its own."""
        return _SingleRequests(lambda op: self.client(query_only=True))

    def follow(
        self,
        ask: Callable[[Operations], Iterator[tuple[bytes, Part]]],
        *,
        reconnect: bool = True,
        query_only: bool = False,
        may_start: bool = True,
    ) -> Iterator[tuple[bytes, Part]]:
        """A stream that continues with the next control plane after a loss; `ask` sends the request, with the position.

        A `query_only` stream does not start the next one: a user may have stopped the last.
        """
        backoff = ReconnectBackoff()
        while True:
            try:
                with self.client(query_only=query_only, any_config=True, may_start=may_start) as client:
                    client.greet()
                    may_start = may_start and not query_only
                    for kind, part in ask(client):
                        backoff.reset()
                        yield kind, part
                return
            except Unreachable as loss:
                if not reconnect:
                    raise
                time.sleep(backoff.delay_after(loss))

    def running_client(self) -> Client:
        """A client of the running control plane, whatever its config and version; it stays as it is."""
        return Client(self.state_dir, may_start=False, query_only=True)

    def find_config(self) -> str | None:
        """The config at one of the usual places, unless others could have written it."""
        from distributed_grid.posix.private_files import distrust_of  # most commands find a control plane

        for path in (DEFAULT_CONFIG, self.state_dir.cluster_file):
            if os.path.exists(path):  # False, not an error, where we may not look
                reason = distrust_of(path)
                if reason is None:
                    return path
                advice = f"to use it all the same, name it: grid --config {path} …"
                print_message(f"grid: not using {path}, because {reason}; {advice}")
        return None

    def _note_new_config(self, welcome: Mapping[str, Any]) -> None:
        """Print a note about a config at one of the usual places that is newer than the control plane, which keeps its
        own: an unnamed file replaces no config."""
        if self.named_config is not None:
            return
        started_at = welcome.get("started_at", math.inf)  # an older control plane does not say when it began
        for path in (DEFAULT_CONFIG, self.state_dir.cluster_file):
            try:
                if os.stat(path).st_ctime <= started_at:
                    continue
                with open(path, "rb") as file:
                    content = file.read(MAX_CONFIG_BYTES + 1)
            except OSError:  # there is none, or we may not look
                continue
            if digest_of(content) != welcome["config_digest"]:
                used = welcome["config"] or "this machine alone"
                own = "the one it has read before" if os.path.abspath(path) == used else used
                advice = f"to use it: grid --config {path} daemon start"
                self._print_note(f"{path} is new, and the control plane goes on with {own}; {advice}")
                return

    def announce_config(self, path: str, simulated: int = 0) -> None:
        """Say that a config is used that was found in the current directory, and how many nodes it simulates."""
        if os.path.abspath(path) == os.path.abspath(DEFAULT_CONFIG):
            nodes = f"{simulated} simulated node{'' if simulated == 1 else 's'}"
            hint = f": {nodes}; for this machine alone: --config {NO_CONFIG}" if simulated else ""
            print_message(f"grid: using ./{DEFAULT_CONFIG}{hint}")

    def _announce(self, started: StartedDaemon) -> None:
        """Print the config that a control plane started by this command has found, and its keys that do not act yet."""
        if self.named_config is None and started.config is not None:
            self.announce_config(started.config, started.simulated)
        for note in started.notes:
            self._print_note(note)

    def _print_note(self, note: str) -> None:
        """Print a line of the control plane, once in a command."""
        from distributed_grid.cli.output import printable  # it imports this module

        if note not in self._noted:
            self._noted.add(note)
            print_message(f"grid: {printable(note)}")


class _SingleRequests(Operations):
    """Requests that each have a connection of their own."""

    def __init__(self, connect: Callable[[str], Client]) -> None:
        self._connect = connect

    def call(self, op: str, **arguments: Any) -> JsonObject:
        with self._connect(op) as client:
            return client.call(op, **arguments)

    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, Part]]:
        with self._connect(op) as client:
            yield from client.stream(op, **arguments)


def is_terminal() -> bool:
    """True if a person reads the output and may be shown colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
