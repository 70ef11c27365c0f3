"""One host of a lab: a machine of its own as far as its users can tell.

Rule 1. A command run in it is in all of its namespaces and control groups, as an unprivileged user unless asked.
Rule 2. Pids are those that the host's own `ps` would show.
Rule 3. Files in HOME and /etc outlive a restart of the host; /tmp, /dev/shm, /run and processes do not.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab import lab_leftovers, skewed_clocks
from tests.lab.commands import ENTER, NAMESPACES, Command, checked
from tests.lab.disks import Disk
from tests.lab.lab_cgroups import Groups
from tests.lab.network_cables import Cable
from tests.lab.shared_machine import HOST_KEY, OWNER, OWNER_ID, SSHD, USER, USER_ID, Plan, script

PATIENCE_S = 15.0
USERS = {"root": 0, USER: USER_ID, OWNER: OWNER_ID}
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class Host:
    """A running host; `Lab` makes it."""

    def __init__(
        self, plan: Plan, groups: Groups, cable: Cable, *, ssh_command: list[str], trust: Callable[[], None]
    ) -> None:
        self.name = plan.name
        self.address = plan.address
        self.user = USER
        self.home = f"/home/{USER}"
        self.groups = groups
        self.cable = cable
        self.disk = Disk(plan.folder / "home", plan.home_bytes)
        self.plan = plan
        self._ssh = ssh_command
        self._trust = trust
        self._machine: subprocess.Popen[str] | None = None
        self._pid = 0
        self._env: dict[str, str] = {}
        self._key_changed = False

    def __repr__(self) -> str:
        return f"<host {self.name} at {self.address}>"

    # ------------------------------------------------------------------ its life

    def boot(self) -> None:
        """Begin to start; `booted` waits for the end of it."""
        (self.plan.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        starting = script(self.plan, self.groups.paths)
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-ec", starting]
        self._machine = subprocess.Popen(
            self._in_groups(unshare),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": PATH, "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )

    def booted(self) -> None:
        """Wait until it has its root, plug the cable in and start its SSH server."""
        assert self._machine is not None
        assert self._machine.stdout is not None
        said = self._machine.stdout.readline().strip()
        if not said:
            raise RuntimeError(f"{self.name} did not start; the reason is on standard error")
        self._pid = int(said)
        self.cable.plug(self._pid)
        self._start_sshd()

    def ready(self) -> None:
        """Wait until its SSH server greets whoever comes; with its cable cut there is nobody to wait for."""
        until = time.monotonic() + PATIENCE_S
        while not self._greets():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name}: no SSH server at {self.address}:22\n{self._sshd_log()}")
            time.sleep(0.01)

    def halt(self) -> None:
        """End all of it at once, as a power cut does. A host that does not run may be halted.

        Process 1 goes first: the kernel ends every other process with it in one step, so that none of them lives
        long enough to see another die and write that down.
        """
        self.cable.unplug()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = 0
        for path in self.groups.paths.values():
            lab_leftovers.empty(path)
        if self._machine is not None:
            self._machine.wait(PATIENCE_S)
            for stream in (self._machine.stdin, self._machine.stdout):
                if stream is not None:
                    stream.close()
            self._machine = None

    def reboot(self) -> None:
        """Kill everything in it without notice and start it again: a new boot id, the same HOME and address."""
        self.halt()
        for path in self.groups.paths.values():
            for inner in [entry for entry in path.iterdir() if entry.is_dir()]:
                lab_leftovers.drop(inner)
        self.boot()
        self.booted()
        if not self.cable.is_cut:
            self.ready()

    # ------------------------------------------------------------------ commands in it

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Any,
    ) -> Command:
        """Start a command in the host; signals sent to what this returns go to the command."""
        who = user or self.user
        home = "/root" if who == "root" else f"/home/{who}"
        uid = USERS[who]
        become = [] if uid == 0 else [f"--reuid={uid}", f"--regid={uid}", "--init-groups", "--inh-caps=-all"]
        entering = ["nsenter", "--target", str(self._pid), *NAMESPACES]
        settings = {**(self._env if uid else {}), **(env or {})}  # last: they are for the command alone
        inner = ["env", "-C", cwd or home, "setpriv", "--pdeathsig", "KILL", *become]
        inner += ["env", *(f"{name}={value}" for name, value in settings.items()), *argv]
        given = {"HOME": home, "USER": who, "LOGNAME": who, "SHELL": "/bin/bash", "PATH": PATH, "LANG": "C.UTF-8"}
        return Command(self._in_groups([*entering, *inner]), env=given, cwd="/", **options)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        check: bool = True,
        timeout: float = 30,
        input: str | None = None,  # noqa: A002  # as subprocess.run calls it
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host to its end, as the unprivileged user unless told otherwise."""
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        streams["stdin"] = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.popen(argv, user=user, env=env, cwd=cwd, errors="replace", **streams) as process:
            try:
                out, err = process.communicate(input, timeout)
            except BaseException:
                process.kill()
                raise
        return checked(subprocess.CompletedProcess([*argv], process.returncode, out, err), self.name, check)

    def ssh(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float = 30,
        input: str | None = None,  # noqa: A002
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host through its SSH server, as anybody with the key would; `options` win over ours."""
        done = subprocess.run(
            [self._ssh[0], *options, *self._ssh[1:], f"{self.user}@{self.address}", shlex.join(argv)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            **({"stdin": subprocess.DEVNULL} if input is None else {"input": input}),
        )
        return checked(done, self.name, check)

    @property
    def ssh_command(self) -> list[str]:
        """`ssh` with the lab's key and known hosts, and nobody's own configuration."""
        return list(self._ssh)

    # ------------------------------------------------------------------ what is in it

    def outside(self, path: str | Path) -> Path:
        """How the test sees a file of the host. Absolute links in it lead astray: they are followed out here."""
        return Path(f"/proc/{self._pid}/root") / str(path).lstrip("/")

    def processes(self) -> list[tuple[int, str]]:
        """The pid and command line of everything that runs in it."""
        found = []
        for entry in self.outside("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (words := (entry / "cmdline").read_bytes()):
                    found.append((int(entry.name), words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")))
        return sorted(found)

    def find(self, text: str) -> list[int]:
        """The pids of those whose command line has this text."""
        return [pid for pid, line in self.processes() if text in line]

    def kill(self, pid: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of the host; one that is gone raises `ProcessLookupError`."""
        done = self.run(["/bin/kill", f"-{int(signal_number)}", str(pid)], user="root", check=False)
        if done.returncode:
            raise ProcessLookupError(f"{self.name}: {done.stderr.strip()}")

    @contextlib.contextmanager
    def burn(self, cores: int) -> Iterator[list[Command]]:
        """The owner of the machine is back: keep so many cores busy as another user, until the block is left."""
        busy = [self.popen(["sh", "-c", "while :; do :; done"], user=OWNER) for _ in range(cores)]
        try:
            yield busy
        finally:
            for process in busy:
                process.kill()
                process.wait()

    # ------------------------------------------------------------------ what can go wrong with it

    def restart_sshd(self) -> None:
        """A new SSH server; sessions of the old one go on."""
        self._stop_sshd()
        self._start_sshd()
        self.ready()

    def new_host_key(self) -> None:
        """Its SSH server shows another key from now on; the lab's known hosts keep the old one until `mend`."""
        self._key_changed = True
        self.make_key(self.outside(HOST_KEY))
        self.restart_sshd()

    def make_key(self, path: Path) -> None:
        """Write a new host key."""
        for old in (path, path.with_suffix(".pub")):
            old.unlink(missing_ok=True)
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(path)]
        subprocess.run(words, check=True, capture_output=True)

    def fill_disk(self, *, leave_bytes: int = 0) -> None:
        """The disk with HOME on it shrinks to what is on it: the next byte does not fit."""
        self.disk.fill(leave_bytes)

    def free_disk(self) -> None:
        """The disk has its size again; one that was not filled may be freed."""
        self.disk.free()

    def skew_seconds(self, seconds: float) -> None:
        """The wall clock is off by so much, soon for who already lives by a skewed one, else from the next login."""
        skewed_clocks.build(self.outside(skewed_clocks.SLEEP))
        aside = self.outside(f"{skewed_clocks.OFFSET}.new")
        aside.write_text(f"{seconds:+f}s\n")
        aside.replace(self.outside(skewed_clocks.OFFSET))
        self._env = skewed_clocks.environment() if seconds else {}
        login = self.outside(f"{self.home}/.ssh/environment")
        login.parent.mkdir(mode=0o700, exist_ok=True)
        os.chown(login.parent, USER_ID, USER_ID)
        login.write_text("".join(f"{name}={value}\n" for name, value in self._env.items()))

    def mend(self) -> None:
        """Undo what tests did to cable, disk, clock and host key; costs next to nothing where nothing was done."""
        self.cable.mend()
        self.disk.free()
        if self._env:
            self.skew_seconds(0)
        if self._key_changed:
            self._trust()
            self._key_changed = False
        if not self._greets():
            self.restart_sshd()

    # ------------------------------------------------------------------ inside

    def _in_groups(self, argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", ENTER, "enter", *self.groups.doors, "--", *argv]

    def _start_sshd(self) -> None:
        self.run([SSHD, "-f", "/etc/ssh/lab_sshd_config", "-E", "/var/log/sshd.log"], user="root")

    def _stop_sshd(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int(self.outside("/run/sshd.pid").read_text())
            self.kill(pid, signal.SIGTERM)
            until = time.monotonic() + PATIENCE_S
            while self.outside(f"/proc/{pid}").exists() and time.monotonic() < until:
                time.sleep(0.005)

    def _greets(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, 22), 1) as there:
            return there.recv(4) == b"SSH-"
        return False

    def _sshd_log(self) -> str:
        with contextlib.suppress(OSError):
            return self.outside("/var/log/sshd.log").read_text()
        return ""
