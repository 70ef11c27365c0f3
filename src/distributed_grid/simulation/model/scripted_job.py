"""What a simulated command does: how long it runs, how it ends, and whether it heeds SIGTERM."""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.jobs import Command


class ScriptedJob(Struct, frozen=True):
    """The story of one command. It is written into the command's words, so that it travels as any command does."""

    run_ms: int
    exit_code: int = 0
    heeds: bool = True
    exists: bool = True
    workdir: bool = False
    marks_ms: int = 0

    def command(self, *, grace_ms: int = 5_000) -> Command:
        """The command that means this."""
        words = (self.run_ms, self.exit_code, int(self.heeds), int(self.exists), self.marks_ms)
        return Command(("work", *map(str, words)), grace_ms=grace_ms, workdir="0" * 64 if self.workdir else "")

    @classmethod
    def of(cls, command: Command) -> ScriptedJob:
        """What a command means."""
        run_ms, exit_code, heeds, exists, marks_ms = map(int, command.argv[1:])
        return cls(run_ms, exit_code, bool(heeds), bool(exists), bool(command.workdir), marks_ms)
