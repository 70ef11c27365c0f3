"""What an agent needs, as wheels: our own package, and the few libraries it stands on, in our own versions.

Rule 1: what is installed here is packed again where it fits the node: that needs no network and no time.
Rule 2: what does not fit (another Python, another machine) is downloaded here, never on the node, and kept.
Rule 3: the same files make the same bytes, so that a digest names a version.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from distributed_grid import __version__
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import NodeFacts
from distributed_grid.adapters.node.wheel_tags import fits, libc_version, minor_of, platforms_of

NEEDED = ("msgspec", "psutil", "websockets", "nvidia-ml-py", "click", "xxhash", "lz4")
DOWNLOAD_SECONDS = 300.0
PACKAGE = Path(__file__).parents[2]
_SKIPPED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")
OLDEST_ZIP = (1980, 1, 1, 0, 0, 0)


class Wheel(Struct, frozen=True):
    """A wheel and what names its content."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def gather(facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> list[Wheel]:
    """Every wheel that an agent on such a node needs; may download, and then keeps what it got in `cache`."""
    return [own_wheel(), *(_wheel_of(name, facts, cache, environ) for name in NEEDED)]


def signature() -> str:
    """What changes when anything that is packed here does; quicker to have than the wheels."""
    digest = hashlib.sha256(repr([(name, installed(name).version) for name in NEEDED]).encode())
    for path in sorted(_own_files()):
        found = path.stat()
        digest.update(f"{path}\n{found.st_size}\n{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def version_of(wheels: Iterable[Wheel], facts: NodeFacts) -> str:
    """The name of an environment: another source, library, Python or machine is another version."""
    digest = hashlib.sha256("\n".join(sorted(wheel.sha256 for wheel in wheels)).encode())
    digest.update(f"\n{minor_of(facts)}\n{facts.machine}\n{facts.executable}".encode())
    return f"{__version__}-{digest.hexdigest()[:12]}"


def own_wheel() -> Wheel:
    """This very package."""
    info = f"distributed_grid-{__version__}.dist-info"
    files = {f"{PACKAGE.name}/{path.relative_to(PACKAGE)}": path.read_bytes() for path in _own_files()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: distributed-grid\nVersion: {__version__}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: grid\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return Wheel(f"distributed_grid-{__version__}-py3-none-any.whl", _packed(files))


def _own_files() -> list[Path]:
    found = (path for path in PACKAGE.rglob("*") if path.is_file())
    return [path for path in found if "__pycache__" not in path.parts and path.suffix != ".pyc"]


def installed(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise NodeOperationFailed(f"{name} is not installed here, so its version for the node is not known") from None


def _wheel_of(name: str, facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> Wheel:
    found = installed(name)
    return (
        repacked(found, facts)
        or cached(name, found.version, facts, cache)
        or downloaded(name, found.version, facts, cache, environ)
    )


def repacked(installed: metadata.Distribution, facts: NodeFacts) -> Wheel | None:
    """An installed package as a wheel again; None where it would not work on the node."""
    tag = fitting_tag(installed, facts)
    if tag is None or not installed.files:
        return None
    files: dict[str, bytes] = {}
    for entry in filter(is_packed, installed.files):
        try:
            files[str(entry)] = Path(str(entry.locate())).read_bytes()
        except OSError:
            return None  # somebody has removed a part of it: it is better downloaded
    name = re.sub(r"[-_.]+", "_", installed.metadata["Name"])
    return Wheel(f"{name}-{installed.version}-{tag}.whl", _packed(files))


def fitting_tag(installed: metadata.Distribution, facts: NodeFacts) -> str | None:
    """The tag under which an installed package works on a node; None where it would not."""
    tags = re.findall(r"^Tag: *(\S+)", installed.read_text("WHEEL") or "", re.MULTILINE)
    fitting = (tag for tag in tags if fits(tag, facts) and (not _made_here(tag) or _libc_is_as_new(facts)))
    return next(fitting, None)


def is_packed(entry: metadata.PackagePath) -> bool:
    """Whether a file of an installed package belongs into its wheel."""
    return entry.parts[0] != ".." and "__pycache__" not in entry.parts and entry.name not in _SKIPPED


def _made_here(tag: str) -> bool:
    """Whether a package was compiled on this machine, for its very C library."""
    return tag.split("-")[2].startswith("linux")


def _libc_is_as_new(facts: NodeFacts) -> bool:
    kind, version = platform.libc_ver()
    return facts.libc == kind and libc_version(facts) >= libc_version(NodeFacts(libc_version=version))


def _packed(files: Mapping[str, bytes]) -> bytes:
    """A zip whose bytes depend on nothing but names and contents."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, OLDEST_ZIP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def cached(name: str, version: str, facts: NodeFacts, cache: Path) -> Wheel | None:
    """A wheel that was downloaded before and fits."""
    start = f"{re.sub(r'[-_.]+', '_', name)}-{version}-".lower()
    for path in sorted(cache.glob("*.whl")):
        if path.name.lower().startswith(start) and _name_fits(path.name, facts):
            with contextlib.suppress(OSError):
                return Wheel(path.name, path.read_bytes())
    return None


def _name_fits(name: str, facts: NodeFacts) -> bool:
    python, abi, platforms = name.removesuffix(".whl").split("-")[-3:]
    return fits(f"{python}-{abi}-{platforms}", facts)


def downloaded(name: str, version: str, facts: NodeFacts, cache: Path, environ: Mapping[str, str]) -> Wheel:
    """The wheel from wherever this machine gets its packages."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    minor = "{}.{}".format(*minor_of(facts))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--no-deps", "--python-version", minor, "--implementation", "cp"]
    for name_of in platforms_of(facts):
        command += ["--platform", name_of]
    what = f"{name} {version} for Python {minor} on {facts.machine} ({facts.libc or 'unknown C library'})"
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        command += ["--dest", folder, f"{name}=={version}"]
        try:
            done = subprocess.run(
                command,
                env=dict(os.environ) | dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NodeOperationFailed(
                f"{what} could not be downloaded within {DOWNLOAD_SECONDS:g} s", final=False
            ) from None
        found = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not found:
            said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            raise NodeOperationFailed(
                f"{what} could not be downloaded: {said[-1][:300] if said else 'pip said nothing'}"
            )
        kept = cache / found[0].name
        found[0].replace(kept)
    return Wheel(kept.name, kept.read_bytes())
