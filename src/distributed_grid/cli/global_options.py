"""Global options, accepted before or after the subcommand, and command groups that load lazily."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

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

    @property
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
                click.echo(f"grid: using ./{DEFAULT_CONFIG}", err=True)
            return DEFAULT_CONFIG
        cluster = self.state_dir.cluster_file
        return cluster if os.path.exists(cluster) else None  # False, not an error, where we may not look


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(context.find_object(CliSession), name, value)

    return callback


def _config_option() -> click.Option:
    text = "Cluster file (default: $GRID_CONFIG, else what the running daemon uses, else the usual places)."
    return click.Option(["-c", "--config"], metavar="PATH", help=text, expose_value=False, callback=_store("config"))


def _state_option() -> click.Option:
    text = "State directory of the grid (default: $GRID_STATE_DIR, else ~/.distributed_grid)."
    return click.Option(
        ["--state-dir"], metavar="DIR", help=text, expose_value=False, callback=_store("state_dir_option")
    )


def _json_option() -> click.Option:
    return click.Option(["--json"], is_flag=True, help="Answer in JSON.", expose_value=False, callback=_store("json"))


GLOBAL_OPTIONS = (_config_option, _state_option, _json_option)


class GridCommand(click.Command):
    """A command that takes the global options, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [option() for option in GLOBAL_OPTIONS]


class GridGroup(click.Group):
    """A group that takes the global options, too."""

    command_class = GridCommand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [option() for option in GLOBAL_OPTIONS]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used: name → (file, attribute, one line of help)."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, attribute, _ = self._lazy[cmd_name]
        found: click.Command = getattr(importlib.import_module(f"distributed_grid.cli.commands.{module}"), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._lazy:
            import difflib

            near = difflib.get_close_matches(args[0], self._lazy, 1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in self._lazy.items()])


def is_terminal() -> bool:
    """Whether a person reads the output and may be shown colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
