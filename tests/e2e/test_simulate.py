"""`grid simulate`: published logs, our own events, and what is said about nonsense."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest

from tests.support.shell import GRID, Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

FIELDS = {
    *("policy", "jobs", "finished", "refused", "gave_up", "waiting", "mean_wait_s", "median_wait_s", "p95_wait_s"),
    *(
        "bounded_slowdown",
        "cpu_utilisation",
        "gpu_utilisation",
        "makespan_s",
        "preemptions",
        "cpu_seconds_lost",
        "jain",
    ),
}


TWO = """\
; MaxProcs: 4
1 0 0 60 2 -1 -1 2 60 -1 1 1 1 1 1 -1 -1 -1
2 10 0 30 4 -1 -1 4 30 -1 1 2 1 1 1 -1 -1 -1
"""
PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-0,1000,1024,1,1000,,LS,Running,0,100,0
pod-1,1000,1024,1,500,,BE,Running,50,100,50
pod-2,1000,1024,0,0,,BE,Pending,60,100,
"""
NODES = """\
sn,cpu_milli,memory_mib,gpu,model
node-0,8000,65536,2,P100
"""


def swf(jobs: int) -> str:
    """A log of jobs that come faster than eight processors can take them."""
    lines = ["; MaxProcs: 8"]
    for number in range(1, jobs + 1):
        width, run = 1 + number % 5, 50 + 37 * number % 400
        lines.append(f"{number} {20 * number} 0 {run} {width} -1 -1 {width} {2 * run} -1 1 {number % 3} 1 1 1 -1 -1 -1")
    return "\n".join(lines) + "\n"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """`grid` without a control plane: a simulation needs none."""
    shell = Shell(tmp_path / "state", tmp_path)
    yield shell
    shell.close()


def test_a_log_is_replayed_under_several_policies_and_drawn(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sp2.swf.gz").write_bytes(gzip.compress(swf(60).encode()))
    done = shell("simulate", "sp2.swf.gz", "--compare", "best_fit,load-balanced", "--plot", "out.svg", check=0)
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["best_fit", "load_balanced"]
    assert rows[0].split() == ["requests", "60", "60"]
    assert rows[-1] == "wrote out.svg"
    drawn = ET.fromstring((tmp_path / "out.svg").read_text())
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"CPU in use", "waiting requests", "best_fit", "load_balanced"} <= {*texts}
    assert done.stderr == ""
    assert not (tmp_path / "state").exists()


def test_the_figures_come_as_json_and_are_the_same_every_time(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sp2.swf").write_text(swf(40))
    words = ("simulate", "sp2.swf", "--limit", "30", "--owners", "400", "--seed", "5")
    first = shell.json(*words)
    assert first == shell.json(*words, env={"PYTHONHASHSEED": "7"})
    assert first != shell.json(*words[:-1], "6")
    (row,) = first["policies"]
    assert set(row) == FIELDS
    assert (row["jobs"], row["finished"], first["trace"]) == (30, 30, "sp2.swf")
    assert row["preemptions"] > 0


def test_the_nodes_come_from_a_config(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sp2.swf").write_text(swf(40))
    node = "{name: small, host: far.example, cpu_count: 3, memory_gb: 8}"
    (tmp_path / "new.yaml").write_text(f"name: new\nnodes:\n  - {node}\n")
    (row,) = shell.json("simulate", "sp2.swf", "--config", "new.yaml")["policies"]
    assert row["policy"] == "new.yaml"
    assert (row["finished"], row["refused"]) == (24, 16)


def test_the_figures_of_a_small_log_are_what_one_works_out_by_hand(shell: Shell, tmp_path: Path) -> None:
    """Two cores for a minute; after ten seconds somebody asks for all four cores for half a minute."""
    (tmp_path / "two.swf").write_text(TWO)
    (row,) = shell.json("simulate", "two.swf")["policies"]
    assert (row["jobs"], row["finished"], row["refused"], row["gave_up"], row["waiting"]) == (2, 2, 0, 0, 0)
    assert (row["mean_wait_s"], row["median_wait_s"], row["p95_wait_s"]) == (25, 25, 47.5)
    assert row["makespan_s"] == 90
    assert row["cpu_utilisation"] == pytest.approx((2 * 60 + 4 * 30) / (4 * 90), abs=1e-4)
    assert row["bounded_slowdown"] == pytest.approx((60 / 60 + 80 / 30) / 2, abs=1e-4)
    served = (60 / 60, 30 / 80)
    assert row["jain"] == pytest.approx(sum(served) ** 2 / 2 / sum(one * one for one in served), abs=1e-4)
    assert (row["preemptions"], row["cpu_seconds_lost"], row["gpu_utilisation"]) == (0, 0, None)


def test_table_and_json_agree(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "two.swf").write_text(TWO)
    rows = [line.rsplit("  ", 1) for line in shell("simulate", "two.swf", check=0).stdout.splitlines()[1:]]
    figures = {name.strip(): value.strip() for name, value in rows}
    assert (figures["requests"], figures["mean wait"], figures["95 % wait less than"]) == ("2", "25.0 s", "47.5 s")
    assert (figures["mean bounded slowdown"], figures["CPU in use"], figures["GPU in use"]) == ("1.83", "66.7 %", "-")
    assert (figures["makespan"], figures["evenness between users (Jain)"]) == ("90.0 s", "0.829")


def test_pods_run_on_the_nodes_that_are_listed_beside_them(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "openb_pod_list.csv").write_text(PODS)
    (tmp_path / "openb_node_list.csv").write_text(NODES)
    found = shell.json("simulate", "openb_pod_list.csv", "--compare", "best_fit,fragmentation_aware")
    assert found["left_out"] == {"that never ran": 1}
    for row in found["policies"]:
        assert (row["jobs"], row["finished"], row["mean_wait_s"], row["makespan_s"]) == (2, 2, 0, 100)
        assert row["gpu_utilisation"] == pytest.approx((1 * 100 + 0.5 * 50) / (2 * 100), abs=1e-4)


def test_cluster_files_are_compared_with_strategies(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "two.swf").write_text(TWO)
    node = "{name: large, host: far.example, cpu_count: 8, memory_gb: 8}"
    (tmp_path / "new.yaml").write_text(f"name: new\nnodes:\n  - {node}\n")
    rows = shell.json("simulate", "two.swf", "--compare", "best_fit, new.yaml")["policies"]
    assert [(row["policy"], row["mean_wait_s"]) for row in rows] == [("best_fit", 25), ("new.yaml", 0)]


def test_a_log_can_be_piped_in(shell: Shell) -> None:
    words = [*GRID, "simulate", "-", "--json"]
    done = subprocess.run(words, input=swf(5), capture_output=True, text=True, check=True, env=shell.env)
    assert json.loads(done.stdout)["policies"][0]["finished"] == 5


def test_event_log_of_a_real_grid_can_be_replayed(shared_grid: Shell, tmp_path: Path) -> None:
    for seconds in ("0.3", "0.6"):
        shared_grid("run-shared", "-r", "cpu", "-a", "1", "sleep", seconds, check=0)
    events = shared_grid("events", "--json", "--limit", "100000", check=0).stdout
    path = tmp_path / "events.jsonl"
    path.write_text(events)
    found = shared_grid.json("simulate", str(path), "--compare", "best_fit,spread")
    assert [row["policy"] for row in found["policies"]] == ["best_fit", "spread"]
    assert all(row["finished"] >= 2 for row in found["policies"])
    assert all(row["makespan_s"] >= 0.9 for row in found["policies"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nowhere.swf",), 2, "grid: nowhere.swf: No such file or directory"),
        (("bad.swf",), 2, "grid: bad.swf, line 3: 18 numbers make a job, here are 2"),
        (("sp2.swf", "--compare", "best_fits"), 2, "grid: no strategy 'best_fits': use one of"),
        (("sp2.swf", "--config", "nowhere.yaml"), 2, "grid: nowhere.yaml: no such file"),
        (("sp2.swf", "--config", "bad.yaml"), 2, "grid: bad.yaml:1: nodez: unknown key; did you mean 'nodes'?"),
        (("sp2.swf", "--compare", "spread,bad.yaml"), 2, "grid: bad.yaml:1: nodez: unknown key"),
        (("sp2.swf", "--compare", " , "), 2, "grid: --compare names nothing"),
        (("sp2.swf", "--compare", "node_specific"), 2, "grid: node_specific says nothing about work"),
        (("sp2.swf", "--plot", "no/such.svg"), 1, "grid: cannot write no/such.svg: no such folder"),
        (("sp2.swf", "--plot", "."), 2, "grid: cannot write .: it is a directory"),
        (("empty.swf",), 2, "grid: empty.swf is no trace: it is empty"),
        (("comments.swf",), 2, "grid: comments.swf: nothing in it can be replayed"),
        (("cut.swf.gz",), 2, "grid: cut.swf.gz cannot be read: Compressed file ended"),
        (("pods.csv",), 2, "grid: pods.csv does not say which nodes there were: name some with --config"),
        (("nodes.csv",), 2, "grid: nodes.csv is a list of nodes"),
        (("events.jsonl",), 2, "grid: events.jsonl, line 1: not an event: it needs type, time and subject"),
        ((".",), 2, "grid: .: Is a directory"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    shell: Shell, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "sp2.swf").write_text(swf(5))
    (tmp_path / "bad.swf").write_text(swf(1) + "1 2\n")
    (tmp_path / "bad.yaml").write_text("nodez: 3\n")
    (tmp_path / "empty.swf").write_text("")
    (tmp_path / "comments.swf").write_text("; MaxProcs: 4\n")
    (tmp_path / "cut.swf.gz").write_bytes(gzip.compress(swf(5).encode())[:40])
    (tmp_path / "pods.csv").write_text(PODS)
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "events.jsonl").write_text("{}\n")
    done = shell("simulate", *words, check=code)
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_long_simulation_with_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "long.swf").write_text(swf(30_000))
    running = shell.start("simulate", "long.swf")
    wait_until(lambda: psutil.Process(running.pid).cpu_times().user > 2, 60)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (130, b"")
    assert err == b"grid: stopped; a simulation changes nothing\n"
