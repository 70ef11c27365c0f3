"""Answers questions about GPUs with the real probe, one JSON line each; run with the stand-in as its NVML.

A line with the path of a machine's file begins with it, in a process of its own that ends with an empty line.
"""

import json
import os
import sys
import threading
import time
from typing import Any

import msgspec

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.agent.hardware import HardwareDetector


class Asker:
    def __init__(self) -> None:
        self.skipped = 0.0
        self.probe = GpuProbe(monotonic=lambda: time.monotonic() + self.skipped)
        self.detector = HardwareDetector(gpus=self.probe)
        self.pynvml_at_start = "pynvml" in sys.modules

    def answer(self, question: str, arguments: list[Any]) -> Any:
        return getattr(self, question)(*arguments)

    def devices(self) -> Any:
        return msgspec.to_builtins(self.probe.devices())

    def sample(self, own_pids: list[int]) -> Any:
        return msgspec.to_builtins(self.probe.sample(own_pids))

    def outside(self, own_pids: list[int]) -> Any:
        seen = [sample.outside for sample in self.probe.sample(own_pids)]
        return [{"index": one.index, "busy_milli": one.busy_milli, "memory_bytes": one.memory_bytes} for one in seen]

    def problem(self) -> str:
        return self.probe.problem

    def skip(self, seconds: float) -> None:
        self.skipped += seconds

    def close(self) -> None:
        self.probe.close()
        self.probe.close()

    def loaded(self) -> list[bool]:
        return [self.pynvml_at_start, "pynvml" in sys.modules]

    def in_background(self) -> None:
        """Ask for a sample in a thread, and return as soon as it is under way."""
        threading.Thread(target=self.probe.sample, daemon=True).start()
        until = time.monotonic() + 10
        while not self.probe._lock.locked() and time.monotonic() < until:
            time.sleep(0.01)

    def timed_sample(self) -> Any:
        began = time.monotonic()
        found = msgspec.to_builtins(self.probe.sample())
        return [time.monotonic() - began, found]

    def capacity(self) -> Any:
        return msgspec.to_builtins(self.detector.capacity())

    def capabilities(self) -> Any:
        return self.detector.get_capabilities()

    def heartbeat(self, own_pids: list[int]) -> Any:
        return self.detector.heartbeat("worker-1", own_pids)


def answer_questions() -> None:
    asker = Asker()
    print(flush=True)
    while line := sys.stdin.readline().strip():
        question, *arguments = json.loads(line)
        print(json.dumps(asker.answer(question, arguments)), flush=True)


def main() -> None:
    while path := sys.stdin.readline().strip():
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print(flush=True)
            continue
        os.environ["STANDIN_NVML"] = path
        try:
            answer_questions()
        finally:
            os._exit(0)  # also where a call hangs


if __name__ == "__main__":
    main()
