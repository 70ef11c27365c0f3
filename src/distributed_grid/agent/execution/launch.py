"""Command launch: working directory, environment and descriptors of an attempt's command, and why it failed.

`start_command` runs in the shim, so this file imports only the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from errno import EACCES, EDQUOT, ENOENT, ENOEXEC, ENOSPC, ENOTDIR
from typing import Any

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits.cgroups import Cgroup
from distributed_grid.agent.limits.timer import IGNORED_BY_PYTHON
from distributed_grid.posix.boot_clock import boot_ms

NO_ROOM = (ENOSPC, EDQUOT)
START_EXPIRED = "not started in time"


class LaunchFailed(Exception):
    """The command cannot be run; `exit_code` is that of a shell."""

    def __init__(self, reason: str, exit_code: int = 127, *, node_fault: bool = False) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.node_fault = node_fault


def open_output(job: JobDir) -> dict[str, int]:
    """Descriptors of the output files, by name; raises `LaunchFailed`."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output: dict[str, int] = {}
    try:
        for name in (job_dir.STDOUT, job_dir.STDERR):
            output[name] = job.open_job_file(name, append)
    except OSError as error:
        for fd in output.values():
            os.close(fd)
        unwritable = f"its output cannot be written: {error.strerror}"
        raise LaunchFailed(unwritable, 126, node_fault=is_node_fault(error)) from error
    for fd in output.values():
        os.set_blocking(fd, True)
    return output


def start_command(
    spec: dict[str, Any], job: JobDir, output: Iterable[int], cores: list[int], groups: list[Cgroup]
) -> int:
    """Start the command in a session of its own and return its pid; raises `LaunchFailed`. `output` stays open.

    posix_spawn shares this process's memory until the exec, where a fork would copy pages that both touch. Settings
    that it cannot make for the child alone (directory, cores, groups) are made here, inherited, and undone.
    """
    work = f"{job.path}/{job_dir.WORK}"
    where = spec["cwd"] or work
    env = attempt_environment(spec, work)
    all_cores = os.sched_getaffinity(0)
    try:
        os.chdir(where)
    except OSError as error:
        reason = {ENOENT: "no such directory", ENOTDIR: "not a directory"}.get(error.errno or 0)
        raise LaunchFailed(f"{reason}: {where}" if reason else f"cannot enter {where}: {error.strerror}") from error
    nothing = os.open("/dev/null", os.O_RDONLY)
    stdout, stderr = output
    try:
        for group in groups:
            group.join()
        if cores:
            os.sched_setaffinity(0, cores)
        path = find_command(spec["argv"], env)
        if 0 < spec["start_by_boot_ms"] <= boot_ms():  # no slow step comes after this
            raise LaunchFailed(START_EXPIRED, 126, node_fault=True)
        streams = (nothing, stdout, stdout if spec.get("merge") else stderr)
        return os.posix_spawn(
            path,
            spec["argv"],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)],
            setsid=True,
            setsigmask=(),
            setsigdef=IGNORED_BY_PYTHON,  # the others are as `install_signal_handlers` left them
        )
    except OSError as error:
        raise launch_failure(spec["argv"][0], error) from error
    except ValueError as error:
        raise LaunchFailed(f"could not be started: {error}") from error
    finally:
        for group in groups:
            group.release(os.getpid())
        if cores:
            os.sched_setaffinity(0, all_cores)
        os.chdir("/")
        os.close(nothing)


RAY_BOOST_PATH = __file__.rsplit("/", 2)[0] + "/ray_boost"
"""First folder on the path of Python in a Ray-backed boost: it lets Ray tasks use the boost."""


def attempt_environment(spec: dict[str, Any], work: str) -> dict[str, str]:
    """The environment of the command: exactly the passed one, and the GRID_ and CUDA variables of every job."""
    given = {name: value for name, value in spec["env"].items() if name != "GRID_ROLE"}
    files = work.rpartition("/")[0]
    if "GRID_BOOST_GROUP" in given:
        given["PYTHONPATH"] = ":".join(path for path in (RAY_BOOST_PATH, given.get("PYTHONPATH", "")) if path)
        if folder := os.path.dirname(_ray_python(given)):
            given["PATH"] = f"{folder}:{given.get('PATH', os.defpath)}"
    return {
        "PYTHONUNBUFFERED": "1",
        **given,
        "GRID_JOB_DIR": work,
        "GRID_JOB_ID": spec["job_id"],
        "GRID_ATTEMPT_ID": spec["attempt_id"],
        "GRID_NODE": spec["node"],
        "GRID_NOTICE": f"{files}/{job_dir.NOTICE}",
        "GRID_CHECKPOINT": f"{files}/{job_dir.CHECKPOINT}",
        "GRID_CHECKPOINT_DIR": f"{files}/{job_dir.CHECKPOINT_DIR}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that the numbers mean the same devices as where they were measured
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, spec["gpu_indexes"])),
    }


def _ray_python(given: Mapping[str, str]) -> str:
    """The interpreter with Ray, which a program in a Ray-backed boost must find first; empty if it must find its
    own: it was given a PATH, or its user's environment is active. Unnamed it is this agent's own, where that has Ray,
    as in a cluster that is attached."""
    if any(given.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")):
        return ""
    if "GRID_RAY_PYTHON" in given:
        return given["GRID_RAY_PYTHON"]
    from importlib.util import find_spec

    return sys.executable if find_spec("ray") is not None else ""


def is_node_fault(error: OSError) -> bool:
    """True if a full disk is the reason why an attempt cannot be recorded or written."""
    return error.errno in NO_ROOM


def find_command(argv: list[str], env: dict[str, str]) -> str:
    """The file to run, found on the PATH of `env` as a shell finds it."""
    if not argv or not argv[0]:
        raise LaunchFailed("no such command: nothing was given to run")
    name = argv[0]
    if "/" in name:
        return name
    paths = [f"{folder or '.'}/{name}" for folder in env.get("PATH", os.defpath).split(":")]
    paths = [path for path in paths if os.access(path, os.F_OK)]
    if not paths:
        raise LaunchFailed(f"no such command: {name}")
    runnable = (path for path in paths if os.access(path, os.X_OK) and not os.access(f"{path}/.", os.F_OK))
    return next(runnable, paths[0])


def launch_failure(name: str, error: OSError) -> LaunchFailed:
    """The message and exit code for a failed exec."""
    if error.errno in (ENOENT, ENOTDIR):
        if "/" in name and not os.access(name, os.F_OK):
            return LaunchFailed(f"no such command: {name}")
        return LaunchFailed(f"not executable: {name}: the interpreter its first line names is missing", 126)
    if error.errno == ENOEXEC:
        return LaunchFailed(f"not executable: {name}: neither a program nor a script with a #! line", 126)
    if error.errno == EACCES:
        return LaunchFailed(f"not executable: {name}", 126)
    return LaunchFailed(f"could not be started: {name}: {error.strerror}", 126)


MACHINE_VARIABLES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
    "PYTHONPATH", "LD_LIBRARY_PATH",
})  # fmt: skip
NODE_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LD_LIBRARY_PATH")


def node_environment(env: Mapping[str, str], given: Collection[str] = ()) -> dict[str, str]:
    """The caller's variables, with this node's own where they depend on the machine; `given` ones stay.

    Last on the PATH is this interpreter's folder: `python` works even if the system has none.
    """
    passed = {name: value for name, value in env.items() if name not in MACHINE_VARIABLES or name in given}
    own = {name: os.environ[name] for name in NODE_VARIABLES if name in os.environ}
    path = os.environ.get("PATH", os.defpath)
    own["PATH"] = f"{path}:{os.path.dirname(sys.executable)}"
    return own | passed
