"""Check the Ray cluster that a grid uses, one line for each check; exit 0 when all is well.

The cluster is the one of RAY_ADDRESS, else the one that `grid cluster env` names. What only the grid knows (its
nodes, its leases) is asked of `grid`; where that does not answer, those checks say so and are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

GRID = str(Path(sys.executable).with_name("grid"))
PREFIX = "grid-boost-"
ASK_SECONDS, WAIT_SECONDS = 30.0, 30.0
ENTER = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR'); print('let in')"


class Check(NamedTuple):
    """One check and its result; `ok` is None where it could not be made."""

    name: str
    ok: bool | None
    detail: str


def main(arguments: list[str]) -> int:
    """Print the checks and a verdict; 1 when any failed."""
    parser = argparse.ArgumentParser(description="Check the Ray cluster of a grid.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args(arguments)
    checks: list[Check] = []
    for check in validate():
        checks.append(check)
        if not options.json:
            print(f"{_MARKS[check.ok]:8}{check.name}: {check.detail}", flush=True)
    failed = [check.name for check in checks if check.ok is False]
    verdict = f"not all is well: {', '.join(failed)}" if failed else "all is well"
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print(verdict)
    return 1 if failed else 0


_MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def validate() -> Iterator[Check]:
    """Every check, each after those that it depends on."""
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.update(_run_grid("cluster", "env") or {})
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        yield Check("address", False, "RAY_ADDRESS is not set, and the grid names none; type: grid cluster start --ray")
        return
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        yield Check("connection", False, "Ray is not installed here; type: make ray")
        return
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except Exception as failure:  # Ray raises what it likes
        yield Check("connection", False, f"{address}: {' '.join(str(failure).split())[:300]}")
        return
    yield Check("connection", True, f"connected with {address}, Ray {ray.__version__}")
    alive = [node for node in ray.nodes() if node["Alive"]]
    for check in (_names, _versions, _authentication, _tasks, _groups, _leftovers):
        try:
            yield check(ray, alive)
        except Exception as failure:  # a cluster that breaks while it is checked is reported like everything else
            yield Check(
                check.__name__.strip("_"), False, f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            )


def _names(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether every node of the grid that should have Ray is a living node of Ray, under its name."""
    there = sorted(node["NodeName"] for node in alive)
    rows = _run_grid("cluster", "status")
    if rows is None:
        return Check(
            "nodes", bool(there), f"{len(there)} alive: {', '.join(there)}; the grid did not say which are its"
        )
    wanted = sorted(row["node_id"] for row in rows if row.get("ray"))
    missing = [name for name in wanted if name not in there]
    if missing:
        return Check("nodes", False, f"not alive in Ray: {', '.join(missing)}; alive: {', '.join(there) or 'none'}")
    return Check("nodes", True, f"{len(there)} alive: {', '.join(there)}")


def _versions(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether Python and Ray are the same everywhere, and here."""
    found = _on_each(ray, alive, _own_versions)
    here = (platform.python_version(), ray.__version__)
    kinds = {(python.rpartition(".")[0], version) for python, version in [*found.values(), here]}
    lines = "; ".join(f"{name}: Python {python}, Ray {version}" for name, (python, version) in sorted(found.items()))
    return Check("versions", len(kinds) == 1, f"{lines}; here: Python {here[0]}, Ray {here[1]}")


def _own_versions() -> tuple[str, str]:
    import platform as there

    import ray as rays

    return there.python_version(), rays.__version__


def _authentication(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether somebody without the token is turned away: by the dashboard where it is within reach, else by Ray."""
    if dashboard := os.environ.get("RAY_API_SERVER_ADDRESS"):
        try:
            with urllib.request.urlopen(f"{dashboard}/api/version", timeout=ASK_SECONDS):  # noqa: S310
                return Check("authentication", False, "Ray lets in whoever reaches it, without a token")
        except urllib.error.HTTPError as answer:
            if answer.code in (401, 403):
                return Check("authentication", True, f"a stranger is turned away ({answer.code})")
        except OSError:
            pass  # not within reach after all
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    stranger |= {"RAY_AUTH_MODE": "disabled", "HOME": os.devnull}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ENTER, os.environ["RAY_ADDRESS"]],
            env=stranger,
            capture_output=True,
            text=True,
            timeout=2 * ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("authentication", None, "a stranger got no answer in time")
    if "let in" in done.stdout:
        return Check("authentication", False, "Ray lets in whoever reaches it, without a token")
    refused = "authenticat" in done.stderr.lower()
    return Check("authentication", True if refused else None, "a stranger is turned away" if refused else "not known")


def _tasks(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether a task runs on each node."""
    found = _on_each(ray, alive, _one)
    return Check("tasks", len(found) == len(alive), f"one ran on each of {', '.join(sorted(found))}")


def _one() -> int:
    return 1


def _groups(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether a placement group can be had on each node, and given back."""
    made = {
        node["NodeName"]: ray.util.placement_group(
            [{"CPU": 0.01}], bundle_label_selector=[{"ray.io/node-id": node["NodeID"]}]
        )
        for node in alive
    }
    try:
        missing = [name for name, group in made.items() if not group.wait(WAIT_SECONDS)]
    finally:
        for group in made.values():
            ray.util.remove_placement_group(group)
    lines = f"none on {', '.join(missing)}" if missing else f"one on each of {', '.join(sorted(made))}"
    return Check("placement groups", not missing, lines)


def _leftovers(ray: Any, alive: list[dict[str, Any]]) -> Check:
    """Whether every group that is named as the grid's are belongs to a lease that holds."""
    table = ray.util.placement_group_table().values()
    ours = sorted(row["name"] for row in table if row["name"].startswith(PREFIX) and row["state"] != "REMOVED")
    status = _run_grid("status")
    if status is None:
        return Check("leftovers", None, f"{len(ours)} groups of a grid; the grid did not say which of them it knows")
    held = {row["allocation_id"] for row in status["allocations"]}
    left = [name for name in ours if name.removeprefix(PREFIX).rpartition("-")[0] not in held]
    if left:
        return Check("leftovers", False, f"{len(left)} groups without a lease: {', '.join(left[:5])}")
    return Check("leftovers", True, f"{len(ours)} groups, each with its lease")


def _on_each(ray: Any, alive: list[dict[str, Any]], what: Callable[[], Any]) -> dict[str, Any]:
    """Results of a function on each node, by name."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0)(what)
    begun = {
        node["NodeName"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        ).remote()
        for node in alive
    }
    deadline = time.monotonic() + WAIT_SECONDS
    return {name: ray.get(one, timeout=max(deadline - time.monotonic(), 1)) for name, one in begun.items()}


def _run_grid(*words: str) -> Any:
    """The JSON output of a command of the grid; None where it fails."""
    try:
        done = subprocess.run(
            [GRID, *words, "--json"], capture_output=True, timeout=ASK_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
