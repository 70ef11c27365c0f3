"""A lab: several real hosts on one machine, with real SSH between them and the test."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.lab import lab_leftovers
from tests.lab.disks import mount_tmpfs
from tests.lab.lab_cgroups import WANTED, Groups, hierarchies
from tests.lab.lab_host import Host
from tests.lab.network_cables import Cable, ip
from tests.lab.relays import Relay
from tests.lab.shared_machine import HOST_KEY, OWNER, OWNER_ID, SSHD, USER, USER_ID, Plan, furnish

NAMES = ("gpu-master", "gpu1", "gpu2")
TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "nsenter", "unshare", "setpriv", "mount", "umount", "pivot_root")
GB = 1024**3
MB = 1024**2


def problem() -> str | None:
    """Why there can be no lab on this machine, or None."""
    if os.geteuid() != 0:
        return "only root can make the namespaces of a lab"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ["sshd"] * (not Path(SSHD).exists())
    if missing:
        return f"a lab needs {', '.join(missing)} (Debian: iproute2, openssh-server, openssh-client, util-linux)"
    found = {name for hierarchy in hierarchies() for name in hierarchy.controllers.split(",")}
    if not found >= WANTED:
        return "a lab needs the control groups (version 1) cpu, cpuacct and memory"
    return None


class Lab:
    """Hosts on a bridge of their own. Use it as a context manager; whatever happens, nothing of it is left."""

    def __init__(
        self,
        names: Sequence[str] | int = NAMES,
        *,
        cores: float = 2,
        memory_gb: float = 3,
        home_mb: int = 600,
        share: Mapping[str, Path] | None = None,
    ) -> None:
        self.user = USER
        self._names = [f"host{number}" for number in range(1, names + 1)] if isinstance(names, int) else list(names)
        self._cores = cores
        self._memory_bytes = round(memory_gb * GB)
        self._home_bytes = home_mb * MB
        self._share = dict(share or {})
        self._hosts: dict[str, Host] = {}
        self._relays: list[Relay] = []
        self._lock: int | None = None
        self._janitor: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        self.number, self._lock = lab_leftovers.claim()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process in it and remove all of it. A second call does nothing."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        with contextlib.ExitStack() as last:
            if self._janitor is not None:
                last.callback(self._janitor.communicate)
            last.callback(lab_leftovers.give_back, self.number, lock)
            last.callback(lab_leftovers.remove, self.number)
            for host in self._hosts.values():
                last.callback(host.halt)
            for relay in self._relays:
                last.callback(relay.close)

    def _make(self) -> None:
        self.folder = lab_leftovers.folder_of(self.number)
        self.folder.mkdir()
        self._start_janitor()
        mount_tmpfs(self.folder, 256 * MB, "0700")
        self._wire()
        self._make_keys()
        for host in self._hosts.values():
            host.boot()
        for host in self._hosts.values():
            host.booted()
        for host in self._hosts.values():
            host.ready()

    def _start_janitor(self) -> None:
        """Somebody who cleans up should this process be killed."""
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", lab_leftovers.__file__, str(self.number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _wire(self) -> None:
        """The bridge with our own address on it, and every host with its groups, files and cable, not yet started."""
        bridge = lab_leftovers.bridge_of(self.number)
        self.address = self._address(1)
        ip(f"link add {bridge} type bridge", f"address add {self.address}/24 dev {bridge}", f"link set {bridge} up")
        self.key_path = self.folder / "key"
        self.known_hosts = self.folder / "known_hosts"
        groups = {name: Groups(f"gridlab{self.number}-{name}") for name in self._names}
        listed = [str(path) for group in groups.values() for path in group.paths.values()]
        (self.folder / "groups").write_text("".join(f"{path}\n" for path in listed))
        for index, name in enumerate(self._names):
            plan = Plan(
                name=name,
                address=self._address(11 + index),
                folder=self.folder / name,
                memory_bytes=self._memory_bytes,
                home_bytes=self._home_bytes,
                share=self._share,
            )
            groups[name].make(cores=self._cores, memory_bytes=self._memory_bytes)
            mac = f"02:c6:12:00:{self.number:02x}:{index:02x}"
            cable = Cable(bridge, lab_leftovers.cable_of(self.number, index), plan.address, mac)
            host = Host(plan, groups[name], cable, ssh_command=self._ssh_command(), trust=self.trust)
            self._hosts[name] = host

    def _make_keys(self) -> None:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(self.key_path)]
        subprocess.run(words, check=True, capture_output=True)
        book = "".join(f"{host.address} {host.name}\n" for host in self) + f"{self.address} control\n"
        for host in self:
            folder = self.folder / host.name
            furnish(host.plan, public_key=self.key_path.with_suffix(".pub").read_text(), hosts=book)
            host.make_key(folder / "etc" / HOST_KEY.relative_to("/etc"))
            host.disk.make()
            for name, uid in ((USER, USER_ID), (OWNER, OWNER_ID)):
                home = folder / "home" / name
                home.mkdir(mode=0o700)
                os.chown(home, uid, uid)
        self.trust()

    def _address(self, last: int) -> str:
        return f"198.18.{self.number}.{last}"  # set aside for tests of network devices: no real host has it

    def _ssh_command(self) -> list[str]:
        options = {
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": 5,
            "LogLevel": "ERROR",
        }
        settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-F", "/dev/null", "-i", str(self.key_path), *settings]

    # ------------------------------------------------------------------ the hosts

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def host(self, name: str) -> Host:
        """The host of this name."""
        return self._hosts[name]

    def trust(self) -> None:
        """Write the keys that the hosts have now into the lab's known hosts."""
        lines = []
        for host in self:
            key = (host.plan.folder / "etc" / HOST_KEY.relative_to("/etc")).with_suffix(".pub").read_text().split()
            lines.append(f"{host.address} {key[0]} {key[1]}\n")
        self.known_hosts.write_text("".join(lines))

    def config(self, *, nodes: Mapping[str, Mapping[str, Any]] | None = None, **extra: Any) -> str:
        """A cluster file with every host; `nodes` adds keys to single ones, all other keys go to the top."""
        entries = [
            {
                "name": host.name,
                "host": host.address,
                "user": self.user,
                "ssh_key_path": str(self.key_path),
                "known_hosts": str(self.known_hosts),
                **(nodes or {}).get(host.name, {}),
            }
            for host in self
        ]
        return yaml.safe_dump({"name": "lab", "nodes": entries, **extra}, sort_keys=False)

    def ssh_line(self, host: Host) -> str:
        """Command line of a person who enters a host."""
        return shlex.join([*self._ssh_command(), f"{self.user}@{host.address}"])

    # ------------------------------------------------------------------ the network

    def cut(self, host: Host | str) -> None:
        """Pull its cable: no packet passes, and nobody is told. Twice is no error."""
        self._one(host).cable.cut()

    def heal(self, host: Host | str) -> None:
        """Plug it in again."""
        self._one(host).cable.heal()

    def slow(self, host: Host | str, kbit: int | None) -> None:
        """Let so many kilobits a second pass, each way; None is full speed again."""
        self._one(host).cable.slow(kbit)

    def relay(self, host: Host | str, port: int = 22, *, delay_ms: float = 0) -> Relay:
        """A way to a port of a host on which everything arrives late; it ends with the lab."""
        relay = Relay(self._one(host).address, port, listen_on=self.address, delay_ms=delay_ms)
        self._relays.append(relay)
        return relay

    def mend(self) -> None:
        """Everything as new after a test: cables, disks, clocks, host keys, relays. Files and processes stay."""
        while self._relays:
            self._relays.pop().close()
        for host in self:
            host.mend()

    def _one(self, host: Host | str) -> Host:
        return self.host(host) if isinstance(host, str) else host
