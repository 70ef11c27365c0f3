"""A machine with GPUs that are not there: the stand-in library, and a process that loads it as the real one."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

HERE = Path(__file__).parent
GIB = 1024**3


@cache
def _library(*flags: str) -> tempfile.TemporaryDirectory[str]:
    """The stand-in, compiled once for a session; the directory goes away with the process."""
    compiler = shutil.which("gcc") or ""
    if not compiler:
        pytest.skip("the stand-in for NVML needs gcc")
    place = tempfile.TemporaryDirectory(prefix="standin-nvml-")
    atexit.register(place.cleanup)
    built = Path(place.name, "libnvidia-ml.so.1")
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, "-o", str(built)]
    subprocess.run([*command, str(HERE / "standin.c")], check=True)
    return place


@cache
def _client(library: str) -> subprocess.Popen[str]:
    """The process whose children ask about GPUs, one machine after the other; it ends with the session."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library} if library else None
    command = [sys.executable, "-W", "error", str(HERE / "nvml_client.py")]
    client = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(client.communicate)
    return client


class GpuMachine:
    """Lines of the stand-in's file as `self[key] = value`; `ask` puts a question to a process that sees the GPUs.

    A machine that is asked is closed before the next one is.
    """

    def __init__(self, place: Path, *, library: bool = True, flags: tuple[str, ...] = ()) -> None:
        self._file = place / "gpus"
        self._lines: dict[str, str] = {}
        self._library = _library(*flags).name if library else ""
        self.environment = {**os.environ, "STANDIN_NVML": str(self._file)}
        if library:
            self.environment["LD_LIBRARY_PATH"] = self._library
        self._client: subprocess.Popen[str] | None = None
        self.update({"order": ""})

    def update(self, lines: dict[str, Any]) -> None:
        """Change the machine, all at once: a call under way sees the old or the new."""
        self._lines |= {key: str(value) for key, value in lines.items()}
        fresh = self._file.with_suffix(".new")
        text = "".join(f"{key} {value}\n" for key, value in self._lines.items() if value != "None")
        fresh.write_bytes(text.encode(errors="surrogateescape"))
        fresh.replace(self._file)

    def __setitem__(self, key: str, value: object) -> None:
        """Set one line; None takes it away."""
        self.update({key: value})

    def has(self, *numbers: int) -> Self:
        """Put plain devices of 16 GiB into the machine, and let NVML count just these."""
        self["order"] = " ".join(map(str, numbers))
        for number in numbers:
            plain = {"name": f"Stand-in {number}", "uuid": f"GPU-{number:04}", "total": 16 * GIB, "used": 0, "util": 0}
            self.update({f"{number}.{key}": value for key, value in plain.items()})
        return self

    def ask(self, question: str, *arguments: Any) -> Any:
        if self._client is None:
            self._client = _client(self._library)
            self._tell(str(self._file))
        answer = self._tell(json.dumps([question, *arguments]))
        if not answer:
            self._client = None
        assert answer, "the asking process died: its words are above"
        return json.loads(answer)

    def _tell(self, line: str) -> str:
        """Say a line to the client; the one that it answers with."""
        assert self._client is not None
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{line}\n")
        self._client.stdin.flush()
        return self._client.stdout.readline().strip()

    @property
    def inits(self) -> int:
        """How often NVML was opened."""
        counted = self._file.with_name("gpus.inits")
        return len(counted.read_text()) if counted.exists() else 0

    def close(self) -> None:
        if self._client is not None:
            self._tell("")
            self._client = None
