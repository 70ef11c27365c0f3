"""Whether a server is who it was: host keys, as `known_hosts` files have them.

Rule 1: a key that has changed is never accepted, whatever the config says.
Rule 2: a key never seen before is accepted only with `accept_new: true`, and is written down at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from distributed_grid.adapters.node.messages import Hop

if TYPE_CHECKING:
    from asyncssh.known_hosts import SSHKnownHosts

SYSTEM_WIDE = "/etc/ssh/ssh_known_hosts"
SSH_PORT = 22


class KnownHosts:
    """What the files say about one server."""

    def __init__(self, hop: Hop, name: str, port: int, files: Iterable[str]) -> None:
        self.hop = hop
        self.entry = name if port == SSH_PORT else f"[{name}]:{port}"
        self.files = [str(Path(file).expanduser()) for file in files]
        known = _read(self.files)
        self.trusted = known.match(self.entry, "", None)
        self.seen = list(self.trusted[0])
        if not (self.trusted[0] or self.trusted[1]) and port != SSH_PORT:  # as ssh does: known without its port
            plain = known.match(name, "", None)
            self.trusted = (*plain[:2], [*plain[2], *self.trusted[2]], *plain[3:])

    def algorithms(self) -> list[str]:
        """The kinds of keys to ask the server for: those that are known first, but any, to see what has changed."""
        names = [name for key in self.trusted[0] for name in key.sig_algorithms]
        if not names:
            return []
        if self.trusted[1]:
            names = [*get_default_certificate_algs(), *names]
        return [name.decode() for name in dict.fromkeys([*names, *get_default_public_key_algs()])]

    def client(self) -> HostKeyCheck:
        return HostKeyCheck(self)


class HostKeyCheck(asyncssh.SSHClient):
    """Asked about a key that is not among the trusted ones; `refusal` says why it was turned down."""

    def __init__(self, known: KnownHosts) -> None:
        self._known = known
        self.refusal = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        known, hop = self._known, self._known.hop
        fingerprint = f"{_kind(key)} {key.get_fingerprint()}"
        if known.seen:
            self.refusal = _changed(known, fingerprint)
            return False
        if not hop.accept_new:
            self.refusal = (
                f"the host key of {hop.host} is not known ({fingerprint}): compare it, then connect once with ssh, or "
                f"add the output of ssh-keyscan to {known.files[0]}, or set accept_new: true for this node"
            )
            return False
        try:
            note(known.files[0], known.entry, key)
        except OSError as failure:
            self.refusal = f"the new host key of {hop.host} cannot be written to {known.files[0]}: {failure.strerror}"
            return False
        return True


def _changed(known: KnownHosts, now: str) -> str:
    """The sentence about a key that is not the one of before."""
    before = ", ".join(f"{_kind(key)} {key.get_fingerprint()}" for key in known.seen)
    return (
        f"the host key of {known.hop.host} has changed: {known.files[0]} knows {before}, now it shows {now}. "
        "Somebody may be in between, or the host was set up anew; when you are sure it was, remove the old key with: "
        f"ssh-keygen -R '{known.entry}'" + (f" -f {known.files[0]}" if known.hop.known_hosts else "")
    )


def note(path: str, entry: str, key: asyncssh.SSHKey) -> None:
    """Write a key down, so that from now on only this one is accepted."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = b""
        if size:
            file.seek(size - 1)
            start = b"" if file.read(1) == b"\n" else b"\n"
        file.write(start + entry.encode() + b" " + key.export_public_key("openssh").split(b" #")[0].strip() + b"\n")


def _read(files: Iterable[str]) -> SSHKnownHosts:
    known = asyncssh.import_known_hosts("")
    for file in (*files, SYSTEM_WIDE):
        try:
            known.load(Path(file).read_text())
        except (OSError, UnicodeDecodeError):
            continue  # a file that is not there knows nobody
    return known


def _kind(key: asyncssh.SSHKey) -> str:
    return key.algorithm.decode()
