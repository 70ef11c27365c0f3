"""A week with grid on three hosts: files are edited while jobs run, fetched, wrapped and moved; configs change, disks
are full, a clock is wrong, a node is purged. At the end every local edit and every result exists."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.clusters import AGENT, Cluster
from tests.lab.lab import Lab
from tests.support.shell import wait_until
from tests.support.small_disks import SmallDisk

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
HERE = {
    "name": "here",
    "host": "local",
    "simulated": True,
    "cpu_count": 2,
    "memory_gb": 4,
    "background": {"cpu": 95, "memory": 95},
}
"""This machine, pressed, so that wrapped commands start elsewhere."""
HOSTILE = "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; echo evil > .bashrc"
DAY_SECONDS = 86_400


class Desk(Cluster):
    """The project of a person who types at this machine, and what must be in it at the end of the week."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        config = yaml.safe_load(self.file.read_text())
        config["nodes"].append(HERE)
        self.file.write_text(yaml.safe_dump(config, sort_keys=False))
        self.cwd = folder / "project"
        self.cwd.mkdir()
        self.expected: dict[str, str] = {}
        (self.cwd / ".git").mkdir()
        self.edit(".git/config", "[core]\n")
        self.edit(".gitignore", "*.log\n")
        self.edit("results.log", "mine\n" * 1000)
        self.edit("train.py", "version 1\n")
        self.edit(".env", "TOKEN=do-not-ship-me\n")

    def edit(self, path: str, text: str) -> None:
        """Write a file by hand: it has to be there as it is for the rest of the week."""
        (self.cwd / path).write_text(text)
        self.expected[path] = text

    def content(self) -> dict[str, str]:
        files = (path for path in self.cwd.rglob("*") if path.is_file())
        return {str(path.relative_to(self.cwd)): path.read_text() for path in files}

    def gate(self, name: str, host: str) -> tuple[str, Path]:
        """A command that waits on a host until the file is made."""
        place = f"/tmp/{name}"
        return f"until test -e {place}; do sleep 0.05; done", self.lab.host(host).outside(place)

    def delivery(self, job_id: str) -> dict[str, Any]:
        def over() -> Any:
            answer = self.query("get_job", job_id=job_id)
            return answer["delivery"] if answer and answer["delivery"] and answer["delivery"]["ended_at"] else None

        found: dict[str, Any] = wait_until(over, 60)
        return found

    def until_running(self, job_id: str) -> None:
        wait_until(lambda: self.job(job_id)["state"] == "running", 30)


@pytest.fixture
def desk(shared_lab: Lab, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(shared_lab, tmp_path)
    made("cluster", "start", check=0, timeout=120)
    wait_until(lambda: all(made.is_alive(name) for name in ("gpu-master", "gpu1", "gpu2")), 60)
    yield made
    made.close()


def test_every_edit_and_every_result_of_a_week_exists(desk: Desk, shared_lab: Lab) -> None:
    monday_edits_while_a_job_runs(desk)
    tuesday_a_wrapped_command(desk)
    wednesday_a_changed_config_and_a_restart(desk)
    thursday_a_full_disk_on_both_sides(desk, shared_lab)
    friday_a_moved_process(desk, shared_lab)
    saturday_a_wrong_clock(desk, shared_lab)
    sunday_a_purge(desk, shared_lab)
    assert desk.content() == desk.expected


def monday_edits_while_a_job_runs(desk: Desk) -> None:
    wait, go = desk.gate("monday", "gpu1")
    work = f"{wait}; ls -A > seen; echo by monday > train.py; echo one > results.log; {HOSTILE}"
    desk.detach("-j", "monday", "--strategy", "node_specific", "-n", "gpu1", "--fetch", "**", "sh", "-c", work)
    desk.until_running("monday")
    desk.edit("train.py", "edited on monday\n")
    go.touch()
    delivery = desk.delivery("monday")
    assert (delivery["state"], sorted(delivery["protected"])) == ("delivered", [".bashrc", ".git/hooks/pre-commit"])
    desk.expected |= {
        "train.py.from-monday": "by monday\n",
        "results.log.from-monday": "one\n",
        "seen": (desk.cwd / "seen").read_text(),
    }
    assert ".env" not in desk.expected["seen"].split()


def tuesday_a_wrapped_command(desk: Desk) -> None:
    wait, _ = desk.gate("tuesday", "gpu1")
    wait_until(lambda: desk.query("advise_command", argv=["sh"])["elsewhere"], 30)
    work = f"{wait}; echo $GRID_NODE; echo wrapped > wrapped.txt; echo by tuesday > train.py; {HOSTILE}"
    wrapped = desk.start("offload", "wrap", "sh", "-c", work)
    jobs = wait_until(lambda: [job for job in desk.observe("jobs", "list") if job["state"] == "running"], 30)
    desk.edit("train.py", "edited on tuesday\n")
    for host in desk.lab:
        host.outside("/tmp/tuesday").touch()
    out, err = wrapped.communicate(timeout=60)
    assert wrapped.returncode == 0, err.decode()
    assert out.decode().strip() in ("gpu-master", "gpu1", "gpu2")
    job_id = jobs[0]["job_id"]
    desk.expected |= {"wrapped.txt": "wrapped\n", f"train.py.from-{job_id}": "by tuesday\n"}
    desk.delivery(job_id)


def wednesday_a_changed_config_and_a_restart(desk: Desk) -> None:
    wait, go = desk.gate("wednesday", "gpu2")
    work = f"{wait}; mkdir -p out; echo 3 > out/wednesday"
    desk.detach("-j", "wednesday", "--strategy", "node_specific", "-n", "gpu2", "--fetch", "out/**", "sh", "-c", work)
    desk.until_running("wednesday")
    text = desk.file.read_text()
    desk.file.write_text(f"# a comment\n{text}")
    assert [job["state"] for job in desk.json("jobs", "list") if job["job_id"] == "wednesday"] == ["running"]
    desk.file.write_text("nodes: [")
    assert "wednesday" in desk("jobs", "list", check=0).stdout
    desk.file.write_text(text)
    desk.kill_daemon()
    go.touch()
    desk("status", check=0)
    assert desk.delivery("wednesday")["state"] == "delivered"
    desk.expected["out/wednesday"] = "3\n"


def thursday_a_full_disk_on_both_sides(desk: Desk, lab: Lab) -> None:
    host, disk = lab.host("gpu1"), SmallDisk(desk.cwd.parent / "small", 1 << 20)
    on_gpu1 = ("--strategy", "node_specific", "-n", "gpu1")
    try:
        words = ("-j", "thursday", *on_gpu1, "--workdir", str(disk.place), "--fetch", "big")
        wait, go = desk.gate("thursday", "gpu1")
        desk.detach(*words, "sh", "-c", f"{wait}; head -c 300000 /dev/zero > big")
        disk.fill()
        go.touch()
        problem = wait_until(lambda: desk.query("get_job", job_id="thursday")["delivery"]["problem"], 30)
        assert "no room on the disk" in problem
        disk.free()
        assert desk.delivery("thursday")["state"] == "delivered"
        assert (disk.place / "big").stat().st_size == 300_000
    finally:
        disk.unmount()
    host.disk.fill()
    wait_until(lambda: desk.lends_nothing_because("gpu1", "disk"), 30)
    full = desk("run-shared", "-w", "1", *on_gpu1, "--workdir", "none", "sh", "-c", "echo x > y", timeout=120)
    host.disk.free()
    assert full.returncode == 124
    wait_until(lambda: not desk.lends_nothing_because("gpu1", "disk"), 30)


def friday_a_moved_process(desk: Desk, lab: Lab) -> None:
    host = lab.host("gpu1")
    folder = f"{host.home}/friday"
    host.run(["mkdir", "-p", f"{folder}/.git"])
    host.run(["tee", f"{folder}/.git/config"], input="[core]\n")
    host.run(["tee", f"{folder}/notes.txt"], input="version 1\n")
    program = (
        "import os, pathlib, time\n"
        "while not pathlib.Path('/tmp/friday').exists(): time.sleep(0.05)\n"
        "pathlib.Path('notes.txt').write_text('by friday\\n'); pathlib.Path('result').write_text('5\\n')\n"
        "os.makedirs('.git/hooks', exist_ok=True); pathlib.Path('.git/hooks/pre-commit').write_text('evil')\n"
        "pathlib.Path('.git/config').write_text('evil')\n"
    )
    host.run(["tee", f"{folder}/compute.py"], input=program)
    host.run(["sh", "-c", f"cd {folder} && setsid -f python3 compute.py > out.txt 2>&1 < /dev/null"])
    (pid,) = wait_until(lambda: host.find(" compute.py"))
    move = desk.json("offload", "execute", str(pid), "-n", "gpu1", "-t", "gpu2", "--consent", "--no-wait")["move_id"]
    wait_until(lambda: desk.query("get_move", move_id=move)["move"]["state"] == "running", 60)
    host.run(["tee", f"{folder}/notes.txt"], input="edited on friday\n")
    lab.host("gpu2").outside("/tmp/friday").touch()
    ended = wait_until(lambda: (row := desk.query("get_move", move_id=move)["move"])["end"] and row, 60)
    assert (ended["end"], ended["kept_files"]) == ("done", ["notes.txt"])
    assert ".git/config, .git/hooks/pre-commit" in " ".join(ended["notes"])
    files = {"notes.txt": "edited on friday\n", f"notes.txt.from-{move}": "by friday\n", "result": "5\n"}
    assert {name: host.outside(f"{folder}/{name}").read_text() for name in files} == files
    assert host.outside(f"{folder}/.git/config").read_text() == "[core]\n"
    assert not host.outside(f"{folder}/.git/hooks").exists()


def saturday_a_wrong_clock(desk: Desk, lab: Lab) -> None:
    words = ("-j", "saturday", "--strategy", "node_specific", "-n", "gpu2", "--workdir", "none")
    desk.detach(*words, "sh", "-c", "echo 6 > saturday.txt; echo said")
    desk("jobs", "wait", "saturday", check=0)
    host = lab.host("gpu2")
    host.skew_seconds(40 * DAY_SECONDS)
    (agent,) = host.find(AGENT)
    host.kill(agent, signal.SIGKILL)
    wait_until(lambda: any(pid != agent for pid in host.find(AGENT)), 60)
    wait_until(lambda: desk("jobs", "fetch", "saturday", "--to", "../looked-at").returncode == 0, 60)
    host.skew_seconds(0)
    desk("jobs", "fetch", "saturday", check=0)
    assert desk("jobs", "logs", "saturday", check=0).stdout == "said\n"
    desk.expected["saturday.txt"] = "6\n"


def sunday_a_purge(desk: Desk, lab: Lab) -> None:
    words = ("-j", "sunday", "--strategy", "node_specific", "-n", "gpu2", "--workdir", "none")
    desk.detach(*words, "sh", "-c", "echo 7 > sunday.txt")
    desk("jobs", "wait", "sunday", check=0)
    refused = desk("cluster", "stop", "--purge", "gpu2", timeout=120)
    assert refused.returncode == 1
    assert "sunday" in refused.stdout + refused.stderr
    assert desk.is_alive("gpu2")
    desk("jobs", "fetch", "sunday", check=0)
    desk.expected["sunday.txt"] = "7\n"
    desk("cluster", "stop", "--purge", "gpu2", check=0, timeout=120)
    assert os.path.exists(desk.cwd / "sunday.txt")
    assert subprocess.run(["ls", desk.cwd], capture_output=True, check=True).stdout
