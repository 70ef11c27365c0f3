"""Build the image of worker containers from this machine's own files, without a registry: `make worker-image`.

In it are the Python that runs this script, the agent with the few libraries that it needs, and the usual commands of a
shell, each with the shared libraries that it is linked to. The same files make the same layer: names are sorted, and
times and owners are fixed.
"""

from __future__ import annotations

import argparse
import compileall
import io
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from distributed_grid import __version__
from distributed_grid.adapters.clouds.docker_local import connected
from distributed_grid.adapters.node.installation import gather_wheels
from distributed_grid.adapters.node.node_messages import NodeFacts
from distributed_grid.config.providers import DockerLocalSettings
from distributed_grid.errors import GridError

COMMANDS = (
    "sh bash env cat cp mv rm ln ls mkdir mktemp rmdir chmod chown touch dd df du stat sync true false test [ echo",
    "printf head tail sort uniq cut tr wc tee seq sleep timeout date id whoami uname nproc hostname pwd basename",
    "dirname readlink realpath sha256sum md5sum base64 od yes kill nice nohup expr paste split join comm grep sed awk",
    "find xargs tar gzip ps diff which",
)
REQUIRED = ("sh", "env", "cat", "sleep")
# What no worker imports, and what only compiling against Python needs.
LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages"}
LEFT_OUT |= {"dist-packages", "__pycache__", "pydoc_data"}
DATA = ("/etc/ssl/certs/ca-certificates.crt", "/usr/lib/locale/C.utf8", "/etc/os-release", "/etc/services")
PYTHON_HOME = Path("usr/local")
VENV = Path("opt/grid")
ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUPS = "root:x:0:\nnogroup:x:65534:\n"
MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
TIMEOUT_SECONDS = 300


class CannotBuild(Exception):
    """The image cannot be built; the text is the one line a person needs."""


def main(arguments: list[str] | None = None) -> int:
    """Build the image and give it to the engine; the exit code."""
    options = parse_options(arguments)
    began = time.monotonic()
    if not options.tar and os.environ.get("DOCKER_HOST", options.engine) != options.engine:
        print(f"build_worker_image: $DOCKER_HOST is not used: the image goes to {options.engine}, "
              "--engine names another engine", file=sys.stderr)  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="grid-worker-image-") as folder:
            root = Path(folder) / "root"
            lay_out(root)
            archive = Path(options.tar or Path(folder) / "image.tar")
            pack(root, archive)
            if not options.tar:
                give_to_engine(archive, options.image, options.engine)
    except CannotBuild as failure:
        print(f"build_worker_image: {failure}", file=sys.stderr)
        return 1
    what = options.tar or f"image {options.image}"
    print(f"{what}: {archive_size(options.tar)}Python {platform.python_version()}, grid {__version__}, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; without a name for them, image and engine are those of the provider `docker_local`."""
    provider = DockerLocalSettings()
    parser = argparse.ArgumentParser(prog="build_worker_image", description="Build the image of worker containers.")
    parser.add_argument("--image", default=provider.image, help=f"its name (default: {provider.image})")
    parser.add_argument(
        "--engine",
        default=provider.endpoint_url,
        help=f"the engine's socket, as in `endpoint_url` of the provider (default: {provider.endpoint_url})",
    )
    parser.add_argument("--tar", metavar="FILE", help="write the files of the image there, and ask no engine")
    return parser.parse_args(arguments)


def archive_size(tar: str | None) -> str:
    return f"{os.path.getsize(tar) // 2**20} MB, " if tar else ""


def lay_out(root: Path) -> None:
    """Every file of the image, below `root`."""
    for name in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "root",
        "tmp",
        "var/lib",
        "run",
        "proc",
        "sys",
        "dev",
    ):
        (root / name).mkdir(parents=True)
    for link, target in MERGED.items():
        (root / link).symlink_to(target)
    (root / "etc/passwd").write_text(ACCOUNTS)
    (root / "etc/group").write_text(GROUPS)
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for name in DATA:
        if os.path.exists(name):
            copy(Path(name), root / name.lstrip("/"))
    lay_out_commands(root)
    lay_out_python(root)
    lay_out_grid(root)
    for library in libraries_of(root):
        copy(library, root / inside(library))


def lay_out_commands(root: Path) -> None:
    """The commands of this machine that people expect in a shell."""
    found = {name: path for name in " ".join(COMMANDS).split() if (path := shutil.which(name, path="/usr/bin:/bin"))}
    if missing := [name for name in REQUIRED if name not in found]:
        raise CannotBuild(f"no command {missing[0]} on this machine")
    for name, path in found.items():
        copy(Path(path), root / "usr/bin" / name)


def lay_out_python(root: Path) -> None:
    """This Python, below /usr/local, where it finds its library by itself."""
    version = "python{}.{}".format(*sys.version_info)
    program = root / PYTHON_HOME / "bin" / version
    copy(Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable))), program)
    for name in ("python3", "python"):
        (program.parent / name).symlink_to(version)
    library = root / PYTHON_HOME / "lib" / version
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")):
        shutil.copytree(folder, library, ignore=_left_out, dirs_exist_ok=True)
    compile_files(library)


def _left_out(folder: str, names: list[str]) -> set[str]:
    extra = re.compile(r"config-.*|_test.*\.so|_ctypes_test.*|_tkinter.*|xx.*\.so|.*\.a|.*\.pyc")
    broken = {name for name in names if not os.path.exists(os.path.join(folder, name))}
    return LEFT_OUT.intersection(names) | {name for name in names if extra.fullmatch(name)} | broken


def lay_out_grid(root: Path) -> None:
    """The agent in an environment of its own, and `grid` on the PATH."""
    version = "python{}.{}".format(*sys.version_info)
    site = root / VENV / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    kind, libc = platform.libc_ver()
    facts = NodeFacts(platform.python_version(), platform.machine(), kind, libc, sys.executable)
    with tempfile.TemporaryDirectory() as cache:
        for wheel in gather_wheels(facts, Path(cache), {}):
            with zipfile.ZipFile(io.BytesIO(wheel.data)) as archive:
                archive.extractall(site)  # noqa: S202 - wheels that were just packed here
    compile_files(site)
    programs = root / VENV / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        (programs / name).symlink_to(f"/{PYTHON_HOME}/bin/{version}")
    (root / VENV / "pyvenv.cfg").write_text(
        f"home = /{PYTHON_HOME}/bin\ninclude-system-site-packages = false\nversion = {platform.python_version()}\n"
    )
    grid = root / PYTHON_HOME / "bin" / "grid"
    grid.write_text(f"#!/{VENV}/bin/python\nimport sys\nfrom distributed_grid.cli.main import main\nsys.exit(main())\n")
    grid.chmod(0o755)


def compile_files(folder: Path) -> None:
    """Compile what is there, so that nothing is compiled when a worker starts; without any time in it."""
    checked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    compileall.compile_dir(
        folder, quiet=2, workers=0, invalidation_mode=checked, stripdir=str(folder), force=True, legacy=False
    )


def libraries_of(root: Path) -> list[Path]:
    """The shared libraries that the programs below `root` are linked to, as this machine's loader finds them."""
    programs = sorted(
        str(path) for path in root.rglob("*") if path.is_file() and not path.is_symlink() and is_elf(path)
    )
    said = subprocess.run(["ldd", *programs], capture_output=True, check=False).stdout.decode()
    if missing := re.findall(r"^\s*(\S+) => not found", said, re.MULTILINE):
        print(f"build_worker_image: without {', '.join(sorted(set(missing)))}", file=sys.stderr)
    found = set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", said, re.MULTILINE))
    return sorted(Path(name) for name in found if not name.startswith(f"{root}/"))


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def inside(path: Path) -> Path:
    """Where a library of this machine is in the image: where the loader looks, for every user.

    In the image /lib and the like are links into /usr. What this machine has in some other place (the library of a
    Python that somebody has built) goes to /usr/lib.
    """
    first, *rest = path.parts[1:]
    return Path(MERGED.get(first, first), *rest) if first in MERGED or first == "usr" else Path("usr/lib", path.name)


def copy(source: Path, target: Path) -> None:
    """Have the file or folder there, links followed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif not target.exists():
        shutil.copy(source, target)


def pack(root: Path, archive: Path) -> None:
    """The files below `root` as a tar whose bytes depend on nothing but names, modes and contents."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in entries(root):
            entry = tar.gettarinfo(path, str(path.relative_to(root)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = "root"
            entry.mode = mode_of(path, root)
            if entry.isreg():
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)


def entries(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names.sort()
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder, name) for name in sorted([*files, *names]) if name not in links)
        yield from (Path(folder, name) for name in links)


def mode_of(path: Path, root: Path) -> int:
    if path == root / "tmp":
        return 0o1777
    if path == root / "root":
        return 0o700
    return 0o755 if path.is_dir() or os.access(path, os.X_OK) or path.is_symlink() else 0o644


def give_to_engine(archive: Path, image: str, engine: str) -> None:
    """Have the engine take the files as an image of that name."""
    try:
        with connected(engine, TIMEOUT_SECONDS) as opened:
            opened.import_image(image, chunks(archive), list(instructions()))
    except GridError as failure:
        raise CannotBuild(str(failure)) from None


def chunks(archive: Path) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def instructions() -> Iterable[str]:
    yield "ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8"
    yield "WORKDIR /root"
    yield f"LABEL distributed-grid.version={__version__}"
    yield 'CMD ["grid", "agent", "--dir", "/var/lib/distributed-grid/agent"]'


if __name__ == "__main__":
    sys.exit(main())
