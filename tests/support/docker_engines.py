"""A real Docker engine of a test's own: `dockerd` with all its state in one folder, on a Unix socket, without a bridge.

It and its containers live in a mount and a PID namespace of their own, whose init reaps orphans as a machine's does.
When that init ends, all of them end and nothing stays mounted; so the janitor of a test run has to find only that one,
by the folder in its environment.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.types

from distributed_grid.adapters.clouds.docker_local import connected
from distributed_grid.errors import Unreachable
from tests.support.project import PROJECT
from tests.support.shell import wait_until

TOOLS = ("dockerd", "containerd", "runc", "docker-init", "nsenter", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
READY_SECONDS = 60.0


def problem() -> str | None:
    """Why there can be no engine on this machine, or None."""
    if os.geteuid() != 0:
        return "only root can run a Docker engine of its own"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    return f"a Docker engine needs {', '.join(missing)} (Debian: docker.io, util-linux)" if missing else None


class LocalDockerEngine:
    """An engine in a folder; `stop` leaves nothing of it."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self._cgroup = f"grid-test-{os.getpid()}-{folder.name}"
        self._options = options
        self._processes = [self._run("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                                     "docker-init", "--", "sleep", "infinity")]  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it answers."""
        init = wait_until(lambda: child_of(self._processes[0].pid, "docker-init"))
        self._processes[1:] = [
            self._run(
                "nsenter",
                f"--target={init}",
                "--mount",
                "--pid",
                "dockerd",
                "--host",
                self.url,
                "--log-level=warn",
                f"--data-root={self.folder}/data",
                f"--exec-root={self.folder}/exec",
                f"--pidfile={self.folder}/docker.pid",
                f"--cgroup-parent=/{self._cgroup}",
                "--bridge=none",
                "--iptables=false",
                "--ip-forward=false",
                "--userland-proxy=false",
                *self._options,
            )
        ]
        wait_until(self._answers, READY_SECONDS)

    def kill(self) -> None:
        """kill -9 the engine itself; its containerd dies with it, its containers are left to themselves."""
        process = self._processes.pop()
        os.kill(wait_until(lambda: child_of(process.pid, "dockerd")), signal.SIGKILL)
        process.wait()

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """The SDK's client, to look at the engine from outside of the grid."""
        client = docker.APIClient(base_url=self.url, version="auto", timeout=30)
        try:
            yield client
        finally:
            client.close()

    @contextlib.contextmanager
    def network(self, name: str, subnet: str) -> Iterator[str]:
        """A network of containers with a bridge on this machine; the address of the bridge."""
        pool = docker.types.IPAMPool(subnet=subnet)
        with self.client() as client:
            network = client.create_network(name, driver="bridge", ipam=docker.types.IPAMConfig(pool_configs=[pool]))
            try:
                yield client.inspect_network(network["Id"])["IPAM"]["Config"][0].get("Gateway", f"{subnet[:-4]}1")
            finally:
                client.remove_network(network["Id"])

    def build_worker_image(self) -> None:
        """Have the image that `make worker-image` builds."""
        script = PROJECT / "scripts" / "build_worker_image.py"
        subprocess.run([sys.executable, str(script), "--engine", self.url], check=True, timeout=300)

    def build_small_image(self, name: str, program: str) -> None:
        """Have an image with a shell, in which `grid` is this shell script; it is built in no time."""
        tools = {tool: shutil.which(tool) for tool in ("sh", "sleep", "cat")}
        said = subprocess.run(["ldd", *map(str, tools.values())], capture_output=True, check=True).stdout.decode()
        files = {f"bin/{tool}": Path(str(path)).read_bytes() for tool, path in tools.items()}
        files |= {found.lstrip("/"): Path(found).read_bytes() for found in re.findall(r"(/\S+) \(0x", said)}
        files["bin/grid"] = f"#!/bin/sh\n{program}\n".encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, content in files.items():
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
        with self.client() as client:
            client.import_image_from_data(buffer.getvalue(), repository=name, changes=["ENV PATH=/bin"])

    def stop(self) -> None:
        """End the engine and its containers, and remove what is left of them. A second time is harmless."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for top in [Path("/sys/fs/cgroup", self._cgroup), *Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}")]:
            for folder, _, _ in os.walk(top, topdown=False):
                wait_until(lambda folder=folder: remove_group(Path(folder)))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "dockerd.log").open("ab") as log:
            environ = {"PATH": PATH, "ENGINE_FOLDER": str(self.folder)}
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def _answers(self) -> bool:
        if self._processes[-1].poll() is not None:
            raise AssertionError((self.folder / "dockerd.log").read_text()[-2000:])
        try:
            with connected(self.url, READY_SECONDS):
                return True
        except Unreachable:
            return False


def child_of(pid: int, name: str) -> int | None:
    """The child of a process, once it runs the program of that name."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{child}/comm").read_text():
                return int(child)
    return None


def remove_group(group: Path) -> bool:
    """Remove a control group, unless something still runs in it."""
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except OSError:
            return False
    return True
