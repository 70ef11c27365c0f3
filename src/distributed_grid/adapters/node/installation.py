"""Operations on a node, each a few requests to the script there: inspect, install, stop, purge, install Ray.

The agent's environment is built from wheels in memory. Ray's is too big for that: its wheels are files, packed once
(quickly rather than small) and kept.

Wheels: this package and its few libraries are packed again from the installation here where they fit the node, which
needs no network. A wheel that does not fit (another Python, another machine) is downloaded here, never on the node, and
cached. The same files make the same bytes, so that a digest names a version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import mmap
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributed_grid import __version__
from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import NodeFacts, NodeOperationFailed
from distributed_grid.adapters.node.script_session import ScriptSession
from distributed_grid.posix.environment import child_environment

AGENT_PACKAGES = ("msgspec", "psutil", "websockets", "nvidia-ml-py", "xxhash", "lz4")
DOWNLOAD_SECONDS = 300.0
PACKAGE = Path(__file__).parents[2]
_SKIPPED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEGACY_PLATFORMS = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}


class Wheel(Struct, frozen=True):
    """A wheel with the digest of its content."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def fits(tag: str, facts: NodeFacts) -> bool:
    """True if a wheel with this tag (`cp311-cp311-manylinux_2_17_x86_64`) works on a node."""
    return not tags.parse_tag(tag).isdisjoint(_supported_tags(facts))


@functools.lru_cache(maxsize=32)
def _supported_tags(facts: NodeFacts) -> frozenset[tags.Tag]:
    python = python_minor(facts)
    interpreter = "cp{}{}".format(*python)
    platforms = platforms_of(facts) if facts.libc else []
    if facts.libc == "glibc":
        platforms.append(f"linux_{facts.machine}")
    compiled = tags.cpython_tags(python, abis=[interpreter], platforms=platforms)
    return frozenset((*compiled, *tags.compatible_tags(python, interpreter=interpreter, platforms=platforms)))


def platforms_of(facts: NodeFacts) -> list[str]:
    """The platforms a node takes wheels for, newest first, as package indexes name them."""
    if facts.libc != "glibc":
        newest = libc_version(facts)[1] if facts.libc_version else 2
        return [f"musllinux_1_{minor}_{facts.machine}" for minor in range(newest, -1, -1)]
    newest = libc_version(facts)[1]
    names = [f"manylinux_2_{minor}_{facts.machine}" for minor in range(newest, 4, -1)]
    return names + [f"{name}_{facts.machine}" for name, minor in _LEGACY_PLATFORMS.items() if minor <= newest]


def python_minor(facts: NodeFacts) -> tuple[int, int]:
    major, minor = facts.python.split(".")[:2]
    return int(major), int(minor)


def libc_version(facts: NodeFacts) -> tuple[int, int]:
    """C library of the node; (0, 0) if unknown."""
    match = re.match(r"(\d+)\.(\d+)", facts.libc_version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def gather_wheels(facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> list[Wheel]:
    """Wheels for an agent on such a node; downloads are kept in `cache`."""
    wheels = [own_wheel()]
    for name in AGENT_PACKAGES:
        distribution = find_distribution(name)
        wheel = repack(distribution, facts) or find_cached(name, distribution.version, facts, cache)
        wheels.append(wheel or download(name, distribution.version, facts, cache, environ))
    return wheels


def source_signature() -> str:
    """Digest of names, sizes and times of the packed files; quicker than packing."""
    digest = hashlib.sha256(repr([(name, find_distribution(name).version) for name in AGENT_PACKAGES]).encode())
    for path in sorted(_own_files()):
        status = path.stat()
        digest.update(f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def version_name(wheels: Iterable[Wheel], facts: NodeFacts) -> str:
    """Name of an environment: it changes with source, libraries, Python and machine."""
    return f"{__version__}-{environment_digest((wheel.sha256 for wheel in wheels), facts)}"


def environment_digest(sha256s: Iterable[str], facts: NodeFacts) -> str:
    digest = hashlib.sha256("\n".join(sorted(sha256s)).encode())
    digest.update(f"\n{python_minor(facts)}\n{facts.machine}\n{facts.executable}".encode())
    return digest.hexdigest()[:12]


def own_wheel() -> Wheel:
    info = f"distributed_grid-{__version__}.dist-info"
    files = {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": path.read_bytes() for path in _own_files()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: distributed-grid\nVersion: {__version__}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: grid\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return Wheel(f"distributed_grid-{__version__}-py3-none-any.whl", zip_files(files))


def _own_files() -> list[Path]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"]


def find_distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise NodeOperationFailed(f"{name} is not installed here, so its version for the node is not known") from None


def repack(installed: metadata.Distribution, facts: NodeFacts) -> Wheel | None:
    """An installed package as a wheel again; None where it would not work on the node."""
    tag = compatible_tag(installed, facts)
    if tag is None or not installed.files:
        return None
    files: dict[str, bytes] = {}
    for entry in filter(belongs_in_wheel, installed.files):
        try:
            files[str(entry)] = Path(str(entry.locate())).read_bytes()
        except OSError:
            return None  # somebody has removed a part of it: it is better downloaded
    name = re.sub(r"[-_.]+", "_", installed.metadata["Name"])
    return Wheel(f"{name}-{installed.version}-{tag}.whl", zip_files(files))


def compatible_tag(installed: metadata.Distribution, facts: NodeFacts) -> str | None:
    """Tag under which an installed package works on a node; None if it does not."""
    installed_tags: list[str] = re.findall(r"^Tag: *(\S+)", installed.read_text("WHEEL") or "", re.MULTILINE)
    for tag in filter(functools.partial(fits, facts=facts), installed_tags):
        is_local_build = tag.split("-")[2].startswith("linux")  # compiled on this machine, for its C library
        if not is_local_build or _has_libc_of_ours(facts):
            return tag
    return None


def belongs_in_wheel(entry: metadata.PackagePath) -> bool:
    return entry.parts[0] != ".." and "__pycache__" not in entry.parts and entry.name not in _SKIPPED


def _has_libc_of_ours(facts: NodeFacts) -> bool:
    kind, version = platform.libc_ver()
    return facts.libc == kind and libc_version(facts) >= libc_version(NodeFacts(libc_version=version))


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """A zip whose bytes depend on nothing but names and contents; packed quickly rather than small."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], compresslevel=1)
    return buffer.getvalue()


def find_cached(name: str, version: str, facts: NodeFacts, cache: Path) -> Wheel | None:
    """A wheel that was downloaded before and fits."""
    start = f"{canonicalize_name(name).replace('-', '_')}-{version}-"
    for path in sorted(cache.glob("*.whl")):
        tag = "-".join(path.name.removesuffix(".whl").split("-")[-3:])
        if path.name.lower().startswith(start) and fits(tag, facts):
            with contextlib.suppress(OSError):
                return Wheel(path.name, path.read_bytes())
    return None


def download(name: str, version: str, facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> Wheel:
    """The wheel from wherever this machine gets its packages."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    minor = "{}.{}".format(*python_minor(facts))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--no-deps", "--python-version", minor, "--implementation", "cp"]
    for name_of in platforms_of(facts):
        command += ["--platform", name_of]
    wheel = f"{name} {version} for Python {minor} on {facts.machine} ({facts.libc or 'unknown C library'})"
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        command += ["--dest", folder, f"{name}=={version}"]
        try:
            done = subprocess.run(
                command,
                env=child_environment() | dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NodeOperationFailed(
                f"{wheel} could not be downloaded within {DOWNLOAD_SECONDS:g} s", final=False
            ) from None
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            raise NodeOperationFailed(
                f"{wheel} could not be downloaded: {lines[-1][:300] if lines else 'pip said nothing'}"
            )
        kept = cache / wheels[0].name
        wheels[0].replace(kept)
    return Wheel(kept.name, kept.read_bytes())


RAY_BUILD_SECONDS = 900.0
RAY_MISSING = "Ray is not installed here, so there is nothing to send to the nodes; type: make ray"
Result = tuple[NodeFacts, str]
"""Facts of the node afterwards, and a summary."""


class InstalledState(NodeFacts, frozen=True):
    """Answer of `inspect`: facts, versions and wheels."""

    versions: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()


class InstallSources:
    """The wheels for each kind of node, gathered once; one at a time, because they share a cache."""

    def __init__(self, cache: Path = Path()) -> None:
        self._lock, self._ray_lock = asyncio.Lock(), asyncio.Lock()
        self._gathered: dict[tuple[str, ...], list[Wheel]] = {}
        self.cache = cache
        self.environ: Mapping[str, str] = {}

    async def agent_wheels(self, facts: NodeFacts) -> list[Wheel]:
        """Wheels of an agent on such a node, from the current source."""
        async with self._lock:
            return await asyncio.to_thread(self._agent_wheels, facts)

    def _agent_wheels(self, facts: NodeFacts) -> list[Wheel]:
        signature = source_signature()
        kind = (signature, *map(str, python_minor(facts)), facts.machine, facts.libc, facts.libc_version)
        if kind not in self._gathered:
            if any(known[0] != signature for known in self._gathered):
                self._gathered.clear()  # of a source that is gone
            self._gathered[kind] = gather_wheels(facts, self.cache, self.environ)
        return self._gathered[kind]

    async def ray_wheels(self, facts: NodeFacts) -> list[WheelFile]:
        """Wheels of Ray on such a node; slow the first time."""
        async with self._ray_lock:
            return await asyncio.to_thread(gather_ray_wheels, facts, self.cache / "ray", self.environ)


async def inspect(session: ScriptSession) -> InstalledState:
    return msgspec.convert(await session.ask("inspect"), InstalledState)


async def install(session: ScriptSession, sources: InstallSources, say: Say) -> Result:
    """Have this version of the package on a node, and no agent of another."""
    say("inspecting the node")
    seen = await inspect(session)
    needed = await sources.agent_wheels(seen)
    version = version_name(needed, seen)
    summary = f"{version} was there already"
    if version not in seen.versions or seen.version != version:
        missing = [wheel for wheel in needed if wheel.sha256 not in seen.wheels]
        if missing:
            say(f"sending {len(missing)} of {len(needed)} wheels")
        entries = [_entry(wheel.name, wheel.sha256, len(wheel.data), sent=wheel in missing) for wheel in needed]
        await session.ask("build", say=say, blobs=[wheel.data for wheel in missing], version=version, wheels=entries)
        summary = f"installed {version} with Python {seen.python}"
    if seen.running and seen.running != version:
        say("ending the agent of another version")
        await session.ask("retire")
        summary += ", the agent of another version was ended"
    return facts_of(seen, version=version), summary


async def stop(session: ScriptSession, say: Say) -> Result:
    seen = await inspect(session)
    answer = await session.ask("stop", say=say)
    return facts_of(seen, running=""), "stopped" if answer["stopped"] else "nothing ran there"


async def purge(session: ScriptSession, say: Say) -> Result:
    """Remove this grid from a node, with everything that only this grid used."""
    facts, summary = await stop(session, say)
    say("removing the installation")
    await session.ask("purge")
    return facts_of(facts, version=""), f"{summary}, removed"


def facts_of(seen: NodeFacts, **changes: str) -> NodeFacts:
    """`NodeFacts` of an answer, with changes."""
    known = {name: getattr(seen, name) for name in NodeFacts.__struct_fields__}
    return NodeFacts(**{**known, **changes})


def _entry(name: str, sha256: str, size: int, *, sent: bool) -> dict[str, Any]:
    return {"name": name, "sha256": sha256, "size": size, "sent": sent}


# ---------------------------------------------------------------- Ray


class WheelFile(Struct, frozen=True):
    """A wheel on the disk, with the digest of its content."""

    path: Path
    sha256: str
    size: int


async def install_ray(session: ScriptSession, sources: InstallSources, say: Say) -> str:
    """Install this environment's version of Ray on a node, in an environment of its own; a summary."""
    say("inspecting the node")
    seen = await inspect(session)
    say("packing Ray")
    files = await sources.ray_wheels(seen)
    version = f"ray-{own_ray_version()}-{environment_digest((file.sha256 for file in files), seen)}"
    if version in seen.versions and (await session.ask("ray-installed"))["version"] == version:
        return f"{version} was there already"
    missing = [file for file in files if file.sha256 not in seen.wheels]
    request = {
        "version": version,
        "wheels": [_entry(file.path.name, file.sha256, file.size, sent=file in missing) for file in files],
        "bytes": sum(file.size for file in files),
    }
    paths = [file.path for file in missing]
    await session.ask_with_files("ray-build", paths, say=say, seconds=RAY_BUILD_SECONDS, request=request)
    return f"installed {version} with Python {seen.python}"


def own_ray_version() -> str:
    """Version of Ray in this environment; NodeOperationFailed with the command to type if it has none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise NodeOperationFailed(RAY_MISSING) from None


def gather_ray_wheels(facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> list[WheelFile]:
    """Wheels for Ray on such a node; downloads are kept in `cache`."""
    own_ray_version()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = []
    for name in ray_requirements(facts):
        distribution = find_distribution(name)
        tag = compatible_tag(distribution, facts)
        path = _repack_to_file(distribution, tag, cache) if tag else None
        if path is None:
            kept = find_cached(name, distribution.version, facts, cache)
            path = cache / (kept or download(name, distribution.version, facts, cache, environ)).name
        files.append(_describe(str(path), path.stat().st_mtime_ns))
    return files


def ray_requirements(facts: NodeFacts) -> list[str]:
    """Ray with its dashboard and dependencies, from this environment and for the node's Python."""
    python = "{}.{}".format(*python_minor(facts))
    environment = {"python_version": python, "python_full_version": facts.python, "platform_machine": facts.machine}
    needed: dict[str, set[str]] = {}
    ahead = [("ray", frozenset({"", "default"}))]
    while ahead:
        name, extras = ahead.pop()
        fresh = extras - needed.setdefault(name, set())
        if not fresh:
            continue
        needed[name] |= fresh
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            raise NodeOperationFailed(f"{name}, which Ray needs, is not installed here; type: make ray") from None
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or any(
                requirement.marker.evaluate({**environment, "extra": extra}) for extra in fresh
            ):
                ahead.append((canonicalize_name(requirement.name), frozenset({"", *requirement.extras})))
    return sorted(needed)


def _repack_to_file(package: metadata.Distribution, tag: str, cache: Path) -> Path | None:
    """An installed package as a wheel in a file; None where some of it is gone."""
    name = re.sub(r"[-_.]+", "_", package.metadata["Name"])
    path = cache / f"{name}-{package.version}-{tag}.whl"
    if path.exists():
        return path
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(fresh, "w") as archive:
            for entry in sorted(filter(belongs_in_wheel, package.files or ()), key=str):
                source = Path(str(entry.locate()))
                info = zipfile.ZipInfo(str(entry), ZIP_EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = (
                    0o755 if os.access(source, os.X_OK) else 0o644
                ) << 16  # the only mode that is kept
                with source.open("rb") as file:
                    if not os.fstat(file.fileno()).st_size:
                        archive.writestr(info, b"")
                        continue
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        archive.writestr(info, content, compresslevel=1)
        fresh.replace(path)
    except OSError:
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return path


@functools.lru_cache(maxsize=1000)
def _describe(path: str, changed_ns: int) -> WheelFile:
    """File with its digest, cached by its time of change."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return WheelFile(Path(path), digest, os.path.getsize(path))
