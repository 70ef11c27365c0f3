"""Options shared by the commands that make requests: placement, lending and job options."""

from __future__ import annotations

import math
from typing import Any

from distributed_grid.cli.command_line import FloatRange, Option, WordChoice
from distributed_grid.client.placement_arguments import NODE_SPECIFIC, PlacementArguments, parse_deadline
from distributed_grid.client.placement_arguments import placement_fields as request_fields
from distributed_grid.errors import BadInput

PRIORITIES = ("low", "normal", "medium", "high", "critical", "urgent")
STRATEGIES = (
    "load_balanced", "local_first", "best_fit", "spread", "performance_optimized", "cost_optimized",
    "node_specific", "fragmentation_aware", "fittest",
)  # fmt: skip


def wait_option(default: float | None, text: str) -> Option:
    """Option `--wait SECONDS`; without a default its text gives the length of the wait."""
    kind, is_shown = FloatRange(at_least=0), default is not None
    return Option("-w", "--wait", type=kind, default=default, show_default=is_shown, metavar="SECONDS", help=text)


ship_option = Option(
    "--ship", multiple=True, metavar="PATTERN", help="Ship these files though they look like secrets, such as .env."
)

placement_options = (
    Option(
        "--strategy",
        type=WordChoice(STRATEGIES, case_sensitive=False),
        help="How the place is chosen; with node_specific only the nodes of -n will do.",
    ),
    Option(
        "--also", multiple=True, metavar="TYPE=AMOUNT", help="More of another kind in the same place: --also memory=4."
    ),
    Option("--label", multiple=True, metavar="KEY[=VALUE]", help="Only nodes with this label or tag."),
    Option("--gpu-model", multiple=True, help="Only GPUs whose name has this in it; any of several."),
    Option("--gpu-memory", type=FloatRange(at_least=0), default=0.0, help="GB of memory on each GPU."),
    Option("--near", multiple=True, metavar="NAME", help="Only where this job, group or node is."),
    Option("--apart-from", multiple=True, metavar="NAME", help="Never where this job, group or node is."),
    Option("--group", default="", help="A name that this request shares with others, to be near to or apart."),
    Option(
        "--expects", type=FloatRange(at_least=0), default=0.0, help="Seconds it will take: short ones fit into gaps."
    ),
    Option("--deadline", metavar="TIME", help="When it must be over: +SECONDS, or a time such as 2026-05-01T18:00."),
)
"""Where a request may be placed; `placement_fields` reads them."""
lending_options = (
    Option(
        "--priority",
        type=WordChoice(PRIORITIES, case_sensitive=False),
        default="normal",
        show_default=True,
        help="normal is medium, critical is urgent: that one displaces others.",
    ),
    Option(
        "--duration",
        type=FloatRange(above=0),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="When it ends by itself.",
    ),
    Option("--source", metavar="NODE", default="", help="The preferred lender; where it is full another one lends."),
    Option("--only", is_flag=True, help="Only the node of --source may lend it."),
    wait_option(0.0, "How long to wait in the queue if no node can lend it now."),
    Option("--dry-run", is_flag=True, help="Say what would happen, and do nothing."),
)
"""A request that one node makes to the others."""
job_options = (
    Option("-j", "--job-id", default="", help="A name of your own for the job."),
    Option("-d", "--detach", is_flag=True, help="Do not wait: print the job's id and return."),
    Option(
        "-e",
        "--env",
        multiple=True,
        metavar="K[=V]",
        help="A variable for the job; without =V your own value is passed on.",
    ),
    Option("--isolated", is_flag=True, help="Run in an empty private directory instead of the current one."),
    Option("--workdir", metavar="DIR", help="Directory that is shipped to another node, or none (default: this one)."),
    ship_option,
    Option("--fetch", multiple=True, metavar="GLOB", help="Bring these files back afterwards, such as 'out/**'."),
    Option("--overwrite", is_flag=True, help="Let fetched files replace local ones that were edited meanwhile."),
    Option("--merge", is_flag=True, help="Write stderr into stdout, in the order of writing."),
)
"""A command that runs as a job."""


def placement_fields(options: dict[str, Any]) -> dict[str, Any]:
    named = options["node"]
    if options["strategy"] == NODE_SPECIFIC and not named:
        raise BadInput("--strategy node_specific needs a node: -n NODE")
    if not math.isfinite(options["gpu_memory"]) or not math.isfinite(options["expects"]):
        raise BadInput("an amount or a time must be a number, not nan or inf")
    resources: dict[str, float] = {}
    for word in options["also"]:
        kind, _, amount = word.partition("=")
        try:
            resources[kind] = float(amount)
        except ValueError:
            raise BadInput(f"--also needs TYPE=AMOUNT, such as memory=4, not {word!r}") from None
    placing: PlacementArguments = {
        "strategy": options["strategy"],
        "also": resources,
        "labels": options["label"],
        "gpu_models": options["gpu_model"],
        "gpu_memory_gb": options["gpu_memory"],
        "affinity": options["near"],
        "anti_affinity": options["apart_from"],
        "group": options["group"],
        "expects": options["expects"] or None,
        "deadline": parse_deadline(options["deadline"], "--deadline needs") if options["deadline"] else None,
    }
    return request_fields(placing, named)
