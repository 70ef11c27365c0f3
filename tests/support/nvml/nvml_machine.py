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


class GpuMachine:
    """Lines of the stand-in's file as `self[key] = value`; `ask` puts a question to a process that sees the GPUs."""

    def __init__(self, place: Path, *, library: bool = True, flags: tuple[str, ...] = ()) -> None:
        self._file = place / "gpus"
        self._lines: dict[str, str] = {}
        environment = {**os.environ, "STANDIN_NVML": str(self._file)}
        if library:
            environment["LD_LIBRARY_PATH"] = _library(*flags).name
        self.environment = environment
        self._process: subprocess.Popen[str] | None = None
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
        if self._process is None:
            command = [sys.executable, "-W", "error", str(HERE / "nvml_client.py")]
            self._process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([question, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the asking process died: its words are above"
        return json.loads(answer)

    @property
    def inits(self) -> int:
        """How often NVML was opened."""
        counted = self._file.with_name("gpus.inits")
        return len(counted.read_text()) if counted.exists() else 0

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
