"""What goes wrong with SSH, in sentences that say what to do."""

from __future__ import annotations

import socket

from distributed_grid.adapters.shells.messages import Hop
from distributed_grid.errors import GridError

CONNECT_SECONDS = 10.0


class Failed(GridError):
    """Something on the way to a node, or on it, did not work; `final`: trying again will not help by itself."""

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


def explained(failure: BaseException, hop: Hop, *, user: str, port: int, keys: str) -> Failed:
    """The failure to reach a server as one clear sentence."""
    import asyncssh

    where = f"{hop.host} port {port}"
    match failure:
        case Failed():
            return failure
        case asyncssh.PermissionDenied():
            return Failed(f"permission denied for {user}@{hop.host}: {keys}")
        case asyncssh.HostKeyNotVerifiable():
            return Failed(f"the host key of {hop.host} cannot be trusted: {failure.reason}")
        case asyncssh.KeyExchangeFailed():
            return Failed(f"{where} and we have no way of speaking in common: {failure.reason}")
        case asyncssh.KeyEncryptionError() | asyncssh.KeyImportError():
            return Failed(f"the key {hop.key or 'for ' + hop.host} cannot be used: {failure}")
        case asyncssh.ChannelOpenError():
            return Failed(f"{where} cannot be reached from the host before it: {failure.reason}", final=False)
        case asyncssh.ConfigParseError():
            return Failed(f"~/.ssh/config cannot be used: {failure}")
        case TimeoutError():
            return Failed(f"no answer from {where} within {CONNECT_SECONDS:g} s", final=False)
        case ConnectionRefusedError():
            return Failed(f"{where} refused the connection: is sshd running there?", final=False)
        case socket.gaierror():
            return Failed(f"the name {hop.host} cannot be resolved: {failure.strerror}", final=False)
        case asyncssh.Error():
            return Failed(f"the connection to {where} broke: {failure.reason}", final=False)
        case OSError():
            return Failed(f"{where} cannot be reached: {failure.strerror or failure}", final=False)
    return Failed(f"{where}: {type(failure).__name__}: {failure}", final=False)
