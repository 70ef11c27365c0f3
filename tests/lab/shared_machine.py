"""Files of a host at its start, and the script that assembles its root.

A host sees the machine's `/usr` (to read only), its own `/etc` over the machine's, and a Python at `/opt/python`
without any packages. Everything else is empty and its own: nothing of the project can be seen.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

USER, USER_ID = "griduser", 2001
OWNER, OWNER_ID = "owner", 2002
PYTHON = Path("/opt/python")
SSHD = shutil.which("sshd", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin") or "/usr/sbin/sshd"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HOST_KEY = Path("/etc/ssh/lab_host_key")
# Without the costliest key exchanges, each of which takes half of a login.
SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {host_key}
AuthorizedKeysFile /etc/ssh/lab_authorized_keys
AuthenticationMethods publickey
AllowUsers {user}
KexAlgorithms -sntrup*,mlkem*
UsePAM no
UseDNS no
PermitUserEnvironment yes
PrintMotd no
PrintLastLog no
MaxStartups 200
MaxSessions 200
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Plan:
    """Everything that makes one host different from another."""

    name: str
    address: str
    folder: Path
    memory_bytes: int
    home_bytes: int
    share: Mapping[str, Path]
    """Folders of the machine that the host may read, by where it finds them."""


def furnish(plan: Plan, *, public_key: str, hosts: str) -> None:
    """Write the host's own part of /etc and of /usr/local/bin; they outlive its restarts."""
    etc, tools = plan.folder / "etc", plan.folder / "tools"
    for path in (etc / "ssh", etc / "lab", etc / "ld.so.conf.d", tools):
        path.mkdir(parents=True)
    for path in (plan.folder / name for name in ("etc-work", "tools-work", "root", "home")):
        path.mkdir()
    people = ((USER, USER_ID), (OWNER, OWNER_ID))
    files = {
        "passwd": [*_system("passwd"), *(f"{who}:x:{uid}:{uid}::/home/{who}:/bin/bash" for who, uid in people)],
        "group": [*_system("group"), *(f"{who}:x:{uid}:" for who, uid in people)],
        "shadow": [f"{line.split(':')[0]}:*:19000:0:99999:7:::" for line in _system("passwd")]
        + [f"{who}:*:19000:0:99999:7:::" for who, _ in people],
        "hosts": ["127.0.0.1 localhost", *hosts.splitlines()],
        "hostname": [plan.name],
        "machine-id": [uuid.uuid4().hex],
        "ld.so.conf.d/lab-python.conf": [f"{PYTHON}/lib"],
        "ssh/lab_authorized_keys": [public_key.strip()],
        "ssh/lab_sshd_config": [SSHD_CONFIG.format(address=plan.address, host_key=HOST_KEY, user=USER)],
        "lab/init.py": [Path(__file__).with_name("host_init.py").read_text()],
    }
    for name, lines in files.items():
        (etc / name).write_text("".join(f"{line}\n" for line in lines))
    (etc / "shadow").chmod(0o600)
    inner = PYTHON / "bin" / Path(sys._base_executable).resolve().name  # type: ignore[attr-defined]
    if sys.base_prefix != "/usr":
        for name in ("python3", f"python3.{sys.version_info.minor}"):
            (tools / name).write_text(f'#!/bin/sh\nexec {inner} "$@"\n')  # a link would mislead `venv`
            (tools / name).chmod(0o755)


def _system(file: str) -> list[str]:
    """The machine's lines about its services, and none about people."""
    lines = [line for line in Path("/etc", file).read_text().splitlines() if line.count(":") >= 3]
    return [line for line in lines if int(line.split(":")[2]) < 1000 or line.startswith(("nobody:", "nogroup:"))]


def script(plan: Plan, hierarchies: Iterable[str]) -> str:
    """The shell script that is process 1 until the host's root is in place. It first says its pid as we see it."""
    folder = shlex.quote(str(plan.folder))
    steps = [
        "read -r pid rest < /proc/self/stat",
        f"mount -t tmpfs -o size=64m,mode=755 lab {folder}/root",
        f"cd {folder}/root",
        "umask 022",
        "mkdir -p usr etc proc sys dev tmp run/sshd home root opt var/tmp var/log var/empty mnt srv",
        "chmod 700 root; chmod 1777 var/tmp; ln -s /run var/run",
        *(_top(name) for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")),
        "mount --bind -o ro /usr usr",
        _overlay("/etc", plan.folder / "etc", "etc"),
        _overlay("/usr/local/bin", plan.folder / "tools", "usr/local/bin"),
        f"mount --bind {folder}/home home",
        f"mount -t tmpfs -o size={plan.memory_bytes // 4},mode=1777 lab tmp",
        *_python(),
        *(_shared(Path(inside), outside) for inside, outside in plan.share.items()),
        "mount -t proc proc proc",
        f"mount --bind {folder}/boot_id proc/sys/kernel/random/boot_id",
        "mount -t sysfs -o ro sysfs sys",
        *_groups(hierarchies),
        "mount -t tmpfs -o size=1m,mode=755 lab dev",
        f"cp -a {' '.join(f'/dev/{name}' for name in DEVICES)} dev",
        "mkdir dev/pts dev/shm",
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts",
        f"mount -t tmpfs -o size={plan.memory_bytes // 2},mode=1777 lab dev/shm",
        "ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd",
        "ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr",
        f"echo {shlex.quote(plan.name)} > proc/sys/kernel/hostname",
        "mkdir mnt/old; pivot_root . mnt/old; cd /; umount -l mnt/old; rmdir mnt/old",
        *(["ldconfig"] if sysconfig.get_config_var("Py_ENABLE_SHARED") else []),
        'echo "$pid"',
        "exec >/dev/null",
        "exec python3 -I -S /etc/lab/init.py",
    ]
    return "\n".join(steps)


def _top(name: str) -> str:
    """A folder such as /lib: a link into /usr on most machines."""
    return f"if [ -L /{name} ]; then cp -a /{name} {name}; elif [ -d /{name} ]; then {_bind(f'/{name}', name)}; fi"


def _bind(outside: str, inside: str) -> str:
    there = shlex.quote(inside)
    return f"mkdir -p {there}; mount --bind -o ro {shlex.quote(outside)} {there}"


def _overlay(lower: str, upper: Path, inside: str) -> str:
    return f"mount -t overlay -o lowerdir={lower},upperdir={upper},workdir={upper}-work lab {inside}"


def _shared(inside: Path, outside: Path) -> str:
    return _bind(str(outside), str(inside).lstrip("/"))


def _python() -> list[str]:
    """The interpreter we run on, at a place that everybody may enter, and without its packages."""
    if sys.base_prefix == "/usr":
        return []
    inside = str(PYTHON).lstrip("/")
    packages = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})).relative_to(sys.base_prefix)
    bare = f"mount -t tmpfs -o ro,size=4k,mode=755 lab {inside}/{packages}"
    return [_bind(str(Path(sys.base_prefix).resolve()), inside), bare]


def _groups(hierarchies: Iterable[str]) -> list[str]:
    steps = ["mount -t tmpfs -o size=1m,mode=755 lab sys/fs/cgroup"]
    for names in hierarchies:
        place = f"sys/fs/cgroup/{names}"
        steps.append(f"mkdir {place}; mount -t cgroup -o {names} cgroup {place}")
        if "," in names:
            steps += [f"ln -s {names} sys/fs/cgroup/{name}" for name in names.split(",")]
    return steps
