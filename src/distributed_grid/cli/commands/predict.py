"""`grid predict`: record what runs have used, show what the next one needs, and learn everything anew."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, group
from distributed_grid.cli.output import (
    ProgressLine,
    format_size,
    format_span,
    format_time,
    note,
    parse_size,
    print_answer,
    printable,
    progress_bar,
    table,
)
from distributed_grid.cli.session import CliSession
from distributed_grid.client.task_descriptions import execution_fields, task_fields
from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from distributed_grid.api.answers.prediction import TrainingStep

MAX_FILE_BYTES = 64 << 20
MB = 1024**2
SECONDS = FloatRange(0, 1e9)
LISTED_TYPES, MAX_TYPES = 100, 10_000
_task_options = (
    Option("--type", "task_type", default="", help="A type of task, instead of a command."),
    Option("--param", "parameters", multiple=True, metavar="NAME=VALUE", help="Of the type, such as batch_size=8."),
    Option("--input", "input_size", default="", metavar="SIZE", help="Bytes that the task reads: 4096, 512MB, 1.5GB."),
)


@group()
def predict() -> None:
    """Needs of work, learned from earlier runs: of jobs of the grid, and of executions that are recorded here."""


@predict.command(
    *_task_options,
    Option("--task-id", default="", help="The run's name; the same one is recorded once (default: a new one)."),
    Option("--attempt", type=IntRange(0, 1_000_000), default=1, show_default=True),
    Option("--memory", default="", metavar="SIZE", help="The most memory it used at a time: 512MB, 1.5GB."),
    Option("--gpu-memory", default="", metavar="SIZE", help="The same of GPU memory."),
    Option("--time", "run_seconds", type=SECONDS, default=0.0, metavar="SECONDS", help="How long it ran."),
    Option("--cpu-time", "cpu_seconds", type=SECONDS, default=0.0, metavar="SECONDS", help="CPU time, all cores."),
    Option("--cut-short", is_flag=True, help="It was stopped before its end: it would have used at least this."),
    Option("--from", "file", default="", metavar="FILE", help="Executions as JSON instead, - for standard input."),
    Argument("command", nargs=-1),
    interspersed=False,
)
def record(session: CliSession, /, **options: Any) -> None:
    """Record the measured use of a run of COMMAND, or of a task type.

    A file holds one execution, a list of them, or one a line: objects with task_id, task_type or command, parameters,
    and measurements such as memory_mb and duration_seconds.
    """
    if options["file"]:
        given = [name for name in ("task_type", "memory", "command") if options[name]]
        if given:
            raise BadInput("with --from everything is in the file: give no task and no amounts")
        messages = []  # all of them, so that a mistake is executions before the first is recorded
        file = options["file"]
        try:
            if file == "-":
                content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
            else:
                with open(file, "rb") as opened:
                    content = opened.read(MAX_FILE_BYTES + 1)
        except OSError as failure:
            raise BadInput(f"cannot read {file}: {failure.strerror}") from None
        if len(content) > MAX_FILE_BYTES:
            raise BadInput(f"{file} is larger than {format_size(MAX_FILE_BYTES)}")
        try:
            decoded = content.decode()
            try:
                parsed = json.loads(decoded)
            except json.JSONDecodeError:
                parsed = [json.loads(line) for line in decoded.splitlines() if line.strip()]
        except ValueError as failure:
            raise BadInput(f"{file} is no JSON: {failure}") from None
        entries = parsed if isinstance(parsed, list) else [parsed]
        for index, entry in enumerate(entries, 1):
            if not isinstance(entry, dict) or not entry.get("task_id"):
                raise BadInput(f"execution {index} of {file}: needs an object with a task_id")
        for number, entry in enumerate(entries, 1):
            try:
                messages.append(execution_fields(entry["task_id"], entry))
            except BadInput as problem:
                raise BadInput(f"execution {number}: {problem}") from None
        with session.client() as client:
            executions = [client.record_execution(**message).execution for message in messages]
        new = sum(not execution.known for execution in executions)
        text = f"{new} recorded, {len(executions) - new} known already"
        print_answer(session, {"executions": executions}, text)
        return
    fields = {
        **_task_fields(options),
        "task_id": options["task_id"] or f"manual-{os.urandom(8).hex()}",
        "attempt": options["attempt"],
        "memory_bytes": _size(options["memory"]),
        "gpu_memory_bytes": _size(options["gpu_memory"]),
        "run_ms": round(1000 * options["run_seconds"]),
        "cpu_ms": round(1000 * options["cpu_seconds"]),
        "cut_short": options["cut_short"],
    }
    execution = session.ask.record_execution(**fields).execution
    known = "known already" if execution.known else "recorded"
    text = f"{execution.task_id} {known}: {execution.key}, {_count(execution.samples, 'run')}"
    print_answer(session, execution, printable(text))


@predict.command(
    *_task_options,
    Option("-l", "--limit", type=IntRange(1, MAX_TYPES), help=f"Of known types (default: {LISTED_TYPES})."),
    Argument("command", nargs=-1),
    interspersed=False,
)
def show(session: CliSession, /, **options: Any) -> None:
    """Needs of the next run of COMMAND, or of a task type; without either, all known types."""
    if not options["command"] and not options["task_type"]:
        answer = session.query.list_task_types(limit=options["limit"] or (MAX_TYPES if session.json else LISTED_TYPES))
        rows = [
            (
                task_type.samples,
                task_type.tier or "-",
                "-" if task_type.confidence is None else f"{task_type.confidence:.2f}",
                format_time(task_type.last_run_at),
                task_type.key,
            )
            for task_type in answer.task_types
        ]
        headings = ("RUNS", "TIER", "CONFIDENCE", "LAST RUN", "KEY")
        text = table(headings, rows, empty="no runs are known; jobs of the grid are recorded as they end")
        print_answer(session, {"task_types": answer.task_types}, text)
        if answer.more and options["limit"] is None:
            note(f"only the {LISTED_TYPES} types that ran last are listed: --limit N lists more of them")
        return
    needs = session.query.predict_task(**_task_fields(options)).prediction
    memory = "no limit: not known"
    if needs.memory_mb is not None:
        reruns = ", ".join(map(_mb, needs.rerun_memory_mb))
        memory = f"{_mb(needs.memory_mb)}; should it run over: {reruns}"
    facts = [("memory", memory)]
    facts += [("run time", "not known" if needs.run_seconds is None else format_span(needs.run_seconds, ".3g"))]
    facts += [("cores", f"{needs.cpu_cores:.2f}")] if needs.cpu_cores is not None else []
    facts += [("GPU memory", _mb(needs.gpu_memory_mb))] if needs.gpu_memory_mb is not None else []
    facts += [("tier", f"{needs.tier}, confidence {needs.confidence:.2f}, {_count(needs.samples, 'run')}")]
    facts += [("why", line) for line in needs.why]
    print_answer(
        session, needs, "\n".join(map(printable, [needs.key, *(f"  {name:<11}{value}" for name, value in facts)]))
    )


@predict.command()
def train(session: CliSession) -> None:
    """Learn every type of task anew from its history, and fold runs of more than 90 days ago into summaries."""
    line = ProgressLine()

    def show(step: TrainingStep) -> None:
        bar = progress_bar(step.trained, step.total)
        line.draw(lambda: f"{bar} {step.trained} of {_count(step.total, 'type')}")

    training = session.ask.train_predictor(show).training
    line.clear()
    rows = [
        (
            row.samples,
            "-" if row.tier_before is None else f"{row.tier_before} {row.confidence_before:.2f}",
            f"{row.tier} {row.confidence:.2f}",
            row.key,
        )
        for row in training.trained
    ]
    end = f"{_count(len(rows), 'type')} trained in {training.seconds:.1f} s"
    end += f", {_count(training.folded_runs, 'old run')} folded" if training.folded_runs else ""
    lines = [table(("RUNS", "BEFORE", "AFTER", "KEY"), rows, empty="")] if rows else []
    print_answer(session, training, "\n".join([*lines, end]))


def _task_fields(options: dict[str, Any]) -> dict[str, Any]:
    words = list(options["command"])
    if words and options["task_type"]:
        raise BadInput("give a command or --type, not both")
    if words and options["parameters"]:
        raise BadInput("--param goes with --type; the parameters of a command are its words")
    if not words and not options["task_type"]:
        raise BadInput("give a command or --type")
    task: dict[str, Any] = {"command": words} if words else {"task_type": options["task_type"]}
    parameters: dict[str, float | str] = {}
    for text in options["parameters"]:
        name, _, value = text.partition("=")
        if not name or not value:
            raise BadInput(f"a parameter is written as NAME=VALUE, not {text!r}")
        try:
            parameters[name] = float(value)
        except ValueError:
            parameters[name] = value
    return {**task_fields({**task, "parameters": parameters}), "input_bytes": _size(options["input_size"])}


def _size(text: str) -> int:
    return parse_size(text) if text else 0


def _mb(value: float) -> str:
    return format_size(round(value * MB))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
