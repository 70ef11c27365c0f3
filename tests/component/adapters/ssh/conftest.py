"""A real SSH server on loopback."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.ssh.process import Hop

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")


def make_key(path: Path, *words: str, passphrase: str = "") -> Path:
    """A new key pair; the private part is at `path`."""
    kind = words or ("-t", "ed25519")
    subprocess.run(["ssh-keygen", "-q", *kind, "-N", passphrase, "-C", "test", "-f", str(path)], check=True)
    return path


class Server:
    """`sshd` on a loopback port, with a host key of its own, for this user and one key."""

    def __init__(self, folder: Path, key: Path, *, host_key: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.folder = folder
        self.key = key
        self.host_key = make_key(folder / "host_key", *host_key)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "authorized").write_text(key.with_suffix(".pub").read_text())
        self.extra = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        config = (
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {self.host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin yes\nPrintMotd no\nUseDNS no\n" + self.extra
        )
        (self.folder / "config").write_text(config)
        assert SSHD is not None
        command = [SSHD, "-D", "-f", str(self.folder / "config"), "-E", str(self.folder / "log")]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 40
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as there:
                if there.recv(4) == b"SSH-":
                    return
            time.sleep(0.02)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def new_host_key(self, *words: str) -> None:
        """Show another host key from now on."""
        self.stop()
        self.host_key.unlink()
        make_key(self.host_key, *words)
        self.start()

    def known_line(self) -> str:
        words = self.host_key.with_suffix(".pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {words[0]} {words[1]}\n"

    def hop(self, **changes: Any) -> Hop:
        """How to get there."""
        given = {"port": self.port, "user": getpass.getuser(), "key": str(self.key)}
        return Hop("127.0.0.1", **{**given, "known_hosts": str(self.folder / "known"), **changes})

    @property
    def known(self) -> Path:
        return self.folder / "known"


@pytest.fixture
def a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes SSH servers; our own home is empty meanwhile, so that nobody's configuration is read."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd (Debian: openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = make_key(tmp_path / "key")
    made: list[Server] = []

    def make(**options: Any) -> Server:
        server = Server(tmp_path / f"server{len(made)}", key, **options)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.stop()
