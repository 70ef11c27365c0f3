"""Queue of a Slurm cluster: the few commands that worker jobs need, with their output as values.

A command that the controller does not answer raises `Unreachable`: it may have had an effect. Only an error that the
controller has sent itself proves that nothing was submitted. The commands run with an environment of their own, because
variables such as SBATCH_PARTITION or SQUEUE_FORMAT would change them, and because Slurm stores that of `sbatch` with
the job. Output is in text formats that are the same in all releases; JSON is not.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable

TIMEOUT_SECONDS = 15.0
MAX_WORDS = 300
"""Length to which messages of commands are cut."""
JOB_FORMAT = "%i|%T|%M|%L|%V|%P|%r|%k"
NODE_FORMAT = "%P|%a|%l|%c|%m|%T"
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)
_NOT_ANSWERED = re.compile(
    r"unable to contact|timed ?out|zero bytes|connection|communication|unexpected message|authentication|munge",
    re.IGNORECASE,
)
_TOO_MANY = re.compile(r"temporarily unable|resource temporarily unavailable", re.IGNORECASE)
_NO_ROOM = re.compile(
    r"violates accounting|submit ?limit|node configuration is not available|partition configuration not available|"
    r"required node not available|requested nodes are busy|partition.* (?:down|drain|inactive)|too many",
    re.IGNORECASE,
)
_NO_SUCH_JOB = re.compile(r"invalid job id|already completing or completed|no active job", re.IGNORECASE)
_WAITING = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"))
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")
_OVER = frozenset((*_ENDED, "PREEMPTED", "REVOKED"))


class CommandResult(Struct, frozen=True):
    exit_code: int
    output: str = ""
    errors: str = ""

    @property
    def words(self) -> str:
        """Error message in one line."""
        text = " ".join((self.errors.strip() or self.output.strip() or f"exit code {self.exit_code}").split())
        return text[-MAX_WORDS:]


RunCommand = Callable[[Sequence[str], str, Sequence[int]], CommandResult]
"""Runs a command with this text on its standard input and these descriptors left open in it; Unreachable where it does
not end in time."""


class SlurmJob(Struct, frozen=True, kw_only=True):
    """A job in the queue, as `squeue` describes it; `left_seconds` is None where it has no limit."""

    id: str
    state: str
    reason: str
    age_seconds: float
    left_seconds: float | None
    comment: str

    @property
    def phase(self) -> Literal["starting", "running", "stopping", "gone"]:
        """The state of the machine: COMPLETING is `stopping`, an ended job is `gone` for good."""
        if self.state in _OVER:
            return "gone"
        if self.waits or self.state == "CONFIGURING":
            return "starting"
        return "stopping" if self.state == "COMPLETING" else "running"

    @property
    def waits(self) -> bool:
        return self.state in _WAITING


class SlurmNodes(Struct, frozen=True, kw_only=True):
    """Nodes of one partition that are alike, as `sinfo` describes them."""

    partition: str
    is_default: bool
    is_up: bool
    limit_seconds: float | None
    cpus: int
    memory_bytes: int
    state: str

    @property
    def can_work(self) -> bool:
        """True if jobs run on them, or will when others have ended."""
        return not self.state.rstrip("*~#!%$@^-+").startswith(("down", "drain", "fail", "inval", "unk", "maint"))


class SlurmQueue:
    def __init__(self, run: RunCommand, *, clock: Callable[[], float]) -> None:
        """`clock` is the time since 1970 in seconds, as Slurm's controller has it."""
        self._run = run
        self._clock = clock

    def version(self) -> str:
        return self._ask(["sbatch", "--version"]).output.strip()

    def jobs(self) -> list[SlurmJob]:
        """Every job of this user that the controller knows, ended ones included for some minutes."""
        command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={JOB_FORMAT}"]
        jobs = []
        for line in self._ask(command).output.splitlines():
            parts = line.strip().split("|", 7)
            if len(parts) != 8:
                raise Unreachable(f"squeue printed something else than was asked for: {line[:MAX_WORDS]!r}")
            job_id, state, used, left, submitted, _, reason, comment = parts
            age_seconds = read_seconds(used) or 0.0
            with contextlib.suppress(ValueError):
                submitted_at = datetime.fromisoformat(submitted).replace(tzinfo=UTC).timestamp()
                age_seconds = max(age_seconds, self._clock() - submitted_at)
            job = SlurmJob(
                id=job_id,
                state=state,
                reason=reason[:MAX_WORDS],
                age_seconds=max(age_seconds, 0.0),
                left_seconds=read_seconds(left),
                comment=comment,
            )
            jobs.append(job)
        return jobs

    def submit(self, options: Sequence[str], script: str, keep_open: Sequence[int] = ()) -> str:
        """Submit a batch script; the id of the job. Unreachable where it may or may not have been submitted.

        The descriptors stay open while `sbatch` runs, whatever happens to this process.
        """
        done = self._run(["sbatch", "--parsable", *options], script, keep_open)
        if done.exit_code == 0:
            job = done.output.strip().partition(";")[0]
            if job.isdecimal():
                return job
            raise Unreachable(f"sbatch did not say which job it has submitted: {done.words}")
        raise submit_failure(done)

    def test(self, options: Sequence[str], script: str) -> str:
        """Slurm's forecast for a script, without submitting it; raises the error of a submission."""
        done = self._run(["sbatch", "--test-only", *options], script, ())
        if done.exit_code:
            raise submit_failure(done)
        return done.words.removeprefix("sbatch: ")

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs of this user; ended and unknown ones are not an error."""
        done = self._run(["scancel", f"--user={os.getuid()}", *jobs], "", ())
        problems = [line for line in done.errors.splitlines() if line.strip() and not _NO_SUCH_JOB.search(line)]
        if done.exit_code and (problems or not done.errors.strip()):
            raise Unreachable(f"scancel failed: {done.words}")

    def nodes(self, partition: str | None) -> list[SlurmNodes]:
        """The nodes of some partitions (with commas between), or of the default one; empty where there are none."""
        chosen = [f"--partition={partition}"] if partition else []
        command = ["sinfo", "--noheader", "--exact", *chosen, f"--format={NODE_FORMAT}"]
        rows = []
        for line in filter(str.strip, self._ask(command).output.splitlines()):
            parts = line.strip().split("|")
            if len(parts) != 6:
                raise Unreachable(f"sinfo printed something else than was asked for: {line[:MAX_WORDS]!r}")
            name, available, limit, cpus, memory_mb, state = parts
            row = SlurmNodes(
                partition=name.rstrip("*"),
                is_default=name.endswith("*"),
                is_up=available == "up",
                limit_seconds=read_seconds(limit),
                cpus=_number(cpus),
                memory_bytes=_number(memory_mb) << 20,
                state=state,
            )
            rows.append(row)
        return rows if partition else [row for row in rows if row.is_default]

    def _ask(self, command: Sequence[str]) -> CommandResult:
        """Output of a command that only reads; Unreachable where it fails."""
        done = self._run(command, "", ())
        if done.exit_code:
            raise Unreachable(f"{command[0]} failed: {done.words}")
        return done


def submit_failure(done: CommandResult) -> GridError:
    """The error of a failed `sbatch`: a refusal by the controller proves that nothing was submitted."""
    text = f"sbatch failed: {done.words}"
    if _NOT_ANSWERED.search(done.errors):
        return Unreachable(text)
    if _TOO_MANY.search(done.errors):
        return Throttled(text)
    if _NO_ROOM.search(done.errors):
        return NoCapacity(text)
    return Refused(text)


def read_seconds(text: str) -> float | None:
    """A time as Slurm prints it (`59:59`, `1:00:00`, `6-22:39:00`); None for UNLIMITED and the like."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _number(text: str) -> int:
    digits = text.strip().rstrip("+")
    return int(digits) if digits.isdecimal() else 0


def environment(config_file: str | None) -> dict[str, str]:
    """Environment of Slurm's commands, and so of jobs: nothing secret, and no option but the choice of the cluster."""
    user = pwd.getpwuid(os.getuid())
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    path = os.environ.get("PATH") or os.defpath
    chosen = {"SLURM_CONF": config_file} if config_file else {}
    return {"PATH": path, "HOME": user.pw_dir, "USER": user.pw_name, "LANG": "C", "TZ": "UTC", **kept, **chosen}


def run_command(
    command: Sequence[str], text: str, keep_open: Sequence[int], *, config_file: str | None = None
) -> CommandResult:
    """Run a command of Slurm; one that does not end in time is killed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(config_file),
            cwd="/",
            pass_fds=keep_open,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BadInput(f"the command {command[0]} is not there: install Slurm's client, or add it to PATH") from None
    except OSError as failure:
        raise BadInput(f"the command {command[0]} cannot be run: {failure.strerror}") from failure
    with process:
        try:
            output, errors = process.communicate(text.encode(), TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            text = " ".join(errors.decode(errors="replace").split())[-MAX_WORDS:]
            raise Unreachable(f"no answer of {command[0]} within {TIMEOUT_SECONDS:g} s: {text}".rstrip(": ")) from None
    return CommandResult(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"))
