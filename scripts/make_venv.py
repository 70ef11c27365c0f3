"""Make `.venv` what the lock files say, or leave it alone when it already is.

Called by `scripts/setup`, with `runtime` (what `./grid` needs), `ray` (that, and Ray) or `dev` (all of it, and the
tools of `make`). uv, itself installed from the lock file with its hashes, installs the rest; where uv cannot be had,
pip does. Everything is byte-compiled here, so that nothing is left to compile at run time.

One set-up at a time: a lock in `.venv` is inherited by every installer, so that it is held for as long as one of them
writes, even if this process is killed. `.ready-*` is written last; `.unfinished` is there while something is being
installed, and who finds it under the lock finds the remains of a killed set-up and starts from nothing. Standard
output belongs to the command that runs afterwards: messages go to standard error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = VENV / ".setup-lock"  # uv locks .venv/.lock itself
UNFINISHED = VENV / ".unfinished"
LOG = VENV / "setup.log"
BOOTSTRAP = VENV / ".uv"
LOCK_FILES = {"runtime": "requirements.lock", "ray": "requirements-ray.lock", "dev": "requirements-dev.lock"}
# `ray` contains `runtime`, and `dev` both, in the same versions.
ALSO_READY = {"runtime": ("runtime",), "ray": ("runtime", "ray"), "dev": ("runtime", "ray", "dev")}


class SetupFailed(Exception):
    """Set-up cannot go on; the text is the one line a person needs."""


class SetupCutShort(SetupFailed):
    """Something killed a step while it was writing."""


def main(arguments: list[str]) -> int:
    """Leave a `.venv` that fits the lock file behind; 0 when it does."""
    if len(arguments) != 1 or arguments[0] not in LOCK_FILES:
        say(f"usage: scripts/setup {'|'.join(LOCK_FILES)}")
        return 2
    kind = arguments[0]
    try:
        with alone() as lock:
            if not is_ready(kind):
                make(kind, lock)
    except SetupFailed as failure:
        say(str(failure))
        return 1
    except OSError as failure:
        say(f"cannot set up .venv: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make(kind: str, lock: int) -> None:
    """Install what `kind` needs, into the `.venv` that is there if it is whole, else into a new one."""
    fresh = not is_whole()
    with progress(reason_for(fresh) + " (the log is .venv/setup.log)"):
        replace(kind, fresh, lock)


def replace(kind: str, fresh: bool, lock: int) -> None:
    """Remove what cannot be built upon, install, and note that all is there."""
    if fresh:
        for leftover in VENV.iterdir():
            if leftover != LOCK:
                remove(leftover)
    for stamp in VENV.glob(".ready-*"):
        stamp.unlink()
    UNFINISHED.touch()
    LOG.write_bytes(b"")
    try:
        install(kind, fresh, lock)
    except SetupCutShort:
        raise
    except SetupFailed:
        # What was refused (no network, say) did no harm to what was there: the next try builds on it.
        if not fresh:
            UNFINISHED.unlink()
        raise
    UNFINISHED.unlink()
    for name in ALSO_READY[kind]:
        stamp_for(name).write_text(fingerprint(name))


def install(kind: str, fresh: bool, lock: int) -> None:
    """Have the packages of the lock file and this project in `.venv`, compiled."""
    uv = working_uv()
    if fresh:
        run(interpreter(), "-m", "venv", "--without-pip", str(VENV), lock=lock)
    if uv is None:
        uv = bootstrap_uv(kind, lock)
    if uv is None or not install_with_uv(uv, kind, lock):
        install_with_pip(kind, lock)
    if BOOTSTRAP.exists():
        shutil.rmtree(BOOTSTRAP)
    # What cannot be compiled (a read-only clone) is compiled at run time instead.
    run(str(PYTHON), "-m", "compileall", "-q", "-j", "0", "src", lock=lock, required=False)


def install_with_uv(uv: str, kind: str, lock: int) -> bool:
    """Install with uv; False where that did not work and pip should try."""
    command = (uv, "--quiet", "--no-progress", "pip", "install", "--python", str(PYTHON), "--no-deps")
    # The lock names everything, so there is nothing to resolve; the build backend is in it too.
    packages = (*command, "--require-hashes", "--compile-bytecode", "-r", LOCK_FILES[kind])
    project = (*command, "--no-build-isolation", "-e", ".")
    return run(*packages, lock=lock, required=False) and run(*project, lock=lock, required=False)


def install_with_pip(kind: str, lock: int) -> None:
    """Install with the pip that every Python brings: slower, and it finds packages where the machine's pip does."""
    run(interpreter(), "-m", "venv", str(VENV), lock=lock)
    pip = (str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--progress-bar=off")
    run(*pip, "--no-deps", "--require-hashes", "-r", LOCK_FILES[kind], lock=lock)
    run(*pip, "--no-deps", "--no-build-isolation", "-e", ".", lock=lock)


def working_uv() -> str | None:
    """The uv of a `.venv` that is there already."""
    uv = VENV / "bin" / "uv"
    if not os.access(uv, os.X_OK):
        return None
    answer = subprocess.run([str(uv), "--version"], capture_output=True, check=False)
    return str(uv) if answer.returncode == 0 else None


def bootstrap_uv(kind: str, lock: int) -> str | None:
    """uv alone, as the lock file pins it, installed by this Python's own pip; None where there is no such pip."""
    found = re.search(r"^uv==.*?(?=^\S|\Z)", (ROOT / LOCK_FILES[kind]).read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    pinned = VENV / ".uv.txt"
    pinned.write_text(found.group())
    pip = (interpreter(), "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--progress-bar=off")
    options = ("--no-deps", "--no-compile", "--require-hashes", "--target", str(BOOTSTRAP), "-r", str(pinned))
    done = run(*pip, *options, lock=lock, required=False)
    pinned.unlink()
    return str(BOOTSTRAP / "bin" / "uv") if done else None


def reason_for(fresh: bool) -> str:
    if UNFINISHED.exists():
        return "an earlier set-up was cut short, making .venv anew"
    if fresh:
        return "first use, making .venv; this takes some seconds"
    return "bringing .venv up to date"


def is_ready(kind: str) -> bool:
    """Whether `.venv` was made here from exactly the files that are here now."""
    if UNFINISHED.exists() or not os.access(VENV / "bin" / "grid", os.X_OK) or not os.access(PYTHON, os.X_OK):
        return False
    return recorded(kind) == fingerprint(kind)


def is_whole() -> bool:
    """Whether there is a `.venv` to build on: finished, made in this place, with a Python that works."""
    if UNFINISHED.exists() or not os.access(PYTHON, os.X_OK):
        return False
    places = {text.splitlines()[0] for kind in LOCK_FILES if (text := recorded(kind))}
    if places - {str(ROOT)}:
        return False
    question = "import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)"
    answer = subprocess.run([str(PYTHON), "-c", question], env=environment(), capture_output=True, check=False)
    return answer.returncode == 0


def fingerprint(kind: str) -> str:
    """What `./grid` compares, made the way a shell can make it: the folder, and `cksum` of the two files."""
    sums = subprocess.run(["cksum", LOCK_FILES[kind], "pyproject.toml"], cwd=ROOT, capture_output=True, check=False)
    if sums.returncode != 0:
        raise SetupFailed(f"{LOCK_FILES[kind]} and pyproject.toml cannot be read in {ROOT}")
    return f"{ROOT}\n{sums.stdout.decode()}"


def stamp_for(kind: str) -> Path:
    return VENV / f".ready-{kind}"


def recorded(kind: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return stamp_for(kind).read_text()
    return ""


@contextlib.contextmanager
def alone() -> Iterator[int]:
    """Hold the lock; yields its descriptor, to be passed on to what must keep others out as well."""
    while True:
        VENV.mkdir(exist_ok=True)
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another set-up of .venv to finish")
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Somebody may have removed .venv while we waited; then this lock guards nothing.
            if LOCK.exists() and os.path.samestat(os.fstat(lock), LOCK.stat()):
                yield lock
                return
        finally:
            os.close(lock)


def run(*command: str, lock: int, required: bool = True) -> bool:
    """Run one step, its words to the log; whether it succeeded. A required one that fails raises."""
    with LOG.open("ab") as log:
        step = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            check=False,
        )
    if step.returncode == 0 or (step.returncode > 0 and not required):
        return step.returncode == 0
    said = LOG.read_text(errors="replace").splitlines()
    errors = [line for line in said if line.lower().startswith("error")]
    kind_of_failure = SetupCutShort if step.returncode < 0 else SetupFailed
    raise kind_of_failure(f"setting up .venv failed, see {LOG}" + (f": {errors[-1]}" if errors else ""))


@contextlib.contextmanager
def progress(line: str) -> Iterator[None]:
    """Say what is being done; on a terminal a second line counts the packages and the seconds it has taken so far."""
    say(line)
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    done = threading.Event()

    def draw() -> None:
        began = time.monotonic()
        while not done.wait(0.2):
            packages = sum(1 for _ in VENV.glob("lib/python*/site-packages/*.dist-info"))
            seconds = time.monotonic() - began
            text = f"grid: {packages} packages, {seconds:.0f} s"
            # A line as wide as the terminal would wrap, and every redrawing would leave a copy behind.
            write(f"\r{text[: terminal_columns() - 1]}\x1b[K")

    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield
    finally:
        done.set()
        drawing.join()
        write("\n")


def terminal_columns() -> int:
    """The width of the terminal at this moment; 80 where it does not say."""
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def environment() -> dict[str, str]:
    """The caller's environment, without what would send an installation somewhere else."""
    elsewhere = ("PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # it would keep uv and compileall from compiling
    index = kept.get("PIP_INDEX_URL")
    return {"UV_DEFAULT_INDEX": index, **kept} if index else kept


def interpreter() -> str:
    """This Python under its full name: should another version replace it, the link breaks and we see it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def say(line: str) -> None:
    write(f"grid: {line}\n")


def write(text: str) -> None:
    """Write to standard error, if there is one that takes it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
