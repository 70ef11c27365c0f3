"""Ray on a node: inspected, started and stopped. Sent together with `node_script.py`, which it extends.

Only what this grid started is ever ended: its processes are in one session, or carry a mark in their environment (of
which Ray overwrites some), or descend from those. The mark is recorded before anything is started, so that whatever a
broken connection leaves is found again. Tokens and keys arrive as data, lie in files of mode 0600, and are never on a
command line.
"""

# ruff: noqa: UP006, UP031, UP035, UP045 (what newer spellings there are, an old Python cannot read)

import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from typing import BinaryIO, Dict, Iterable, List, Optional, Set, Tuple

from distributed_grid.adapters.node.node_script import (
    AGENTS,
    HOME,
    OPERATIONS,
    STALE_SECONDS,
    VERSIONS,
    WHEELS,
    Map,
    ScriptError,
    agent_dir_of,
    agent_environment,
    build_aside,
    check_name,
    is_complete,
    locked,
    make_private_dir,
    read_text,
    receive_wheels,
    remove_unused,
    send_message,
    start_ticks,
    step,
    write_text,
)

MARK_VARIABLE = "GRID_RAY_MARK"
RECORD_NAME = "started.json"
MAX_TEMP_BYTES = 39  # what Ray puts behind it is up to 68 bytes long, and the kernel takes 107
MIN_STORE_BYTES, MAX_STORE_BYTES, MAX_SIMULATED_STORE_BYTES = 80 * 1024**2, 200 * 1024**3, 1024**3
RAY_STARTUP_SECONDS = 30.0  # how long Ray waits for its own processes
HEAD_TIMEOUT_SECONDS = 8.0
RAY_SECONDS, EXIT_SECONDS, KILL_ALL_SECONDS, QUERY_SECONDS = 100.0, 3.0, 10.0, 30.0
HEAD_ANSWERS = "Ray's head answers"
RAY_MAIN = "import sys; sys.argv[0] = 'ray'; from ray.scripts.scripts import main; main()"
RAY_START = (  # without the commands that Ray itself can do without: loading them takes longer than all the rest
    "import sys\n"
    "sys.argv[0] = 'ray'\n"
    "unused = ('ray.serve.scripts', 'ray.dashboard.modules.job.cli', 'ray.util.state.state_cli')\n"
    "sys.modules.update(dict.fromkeys(unused))\n"
    "try: from ray.scripts.scripts import main\n"
    "except ImportError:\n"
    "    for name in unused: del sys.modules[name]\n"
    "    from ray.scripts.scripts import main\n"
    "main()"
)
VERSION_QUERY = (
    "import importlib.metadata as m, json, platform\n"
    "try: ray = m.version('ray')\n"
    "except m.PackageNotFoundError: ray = ''\n"
    "print(json.dumps({'python': platform.python_version(), 'ray': ray}))"
)


def ray_dir(request: Map) -> str:
    return os.path.join(agent_dir_of(request), "ray")


def ray_inspect(request: Map, source: BinaryIO) -> Map:
    """Which Python and Ray would be used, and what runs of ours; without `versions` only the interpreter,
    where there is one, and the latter."""
    state = ray_state(ray_dir(request))
    if state["state"] == "stopped":
        check_ports(request.get("ports") or {})
    if request.get("versions", True):
        state.update(query_versions(find_ray_python(request)))
    else:
        try:
            state["interpreter"] = find_ray_python(request)
        except ScriptError:  # removed while Ray runs
            state["interpreter"] = ""
    return state


def find_ray_python(request: Map) -> str:
    """The interpreter that has Ray: the one the config names, else the one the grid has installed."""
    wanted = str(request.get("python") or "")
    if not wanted:
        version = read_text(agent_dir_of(request), "ray-version").strip()
        if not version or not is_complete(version):
            raise ScriptError("Ray is not installed there; type: grid cluster install --ray %s" % request["node"])
        return os.path.join(VERSIONS, version, "bin", "python")
    path = os.path.expanduser(wanted) if wanted.startswith("~/") else wanted
    path_found = shutil.which(path)
    if not path_found:
        raise ScriptError("it has no %s (`ray.python`)" % wanted)
    return path_found


def query_versions(python: str) -> Map:
    """The versions of an interpreter and its Ray."""
    try:
        asked = [python, "-c", VERSION_QUERY]
        done = subprocess.run(asked, capture_output=True, timeout=QUERY_SECONDS, cwd="/", check=False)
        answer = json.loads(done.stdout.decode(errors="replace").strip().splitlines()[-1])
        versions = {"python": str(answer["python"]), "ray": str(answer["ray"])}
    except (OSError, ValueError, KeyError, IndexError, TypeError, subprocess.SubprocessError):
        raise ScriptError("%s does not say which Python it is" % python) from None
    if not versions["ray"]:
        raise ScriptError("%s has no Ray" % python)
    return dict(versions, interpreter=python)


def ray_installed(request: Map, source: BinaryIO) -> Map:
    """Default environment with Ray."""
    return {"version": read_text(agent_dir_of(request), "ray-version").strip()}


def ray_build(request: Map, source: BinaryIO) -> Map:
    """Take the wheels that were missing, and have this environment whole; the next start of Ray uses it."""
    version, folder = check_name(request["version"]), agent_dir_of(request)
    for place in (HOME, VERSIONS, WHEELS, AGENTS, os.path.dirname(folder), folder):
        make_private_dir(place)
    needed, free = 5 * int(request["bytes"]), shutil.disk_usage(HOME).free
    if free < needed:
        raise ScriptError("only %d MB are free for %s; %d MB are needed" % (free >> 20, HOME, needed >> 20))
    receive_wheels(request["wheels"], source)
    if not is_complete(version):
        step("building Ray's environment")
        write_text(os.path.join(folder, "ray-building"), version)
        build_aside(version, request["wheels"])
        script = os.path.join(VERSIONS, version, "bin", "ray")
        write_text(script, "#!%s/bin/python\n%s\n" % (os.path.join(VERSIONS, version), RAY_MAIN.replace("; ", "\n")))
        os.chmod(script, 0o700)
    write_text(os.path.join(folder, "ray-version"), version)
    if os.path.lexists(os.path.join(folder, "ray-building")):
        os.unlink(os.path.join(folder, "ray-building"))
    remove_unused(STALE_SECONDS)
    return {"version": version}


# ---------------------------------------------------------------- what runs


def read_record(folder: str) -> Map:
    """Last begun Ray node here, since this boot; empty if none."""
    try:
        note = json.loads(read_text(folder, RECORD_NAME))
    except ValueError:
        return {}
    same_boot = isinstance(note, dict) and note.get("boot") == boot_id()
    return note if same_boot else {}


def boot_id() -> str:
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def ray_state(folder: str) -> Map:
    """`running` when everything that Ray cannot do without is there, `broken` when only some of it is, or `stopped`."""
    note = read_record(folder)
    pids = own_processes(note)
    needed = {"raylet"} | ({"gcs_server"} if note.get("role") == "head" else set())
    there = {name: pid for pid in pids for name in [program_name(pid)] if name in needed}
    whole = needed <= set(there) and bool(note.get("session"))
    return {
        "state": "running" if pids and whole else "broken" if pids else "stopped",
        "role": note.get("role", ""),
        "session": note.get("session", ""),
        "parameters": note.get("parameters", {}),
        "temp": note.get("temp", ""),
        "token_path": os.path.join(folder, "token"),
        "pid": there.get("raylet", 0),
    }


def own_processes(note: Map) -> Set[int]:
    """The living processes of what was begun under a note."""
    if not note:
        return set()
    wanted = ("%s=%s" % (MARK_VARIABLE, note["mark"])).encode()
    session = int(note.get("leader", 0))
    leads = start_ticks(session) if session else 0
    if leads and leads != note.get("leader_start"):
        session = 0  # the number belongs to somebody else now, so nobody of ours can be left under it
    pids, parents = set(), {}
    for name in os.listdir("/proc"):
        fields = read_text("/proc/%s/stat" % name).rpartition(")")[2].split() if name.isdigit() else []
        if len(fields) > 3 and fields[0] not in "ZX":
            parents[int(name)] = int(fields[1])
            is_in = session and int(fields[3]) == session
            if is_in or wanted in read_bytes("/proc/%s/environ" % name).split(b"\0"):
                pids.add(int(name))
    while True:
        more = {pid for pid, parent in parents.items() if parent in pids} - pids
        if not more:
            return pids
        pids |= more


def read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def program_name(pid: int) -> str:
    try:
        return os.path.basename(os.readlink("/proc/%d/exe" % pid))
    except OSError:
        return ""


# ---------------------------------------------------------------- starting


def ray_start(request: Map, source: BinaryIO) -> Map:
    """Have Ray running with these parameters; what runs with them already is left alone."""
    folder = ray_dir(request)
    for place in (HOME, os.path.dirname(folder), folder):
        make_private_dir(place)
    with locked(folder):
        return start_locked(request, folder)


def start_locked(request: Map, folder: str) -> Map:
    python = find_ray_python(request)
    parameters = {"options": request["options"], "tls": bool(request.get("tls")), "auth": request["auth"]}
    life = ray_state(folder)
    same = life["parameters"] == parameters and request.get("session") in (None, "", life["session"])
    if life["state"] == "running" and same:
        return dict(life, started=False)
    if life["state"] == "running" and not request.get("replace"):
        raise ScriptError(
            "Ray runs there with other settings (%s); type: grid cluster stop %s, then start it again"
            % (differences(life["parameters"], parameters) or "another cluster", request["node"])
        )
    is_orphaned = request.get("session") not in (None, "", life["session"])  # its head is gone, and another came
    ended = stop_processes(read_record(folder), is_orphaned)
    check_ports(request.get("ports") or {}, EXIT_SECONDS if ended else 0.0)
    temp = make_temp_dir(folder)
    command = [python, "-c", RAY_START, "start", "--temp-dir", temp, *(str(word) for word in request["options"])]
    if "--object-store-memory" not in command:
        store = default_store_bytes(int(request.get("memory_bytes") or 0), int(request.get("simulated") or 0))
        command += ["--object-store-memory", str(store)]
    deadline = time.monotonic() + RAY_SECONDS
    base: Map = {"boot": boot_id(), "role": request["role"], "parameters": parameters, "temp": temp}
    while True:
        note = dict(base, mark=secrets.token_hex(8))
        write_text(os.path.join(folder, RECORD_NAME), json.dumps(note))
        environ = ray_environment(request, folder, str(note["mark"]))
        try:
            note["session"] = run_ray_start(command, environ, folder, note, deadline)
            break
        except RayStartTimeout:
            stop_processes(note)
            if time.monotonic() + RAY_STARTUP_SECONDS > deadline:
                raise
            step("Ray was too slow to start; once more")
        except BaseException:
            stop_processes(note)
            raise
    write_text(os.path.join(folder, RECORD_NAME), json.dumps(note))
    remove_old_sessions(temp, str(note["session"]))
    return dict(ray_state(folder), started=True)


class RayStartTimeout(ScriptError):
    """Ray gave up its own start because a busy machine was too slow for it."""


def default_store_bytes(memory_bytes: int, simulated: int = 0) -> int:
    """Default size of Ray's object store: a part of the memory, within shared memory. Of several simulated nodes on
    this machine each gets a small one, and all of them fit into half of that."""
    memory = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = MAX_SIMULATED_STORE_BYTES if simulated else MAX_STORE_BYTES
    shared = shutil.disk_usage("/dev/shm").total // (2 * max(simulated, 1))  # noqa: S108
    return max(min(memory * 3 // 10, shared, most), MIN_STORE_BYTES)


def differences(old: Map, new: Map) -> str:
    """The first options that are not what they were."""
    lists = ([word for word in each.get("options", []) if word != "--head"] for each in (old, new))
    before, after = (dict(zip(words[::2], words[1::2])) for words in lists)  # noqa: B905
    changed = [name for name in sorted(set(before) | set(after)) if before.get(name) != after.get(name)]
    return ", ".join("%s %s, not %s" % (n, before.get(n, "unset"), after.get(n, "unset")) for n in changed[:3])


def make_temp_dir(folder: str) -> str:
    """Directory of Ray's sockets: in our own directory if its name is short enough, else at a random name. Ray opens
    the directory itself to everybody; the one above it stays private."""
    temp = own_temp_dir(folder)
    if len(os.fsencode(temp)) > MAX_TEMP_BYTES:
        temp = read_temp_elsewhere(folder)
        if not temp:
            temp = "/tmp/grid-" + secrets.token_hex(8) + "/r"  # noqa: S108
            write_text(os.path.join(folder, "elsewhere"), temp)
    make_private_dir(os.path.dirname(temp))
    make_private_dir(temp)
    return temp


def own_temp_dir(folder: str) -> str:
    return os.path.join(HOME, "r", base64.b32encode(hashlib.sha256(folder.encode()).digest())[:4].decode().lower())


def read_temp_elsewhere(folder: str) -> str:
    noted = read_text(folder, "elsewhere").strip()
    return noted if re.fullmatch(r"/tmp/grid-[0-9a-f]{16}/r", noted) else ""  # noqa: S108


def ray_environment(request: Map, folder: str, mark: str) -> Dict[str, str]:
    """The login's environment with what Ray is to use; the secrets themselves are in files."""
    environ = {name: value for name, value in agent_environment().items() if not name.startswith("RAY_")}
    environ.update(
        {MARK_VARIABLE: mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"},
    )
    environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # with it, Ray's client server now and then dies while it forks
    if request.get("simulated"):  # else each node starts a worker for every core that it only declares
        environ.update({"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"})
    environ["RAY_AUTH_MODE"] = "disabled"
    if request["auth"] == "token":
        path = os.path.join(folder, "token")
        write_text(path, str(request["token"]))
        environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path})
    if request.get("tls"):
        environ["RAY_USE_TLS"] = "1"
        for name, text in sorted(request["tls"].items()):
            path = os.path.join(folder, "tls-%s.pem" % name)
            write_text(path, str(text))
            environ["RAY_TLS_" + {"cert": "SERVER_CERT", "key": "SERVER_KEY", "ca": "CA_CERT"}[name]] = path
    return environ


def run_ray_start(command: List[str], environ: Dict[str, str], folder: str, note: Map, deadline: float) -> str:
    """Run `ray start` in a session of its own to its end, noting which; the name of Ray's session."""
    latest = os.path.join(note["temp"], "session_latest")
    if os.path.islink(latest):
        os.unlink(latest)
    log = os.path.join(folder, "start.log")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as words:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            cwd="/",
            env=environ,
            start_new_session=True,
        )
    note.update(leader=process.pid, leader_start=start_ticks(process.pid))
    write_text(os.path.join(folder, RECORD_NAME), json.dumps(note))
    announced = note["role"] != "head"
    head, heard, probed = head_address(command), time.monotonic(), 0.0
    while process.poll() is None:
        if time.monotonic() - probed > 1:
            probed = time.monotonic()
            heard = probed if head is None or answers(head) else heard
        if head is not None and time.monotonic() - heard > HEAD_TIMEOUT_SECONDS:
            process.kill()
            process.wait()
            raise ScriptError("Ray's head at %s:%d does not answer" % head)
        if not announced and os.path.exists(os.path.join(latest, "sockets", "raylet")):
            step(HEAD_ANSWERS)
            announced = True
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise ScriptError("Ray did not start within %d s; see %s" % (RAY_SECONDS, log))
        time.sleep(0.05)
    if process.returncode:
        error = read_last_error(log)
        raise (RayStartTimeout if "timed out during startup" in error else ScriptError)("Ray did not start: %s" % error)
    return os.path.basename(os.readlink(latest))


def head_address(command: List[str]) -> Optional[Tuple[str, int]]:
    """Where the head is that a worker is to join; None where it is the head itself."""
    if "--address" not in command:
        return None
    host, _, port = command[command.index("--address") + 1].rpartition(":")
    return host.strip("[]"), int(port)


def answers(head: Tuple[str, int]) -> bool:
    """True if something listens there. Without the head `ray start` would wait in vain, and delay its repair."""
    try:
        socket.create_connection(head, timeout=2).close()
    except OSError:
        return False
    return True


def read_last_error(log: str) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in read_text(log).splitlines()]
    telling = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)] or [
        line for line in lines if line
    ]
    return telling[-1][:300] if telling else "see " + log


def remove_old_sessions(temp: str, keep: str) -> None:
    """Remove directories and logs of earlier sessions."""
    for path in glob.glob(os.path.join(temp, "session_*")):
        if os.path.isdir(path) and not os.path.islink(path) and os.path.basename(path) != keep:
            shutil.rmtree(path, ignore_errors=True)


def check_ports(ports: Map, seconds: float = 0.0) -> None:
    """Foreign ports are not touched, but named; processes that were just ended close their own within these seconds."""
    deadline = time.monotonic() + seconds
    listening = listeners()
    while time.monotonic() < deadline and any(int(port) in listening for port in ports.values()):
        time.sleep(0.05)
        listening = listeners()
    for name, port in ports.items():
        if int(port) in listening:
            holder = describe_holder(listening[int(port)])
            raise ScriptError(
                "port %d is taken by %s, which this grid did not start; end that, or set `ray.%s`"
                % (port, holder, name)
            )


def listeners() -> Dict[int, str]:
    """The inode of the socket that listens on each port of this machine."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in read_text(table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                inodes[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return inodes


def describe_holder(inode: str) -> str:
    """Holder of a socket, as far as permissions show it."""
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(path) == "socket:[%s]" % inode:
                pid = int(path.split("/")[2])
                return "pid %d (%s)" % (pid, program_name(pid) or "unknown")
        except OSError:
            continue
    return "another user's process"


# ---------------------------------------------------------------- stopping


def ray_stop(request: Map, source: BinaryIO) -> Map:
    """End every process of the Ray that this grid started here; with `purge` its files go, too. Twice is no error."""
    folder = ray_dir(request)
    if not os.path.isdir(folder):
        return {"stopped": 0}
    ended = stop_processes(read_record(folder))
    with locked(folder):  # its starter has noticed
        ended += stop_processes(read_record(folder))
        remove_files(folder, purge=bool(request.get("purge")))
    return {"stopped": ended}


def remove_files(folder: str, purge: bool) -> None:
    """Remove the note of what was begun; with `purge` every file of Ray's."""
    if os.path.lexists(os.path.join(folder, RECORD_NAME)):
        os.unlink(os.path.join(folder, RECORD_NAME))
    if purge:
        for temp in filter(None, (own_temp_dir(folder), os.path.dirname(read_temp_elsewhere(folder)))):
            shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        version = os.path.join(os.path.dirname(folder), "ray-version")
        if os.path.lexists(version):
            os.unlink(version)
        agent = os.path.dirname(folder)
        for place in (os.path.join(HOME, "r"), agent, os.path.dirname(agent), AGENTS, HOME):
            try:
                os.rmdir(place)
            except OSError:  # others use it
                continue


def stop_processes(note: Map, is_orphaned: bool = False) -> int:
    """End all that was begun under a note; how many there were. Its node leaves the cluster first, in good order."""
    first = left = own_processes(note)
    programs = {pid: program_name(pid) for pid in left}
    raylets = {pid for pid, program in programs.items() if program == "raylet"}
    if raylets and (is_orphaned or not has_head(note, programs.values())):
        raylets = set()  # there is nobody whom it could tell that it leaves
    for pid in raylets:
        send(pid, signal.SIGTERM)
    wait_for_exit(raylets, EXIT_SECONDS)
    deadline = time.monotonic() + KILL_ALL_SECONDS
    left = left - raylets | own_processes(note) if left else set()
    while left:
        for pid in left:
            send(pid, signal.SIGKILL)
        wait_for_exit(left, 0.5)
        left = own_processes(note)
        if left and time.monotonic() > deadline:
            raise ScriptError("Ray cannot be ended (pids %s)" % ", ".join(map(str, sorted(left))))
    return len(first)


def has_head(note: Map, programs: Iterable[str]) -> bool:
    """True if the head of a noted start is there, as far as this node can see."""
    if note.get("role") == "head":
        return "gcs_server" in programs
    head = head_address(note.get("parameters", {}).get("options", []))
    return head is None or answers(head)


def wait_for_exit(pids: Set[int], seconds: float) -> None:
    """Wait at most these seconds until the processes are gone."""
    deadline = time.monotonic() + seconds
    while any(start_ticks(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def resolve_address(request: Map, source: BinaryIO) -> Map:
    """The address that a name has here."""
    try:
        entries = socket.getaddrinfo(str(request["host"]), None, proto=socket.IPPROTO_TCP)
    except OSError as failure:
        raise ScriptError("%s is not known there: %s" % (request["host"], failure)) from None
    addresses: List[str] = [str(entry[4][0]) for entry in entries]
    chosen: Optional[str] = next((address for address in addresses if ":" not in address), addresses[0])
    return {"address": chosen}


def ray_driver(request: Map, source: BinaryIO) -> Map:
    """Become the program that speaks to Ray here: what comes on standard input from now on is for it."""
    version = read_text(agent_dir_of(request), "version").strip()
    packages = glob.glob(os.path.join(VERSIONS, check_name(version or "none"), "lib", "python*", "site-packages"))
    if not packages:
        raise ScriptError("the package is not installed there; type: grid cluster start --ray")
    python = find_ray_python(request)
    versions = query_versions(python)
    if not versions["python"].startswith(os.path.basename(os.path.dirname(packages[0]))[len("python") :] + "."):
        raise ScriptError("the agent's Python and Ray's (%s) differ; set `python:` for this node" % versions["python"])
    environ = {name: value for name, value in agent_environment().items() if not name.startswith("RAY_")}
    environ.update({str(name): str(value) for name, value in request["environ"].items()})
    environ["PYTHONPATH"] = packages[0]
    os.chdir("/")
    send_message({"done": versions})
    os.execve(python, [python, "-m", "distributed_grid.adapters.ray.driver", "stdio"], environ)


OPERATIONS.update({"ray-inspect": ray_inspect, "ray-start": ray_start, "ray-stop": ray_stop})
OPERATIONS.update({"ray-build": ray_build, "ray-installed": ray_installed, "ray-driver": ray_driver})
OPERATIONS.update({"resolve-address": resolve_address})
