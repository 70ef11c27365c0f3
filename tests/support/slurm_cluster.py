"""A real Slurm cluster of a test's own: `munged`, `slurmctld` and `slurmd` with all their state in one folder, on
loopback ports.

They and the jobs live in a PID namespace of their own. When its init ends, all of them end; so the janitor of a test
run has to find only that one, by the folder in its environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.docker_engines import child_of
from tests.support.ports import free_ports
from tests.support.shell import wait_until

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo", "scontrol", "nsenter", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
READY_SECONDS = 60.0
NODE = "localhost"
PARTITION = "debug"
_INIT = "import os, signal\nwhile True:\n try: os.wait()\n except ChildProcessError: signal.sigtimedwait([17], 0.2)"
_CONF = """
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,default_queue_depth=50
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge={min_job_age}
KillWait=10
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
PropagateResourceLimits=NONE
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN
PartitionName={partition} Nodes={node} Default=YES MaxTime=120 State=UP
PartitionName=stopped Nodes={node} MaxTime=120 State=DOWN
"""


def problem() -> str | None:
    """Why there can be no cluster on this machine, or None."""
    if os.geteuid() != 0:
        return "only root can run a Slurm cluster of its own"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    packages = "slurmctld, slurmd, slurm-client, munge, util-linux"
    return f"a Slurm cluster needs {', '.join(missing)} (Debian: {packages})" if missing else None


class SlurmCluster:
    """A cluster of one node in a folder; `stop` leaves nothing of it."""

    def __init__(self, folder: Path, *, cpus: int = 4, memory_mb: int = 2048, min_job_age: int = 2) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._env = {"PATH": PATH, "HOME": str(folder), "SLURM_CONF": str(self.config)}
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir(mode=0o700, parents=True)
        folder.chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller_port, node_port = free_ports(2)
        self.config.write_text(
            _CONF.format(
                folder=folder,
                node=NODE,
                partition=PARTITION,
                controller_port=controller_port,
                node_port=node_port,
                cpus=cpus,
                memory_mb=memory_mb,
                min_job_age=min_job_age,
            )
        )
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._init = self._spawn(*namespaces, sys.executable, "-c", _INIT)
        self._init_pid = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until its node takes jobs."""
        self._init_pid = wait_until(lambda: child_of(self._init.pid, "python"))
        self._run_daemon(
            "munged",
            "--foreground",
            "--force",
            "--num-threads=2",
            f"--key-file={self.folder}/munge/key",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge/pid",
            f"--log-file={self.folder}/munge/log",
            f"--seed-file={self.folder}/munge/seed",
        )
        wait_until((self.folder / "munge.socket").exists)
        self.start_controller()
        self._run_daemon("slurmd", "-D", "-N", NODE)
        wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-p", PARTITION, "-o", "%T"), READY_SECONDS, pause=0.1)

    def start_controller(self) -> None:
        """Start `slurmctld`, with what it had stored, and wait until it answers."""
        self._run_daemon("slurmctld", "-D")
        wait_until(lambda: "UP" in self.ask("scontrol", "ping"), READY_SECONDS, pause=0.1)

    def kill_controller(self) -> None:
        """kill -9 `slurmctld`; what runs goes on."""
        process = self._running.pop("slurmctld")
        os.kill(wait_until(lambda: child_of(process.pid, "slurmctld")), signal.SIGKILL)
        process.wait()

    def until_saved(self) -> None:
        """Wait until the controller has stored what it knows now; it does so some seconds after a change."""
        stored, before = self.folder / "state" / "job_state", time.time()
        self.ask("scancel", self.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip())
        wait_until(lambda: stored.exists() and stored.stat().st_mtime > before, READY_SECONDS, pause=0.1)

    def ask(self, *command: str) -> str:
        """Output of a Slurm command, errors included."""
        done = subprocess.run(command, capture_output=True, env=self._env, timeout=30, stdin=subprocess.DEVNULL)
        return (done.stdout + done.stderr).decode(errors="replace")

    def jobs(self) -> dict[str, str]:
        """The jobs that are not over, by id, and their states."""
        lines = self.ask("squeue", "-h", "-o", "%i %T").splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def stop(self) -> None:
        """End the cluster and its jobs, and remove what is left of them. A second time is harmless."""
        for process in (self._init, *self._running.values()):
            if process is self._init and process.poll() is None:
                process.kill()  # with it everything in its namespace; who waits for one of these ends then
            process.wait(READY_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run_daemon(self, *command: str) -> None:
        inside = ("nsenter", f"--target={self._init_pid}", "--mount", "--pid")
        self._running[command[0]] = self._spawn(*inside, *command)

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
