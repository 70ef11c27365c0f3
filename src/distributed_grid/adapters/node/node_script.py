"""Operations on a node: sent there as one text, run by whatever Python it has, requests on stdin, answers on stdout.

Only the standard library is used, and the text parses on old Pythons, so that they can say that they are too old. A
request is a length, a line end, JSON, then the bytes it announces; each gets one answer, and after a failure the script
ends. Every operation may be repeated: a new version is built aside and renamed, the old one stays usable until then.
It is started for every link: what only some operations need is imported by them.
"""

# ruff: noqa: UP006, UP031, UP035, UP045 (what newer spellings there are, an old Python cannot read)

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import stat
import sys
import time
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

Map = Dict[str, Any]
MIN_PYTHON = (3, 11)
MARK = "\x1eGRID "
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
NEEDED_BYTES = 100 * 1024 * 1024
MAX_SOCKET_BYTES = 100
VERSION_FILES = ("version", "launched", "building", "ray-version", "ray-building")
STALE_SECONDS = 3600
MAX_LOG_BYTES = 10 * 1024 * 1024
START_SECONDS, TERM_SECONDS, KILL_SECONDS, END_SECONDS = 15.0, 10.0, 5.0, 45.0
LIST_SECONDS = 100.0
MAX_OUTPUT_BYTES = 512 * 1024
SESSION_VARIABLES = ("SSH_", "XDG_SESSION", "DBUS_", "LC_GRID")
HOME = os.path.join(os.path.expanduser("~"), ".distributed_grid")
VERSIONS, WHEELS, AGENTS = (os.path.join(HOME, name) for name in ("versions", "wheels", "agents"))


class ScriptError(Exception):
    """Why a step failed, in one sentence."""


def send_message(message: Map) -> None:
    """One marked line to the other side; output of login scripts has no mark."""
    sys.stdout.write(MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def step(text: str) -> None:
    send_message({"step": text})


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ScriptError("%r is no name for a file" % name)
    return name


def agent_dir_of(request: Map) -> str:
    return os.path.join(AGENTS, check_name(request["grid"]), check_name(request["node"]))


def make_private_dir(folder: str) -> None:
    """Have a directory that only its owner can use."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ScriptError("%s is not a directory of your own" % folder)
    if status.st_mode & 0o077:
        os.chmod(folder, 0o700)


def read_text(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def write_text(path: str, text: str) -> None:
    """Whole or not at all; where there is no room for a second file, in place, which a full disk has room for."""
    fresh = "%s.%s.new" % (path, os.urandom(4).hex())
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as failure:
        if os.path.lexists(fresh):
            os.unlink(fresh)
        if failure.errno not in (errno.ENOSPC, errno.EDQUOT) or not os.path.isfile(path):
            raise
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "r+b", buffering=0) as old:
            old.write(text.encode().ljust(os.fstat(old.fileno()).st_size))


def remove_tree(folder: str) -> None:
    """Remove a directory with all in it, as far as that is possible."""
    if os.path.lexists(folder):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """One who starts or stops at a time; a lock that goes with its process. A disk that takes no file more has none:
    what runs there must be stopped all the same."""
    try:
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def list_dir(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---------------------------------------------------------------- inspecting


def inspect(request: Map, source: BinaryIO) -> Map:
    """Inventory: Python, machine, versions, wheels, agent."""
    import platform

    libc, libc_version = platform.libc_ver()
    folder = agent_dir_of(request)
    return {
        "python": platform.python_version(),
        "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "machine": platform.machine(),
        "libc": libc or ("musl" if list_dir("/lib") and any("musl" in name for name in list_dir("/lib")) else ""),
        "libc_version": libc_version,
        "versions": [name for name in list_dir(VERSIONS) if NAME.fullmatch(name) and is_complete(name)],
        "wheels": [name[: -len(".whl")] for name in list_dir(WHEELS) if name.endswith(".whl")],
        "version": read_text(folder, "version").strip(),
        "running": read_text(folder, "launched").strip() if agent_pid(folder) else "",
    }


def is_complete(version: str) -> bool:
    """True if every file of a version is there in its full size; a crash may have cut some short."""
    try:
        files = json.loads(read_text(VERSIONS, version, "files.json"))["files"]
        root = os.path.join(VERSIONS, version)
        return all(os.stat(os.path.join(root, name)).st_size == size for name, size in files) and bool(files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def start_ticks(pid: int) -> int:
    """Start time of a process in ticks since boot; 0 if it is gone or a zombie."""
    fields = read_text("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


def agent_pid(folder: str) -> int:
    """The agent that runs in a directory; 0 where none does."""
    try:
        noted = json.loads(read_text(folder, "agent.pid"))
        pid, start, boot = int(noted["pid"]), int(noted["start"]), str(noted["boot"])
    except (ValueError, KeyError, TypeError):
        return 0
    same_boot = boot == read_text("/proc/sys/kernel/random/boot_id").strip()
    return pid if same_boot and start and start_ticks(pid) == start else 0


# ---------------------------------------------------------------- installing


def build(request: Map, source: BinaryIO) -> Map:
    """Take the wheels that were missing, and have this version whole; the agent's next start uses it."""
    version, folder = check_name(request["version"]), agent_dir_of(request)
    for place in (HOME, VERSIONS, WHEELS, AGENTS, os.path.dirname(folder), folder):
        make_private_dir(place)
    receive_wheels(request["wheels"], source)
    if not is_complete(version):
        step("building the environment")
        write_text(os.path.join(folder, "building"), version)
        build_aside(version, request["wheels"])
    write_text(os.path.join(folder, "version"), version)
    if os.path.lexists(os.path.join(folder, "building")):
        os.unlink(os.path.join(folder, "building"))
    remove_unused(STALE_SECONDS)
    return {"version": version}


def receive_wheels(wheels: List[Map], source: BinaryIO) -> None:
    """Keep the announced bytes, each under its digest."""
    import hashlib

    disk = os.statvfs(HOME)
    free = disk.f_bavail * disk.f_frsize
    if free < NEEDED_BYTES:
        megabytes = (free >> 20, HOME, NEEDED_BYTES >> 20)
        raise ScriptError("only %d MB are free for %s; %d MB are needed" % megabytes)
    for wheel in wheels:
        digest = check_name(wheel["sha256"])
        path = os.path.join(WHEELS, digest + ".whl")
        if wheel["sent"]:
            fresh = "%s.%s.new" % (path, os.urandom(4).hex())
            with open(fresh, "wb") as file:
                copy_exactly(source, file, int(wheel["size"]))
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        os.utime(path)  # young again: nobody sweeps it away before it is unpacked
        with open(path, "rb") as file:
            actual = hashlib.sha256(file.read()).hexdigest()
        if actual != digest:
            os.unlink(path)
            raise ScriptError("%s arrived damaged; try again" % wheel["name"])


def copy_exactly(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        chunk = source.read(min(size, 1 << 20))
        if not chunk:
            raise ScriptError("the connection ended while files were being sent")
        target.write(chunk)
        size -= len(chunk)


def build_aside(version: str, wheels: List[Map]) -> None:
    """Build a version under another name and rename it, so that it is there whole or not at all."""
    import venv

    aside = os.path.join(VERSIONS, ".new-" + os.urandom(8).hex())
    target = os.path.join(VERSIONS, version)
    try:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(aside)
        inside = os.path.join("lib", "python%d.%d" % sys.version_info[:2], "site-packages")
        for wheel in wheels:
            unpack(os.path.join(WHEELS, wheel["sha256"] + ".whl"), os.path.join(aside, inside))
        manifest = {"files": file_sizes(aside), "wheels": [wheel["sha256"] for wheel in wheels]}
        write_text(os.path.join(aside, "files.json"), json.dumps(manifest))
        if os.path.lexists(target):  # one that a crash left in pieces
            os.rename(target, os.path.join(VERSIONS, ".old-" + os.urandom(8).hex()))
        try:
            os.rename(aside, target)
        except OSError:  # another grid was quicker with the very same version
            if not is_complete(version):
                raise
    finally:
        remove_tree(aside)


def unpack(path: str, target: str) -> None:
    """Put the files of a wheel where Python finds them; its scripts are not needed."""
    import shutil
    import zipfile

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            inside = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
            if name.endswith("/") or ".data/" in inside.split("/", 1)[0] + "/":
                continue
            if inside.startswith("/") or ".." in inside.split("/"):
                raise ScriptError("%s has a file that leads outside: %r" % (os.path.basename(path), name))
            goal = os.path.join(target, *inside.split("/"))
            os.makedirs(os.path.dirname(goal), exist_ok=True)
            with archive.open(name) as packed, open(goal, "wb") as file:
                shutil.copyfileobj(packed, file)
            if archive.getinfo(name).external_attr >> 16 & 0o111:
                os.chmod(goal, 0o700)


def file_sizes(root: str) -> List[Tuple[str, int]]:
    sizes = []
    for where, _, names in os.walk(root):
        for name in names:
            path = os.path.join(where, name)
            if not os.path.islink(path):
                sizes.append((os.path.relpath(path, root), os.stat(path).st_size))
    return sizes


def used_versions() -> List[str]:
    grids = [os.path.join(AGENTS, grid) for grid in list_dir(AGENTS)]
    folders = [os.path.join(grid, node) for grid in grids for node in list_dir(grid)]
    return [read_text(folder, note).strip() for folder in folders for note in VERSION_FILES]


def remove_unused(wheel_seconds: float) -> None:
    """Remove remains of crashes, versions without an agent, and wheels unused for this time."""
    used = used_versions()
    for name in list_dir(VERSIONS):
        path = os.path.join(VERSIONS, name)
        left_over = name.startswith(".old-") or (name.startswith(".new-") and age_seconds(path) > STALE_SECONDS)
        if left_over or (not name.startswith(".") and name not in used):
            remove_tree(path)
    needed = set()
    for name in list_dir(VERSIONS):
        try:
            needed.update(json.loads(read_text(VERSIONS, name, "files.json"))["wheels"])
        except (ValueError, KeyError, TypeError):
            continue
    for name in list_dir(WHEELS):
        path = os.path.join(WHEELS, name)
        if name[: -len(".whl")] not in needed and age_seconds(path) >= wheel_seconds:
            try:
                os.unlink(path)
            except FileNotFoundError:  # another one on this machine was quicker
                continue


def age_seconds(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


# ---------------------------------------------------------------- the agent


def link(request: Map, source: BinaryIO) -> Map:
    """A fresh place for the socket of the agent's channel; those of earlier connections are removed."""
    folder = agent_dir_of(request)
    if not is_complete(read_text(folder, "version").strip() or "none"):
        raise ScriptError("the package is not installed there; type: grid cluster start %s" % request["node"])
    remove_sockets(folder)
    run = os.path.join(folder, "run")
    make_private_dir(run)
    path = os.path.join(run, os.urandom(8).hex() + ".sock")
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:  # the kernel's limit is 108 bytes
        run = "/tmp/grid-" + os.urandom(8).hex()  # noqa: S108 (nobody can guess it)
        os.mkdir(run, 0o700)
        write_text(os.path.join(folder, "elsewhere"), run)
        path = os.path.join(run, "agent.sock")
    return {"socket": path}


def remove_sockets(folder: str) -> None:
    remove_tree(os.path.join(folder, "run"))
    elsewhere = read_text(folder, "elsewhere").strip()
    if re.fullmatch(r"/tmp/grid-[0-9a-f]{16}", elsewhere):  # noqa: S108
        remove_tree(elsewhere)
        os.unlink(os.path.join(folder, "elsewhere"))


def launch(request: Map, source: BinaryIO) -> Map:
    """Tell the agent its socket, and start it where it does not run. Once it was stopped, only a new link starts it."""
    folder = agent_dir_of(request)
    with locked(folder):
        if not os.path.isdir(os.path.dirname(request["socket"])):
            raise ScriptError("it was stopped meanwhile")
        return launch_locked(request, folder)


def launch_locked(request: Map, folder: str) -> Map:
    link = {"node": request["node"], "socket": request["socket"], "linger": request.get("linger", 0)}
    came_in = os.environ.get("SSH_CONNECTION", "").split()
    if len(came_in) == 4:
        link["address"] = came_in[2]  # by which the cluster knows this machine
    write_text(os.path.join(folder, "link.json"), json.dumps(link))
    pid = agent_pid(folder)
    if pid:
        return {"pid": pid, "started": False, "running": read_text(folder, "launched").strip()}
    version = read_text(folder, "version").strip()
    write_text(os.path.join(folder, "launched"), version)
    return {"pid": start_agent(folder, version), "started": True, "running": version}


def agent_command(folder: str, version: str) -> List[str]:
    python = os.path.join(VERSIONS, check_name(version), "bin", "python")
    return [python, "-I", "-m", "distributed_grid.agent", "--dir", folder]


def agent_environment() -> Dict[str, str]:
    """Environment of the login, without the variables of this session."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SESSION_VARIABLES)}


def start_agent(folder: str, version: str) -> int:
    """Start the agent in a session of its own, and wait until it names itself."""
    import subprocess

    log = os.path.join(folder, "agent.log")
    if os.path.exists(log) and os.stat(log).st_size > MAX_LOG_BYTES:
        os.replace(log, log + ".old")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as words:
        before = words.tell()
        process = subprocess.Popen(
            agent_command(folder, version),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            env=agent_environment(),
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        pid = agent_pid(folder)
        if pid:
            process.returncode = 0  # it lives on by itself: nobody here waits for it
            return pid
        if process.poll():  # 0 says that another one is just starting
            break
        time.sleep(0.02)
    else:
        process.kill()
        process.wait()
        raise ScriptError("the agent did not come up within %d s; see %s" % (START_SECONDS, log))
    lines = read_text(log)[before:].strip().splitlines()
    raise ScriptError("the agent ended while starting: %s" % (lines[-1][:300] if lines else "see " + log))


def retire(request: Map, source: BinaryIO) -> Map:
    """End an agent of another version; its jobs continue, and the next one finds them."""
    folder = agent_dir_of(request)
    if read_text(folder, "launched").strip() == read_text(folder, "version").strip():
        return {"retired": False}
    return {"retired": stop_agent(folder)}


def stop_agent(folder: str) -> bool:
    """End the agent, first by a request, then by a kill; True if there was one."""
    pids = [agent_pid(folder), *starting_agents(folder)]
    for pid in filter(None, pids):
        end_process(pid)
    return any(pids)


def starting_agents(folder: str) -> Iterator[int]:
    """Agents of a directory, by their command: one that has just been started has not noted its pid yet. Anybody can
    give a process that command: only this user's count."""
    command = "\0".join(("distributed_grid.agent", "--dir", folder, ""))
    for name in filter(str.isdigit, list_dir("/proc")):
        listing = read_text("/proc", name, "cmdline")
        if command in listing and "\0--end\0" not in listing and owner_of(os.path.join("/proc", name)) == os.geteuid():
            yield int(name)


def owner_of(path: str) -> Optional[int]:
    """Whose a file or process is; None where it is gone."""
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def end_process(pid: int) -> None:
    """Ask a process to go, insist when it does not. Safe where it is gone."""
    start = start_ticks(pid)
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        try:
            os.kill(pid, number)
            while time.monotonic() < deadline:
                if not start or start_ticks(pid) != start:
                    return
                time.sleep(0.02)
        except ProcessLookupError:
            return
    raise ScriptError("the agent (pid %d) cannot be ended" % pid)


def stop(request: Map, source: BinaryIO) -> Map:
    """Leave no process and no socket: the agent goes, then every job it left, then the channel's place."""
    folder = agent_dir_of(request)
    if not os.path.isdir(folder):
        return {"stopped": False}
    with locked(folder):
        return stop_locked(folder)


def stop_locked(folder: str) -> Map:
    step("stopping the agent")
    was_there = stop_agent(folder)
    version = read_text(folder, "launched").strip() or read_text(folder, "version").strip()
    if os.path.isdir(os.path.join(folder, "jobs")):
        stop_jobs(folder, version)
    remove_sockets(folder)
    for name in ("link.json", "agent.pid", "launched"):
        if os.path.lexists(os.path.join(folder, name)):
            os.unlink(os.path.join(folder, name))
    return {"stopped": was_there}


def stop_jobs(folder: str, version: str) -> None:
    """Stop whatever jobs are left below a directory; the agent's own code knows how."""
    import subprocess

    if not version or not is_complete(version):
        raise ScriptError("the environment that knows how to stop jobs is gone; install it again, then stop")
    step("stopping what is left of jobs")
    try:
        done = subprocess.run(
            [*agent_command(folder, version), "--end"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            env=agent_environment(),
            timeout=END_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ScriptError("jobs are still being stopped after %d s; try again" % END_SECONDS) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ScriptError("jobs could not be stopped: %s" % (lines[-1][:300] if lines else "exit %d" % done.returncode))


# ---------------------------------------------------------------- what jobs have left


def list_results(request: Map, source: BinaryIO) -> Map:
    """The results that attempts have left, each with its number of files and their bytes, or with the reason why they
    cannot be counted; the agent's own code knows how. `attempts` has the manifest of each."""
    import subprocess

    folder = agent_dir_of(request)
    asked = {check_name(name): str(digest) for name, digest in request["attempts"].items()}
    there = {name: digest for name, digest in asked.items() if os.path.isdir(os.path.join(folder, "jobs", name))}
    if not there:
        return {"results": {}}
    version = read_text(folder, "version").strip()
    again = "; type: grid cluster install %s" % request["node"]
    if not version or not is_complete(version):
        raise ScriptError("the environment that knows how to list results is gone" + again)
    python = agent_command(folder, version)[0]
    try:
        done = subprocess.run(
            [python, "-I", "-m", "distributed_grid.agent.files.result_listing", folder],
            input=json.dumps(there).encode(),
            capture_output=True,
            cwd="/",
            env=agent_environment(),
            timeout=LIST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ScriptError("the results could not be listed within %d s" % LIST_SECONDS) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1][:300] if lines else "exit %d" % done.returncode
        raise ScriptError("the results could not be listed: %s%s" % (reason, again))
    return {"results": json.loads(done.stdout.decode())}


def read_output(request: Map, source: BinaryIO) -> Map:
    """Parts of the output of attempts, each from an offset on, in base64; `more` where one answer does not hold all.
    `files` are attempts with the name and the offset of a file of each; `starts` says where a part begins whose
    beginning was dropped."""
    import base64

    jobs, room, parts, starts = os.path.join(agent_dir_of(request), "jobs"), MAX_OUTPUT_BYTES, [], {}
    for attempt, name, offset in request["files"]:
        if name not in ("stdout", "stderr"):
            raise ScriptError("%r is no output" % name)
        start = max(int(offset), dropped_output(jobs, check_name(attempt), name))
        data = read_part(os.path.join(jobs, attempt), name, start, room)
        if data:
            if start > int(offset):
                starts["%s/%s" % (attempt, name)] = start
            parts.append((attempt, name, base64.b64encode(data).decode()))
            room -= len(data)
        if not room:
            return {"parts": parts, "more": True, "starts": starts}
    return {"parts": parts, "more": False, "starts": starts}


def dropped_output(jobs: str, attempt: str, name: str) -> int:
    """Bytes at the head of an output file that its shim has dropped; 0 where none were."""
    try:
        with open(os.path.join(jobs, ".control", attempt, "output.json")) as file:
            counts = json.loads(file.read(MAX_SOCKET_BYTES * 10))
    except (OSError, ValueError):
        return 0
    dropped = counts.get(name) if isinstance(counts, dict) else None
    return dropped if type(dropped) is int else 0


def read_part(folder: str, name: str, offset: int, room: int) -> bytes:
    """Content of a file in a job's directory; nothing where something else is in the place of either."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        directory = os.open(folder, flags | os.O_DIRECTORY)
    except OSError:
        return b""
    try:
        file = os.open(name, flags, dir_fd=directory)
        try:
            return os.pread(file, room, offset) if stat.S_ISREG(os.fstat(file).st_mode) else b""
        finally:
            os.close(file)
    except OSError:
        return b""
    finally:
        os.close(directory)


# ---------------------------------------------------------------- removing


def purge(request: Map, source: BinaryIO) -> Map:
    """Remove what was installed for this grid's node, and what no other grid needs."""
    folder = agent_dir_of(request)
    if agent_pid(folder):
        raise ScriptError("the agent still runs")
    remove_tree(folder)
    remove_unused(0)
    for place in (os.path.dirname(folder), AGENTS, VERSIONS, WHEELS, HOME):
        try:
            os.rmdir(place)
        except OSError:  # others use it
            continue
    return {"purged": True}


OPERATIONS = {
    "inspect": inspect,
    "build": build,
    "link": link,
    "launch": launch,
    "retire": retire,
    "stop": stop,
    "list-results": list_results,
    "read-output": read_output,
    "purge": purge,
}


def handle(request: Map, source: BinaryIO) -> Optional[Map]:
    """The answer to one request; None after a failure, which has been sent."""
    chosen: Callable[[Map, BinaryIO], Map] = OPERATIONS[request["operation"]]
    try:
        return chosen(request, source)
    except ScriptError as problem:
        send_message({"failed": str(problem)})
    except OSError as failure:
        send_message({"failed": "%s: %s" % (failure.filename or request["operation"], failure.strerror or failure)})
    return None


def main() -> None:
    os.umask(0o077)
    if sys.version_info < MIN_PYTHON:
        template = "it has Python %d.%d, at least %d.%d is needed; set `python:` for this node"
        send_message({"failed": template % (sys.version_info[:2] + MIN_PYTHON)})
        return
    source = sys.stdin.buffer
    while True:
        size = source.readline()
        if not size:
            return
        done = handle(json.loads(source.read(int(size)).decode()), source)
        if done is None:
            return
        send_message({"done": done})


if __name__ == "__main__":
    main()
