"""What kind of work a process does, and why that is thought."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.domain.processes import ProcessType
from distributed_grid.scheduling.offloading.process_types import classify, classify_command
from tests.unit.scheduling.offloading.processes import a_process, a_stream

TERMINAL = (a_stream("terminal", "/dev/pts/3"),) * 3


@pytest.mark.parametrize(
    ("command", "facts", "expected", "reason"),
    [
        ("python train.py --epochs 3", {"cpu_milli": 1800}, "training", "train"),
        ("torchrun --nproc 4 main.py", {}, "training", "torchrun"),
        ("python -m vllm.entrypoints.api", {"listening": ("tcp *:8000",)}, "inference", "vllm"),
        ("python predict.py", {}, "inference", "predict"),
        ("ffmpeg -i a.mp4 b.mp4", {"cpu_milli": 2000}, "data_processing", "ffmpeg"),
        ("python scripts/preprocess_images.py", {}, "data_processing", "preprocess"),
        ("rsync -a a b", {}, "io", "rsync"),
        ("./simulate 4", {"read_bytes": 9 * 10**9, "cpu_ms": 1000}, "io", "9.0 GB"),
        ("./simulate 4", {"cpu_milli": 1500}, "compute", "1.5 cores"),
        ("./simulate 4", {"gpu_memory_bytes": 10**9}, "compute", "GPU"),
        ("./simulate 4", {}, "batch", "nothing else"),
        ("vim notes.txt", {"streams": TERMINAL}, "interactive", "/dev/pts/3"),
        ("python", {"streams": TERMINAL}, "interactive", "/dev/pts/3"),
        ("python train.py", {"streams": TERMINAL, "cpu_milli": 900}, "training", "train"),
        ("python app.py", {"listening": ("tcp *:80",)}, "daemon", "tcp *:80"),
        ("nginx", {}, "daemon", "nginx"),
        ("./agent", {"parent": "systemd, as x.service"}, "daemon", "x.service"),
        ("./agent", {"age_ms": 5 * 3_600_000, "streams": (a_stream("null"),) * 3}, "daemon", "5 h"),
    ],
)
def test_classification(command: str, facts: dict[str, Any], expected: str, reason: str) -> None:
    found = classify(a_process(*command.split(), **facts))
    assert found.type is ProcessType(expected)
    assert reason in " ".join(found.reasons)


def test_values_of_options_say_nothing() -> None:
    assert classify_command(("./solve", "--output", "train")).type is ProcessType.BATCH
    assert classify_command(("python", "-c", "train")).type is ProcessType.BATCH
    assert classify_command(()).type is ProcessType.BATCH
