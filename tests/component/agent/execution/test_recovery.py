"""What is on the disk is understood whatever wrote it: a crash, a power failure, an older layout, no hard links."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch
from distributed_grid.posix.boot_clock import boot_id
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python

pytestmark = pytest.mark.e2e


def ended_unheard(new_driver: Callable[..., Driver], code: int) -> Path:
    """The directory of an attempt that ended while no agent was there."""
    first = new_driver()
    first.launch("a.1", "/bin/sh", "-c", f"sleep 0.2; exit {code}")
    shim = first.shim_pid("a.1")
    first.close()
    while is_alive(shim):
        time.sleep(0.01)
    return first.root / "a.1"


def test_an_end_that_was_not_shown_is_told_and_shown(new_driver: Callable[..., Driver]) -> None:
    folder = ended_unheard(new_driver, 9)
    (folder / "exit.json").unlink()
    assert new_driver().ended("a.1").exit_code == 9
    assert (folder / "exit.json").samefile(folder / "spec.json")


def test_an_end_that_was_not_shown_is_found_when_its_order_comes_again(new_driver: Callable[..., Driver]) -> None:
    folder = ended_unheard(new_driver, 9)
    (folder / "exit.json").unlink()
    (folder.parent / ".live/a.1").unlink()
    assert new_driver().run("a.1", "/bin/sh", "-c", "exit 1").exit_code == 9


def test_an_end_cut_short_is_lost_and_nothing_runs_again(new_driver: Callable[..., Driver]) -> None:
    folder = ended_unheard(new_driver, 9)
    (folder / "exit.json").unlink()
    text = (folder / "spec.json").read_bytes()
    os.truncate(folder / "spec.json", text.index(b'{"ended"') + 20)
    driver = new_driver()
    assert driver.ended("a.1").kind == "lost"
    assert driver.run("a.1", "true").kind == "lost"


def test_a_shim_that_did_not_get_to_say_who_it_is_never_ran(new_driver: Callable[..., Driver]) -> None:
    folder = ended_unheard(new_driver, 9)
    (folder / "exit.json").unlink()
    text = (folder / "spec.json").read_bytes()
    os.truncate(folder / "spec.json", text.index(b'{"shim"') + 20)
    driver = new_driver()
    assert driver.reports == []
    assert driver.run("a.1", "/bin/sh", "-c", "exit 7").exit_code == 7


# ---------------------------------------------------------------------- the older layout

OLD_SHIM = """
import fcntl, json, os, sys, time
from pathlib import Path
from distributed_grid.agent.limits import process_tree
from distributed_grid.posix.boot_clock import boot_id
folder, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
(folder / "work").mkdir(parents=True)
(folder.parent / ".live").mkdir()
(folder.parent / ".live" / folder.name).touch()
(folder / "spec.json").write_text(json.dumps(spec))
(folder / "cores.json").write_text("[]")
lock = os.open(folder / "shim.lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
me = process_tree.read_process(os.getpid())
identity = {"boot": boot_id(), "pid": me.pid, "start": me.start}
os.write(lock, json.dumps(identity).encode())
env = {"GRID_ATTEMPT_ID": folder.name, "GRID_JOB_DIR": f"{folder}/work"}
main = os.posix_spawn(spec["argv"][0], spec["argv"], env)
started = {"pid": main, "start": process_tree.read_process(main).start, "at_boot_ms": 5, "cores": [], "shim": identity}
(folder / "started.json").write_text(json.dumps(started))
print(main, flush=True)
code = os.waitstatus_to_exitcode(os.waitpid(main, 0)[1])
(folder / "exit.json").write_text(json.dumps({"kind": "exited", "exit_code": code, "detail": "as of old"}))
"""


def an_old_shim(root: Path, *argv: str) -> tuple[subprocess.Popen[bytes], int]:
    """A shim of the older layout with its command running, and the command's pid."""
    root.mkdir()
    spec = {
        "attempt_id": "a.1",
        "job_id": "job",
        "node": "here",
        "fence": 4,
        "argv": argv,
        "launched_boot_ms": 1,
        "boot": boot_id(),
    }
    shim = subprocess.Popen(
        [sys.executable, "-c", OLD_SHIM, str(root / "a.1"), json.dumps(spec)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert shim.stdout
    with shim.stdout:
        return shim, int(shim.stdout.readline())


def test_a_job_begun_in_the_older_layout_is_adopted_and_its_end_told(
    root: Path, new_driver: Callable[..., Driver]
) -> None:
    shim, main = an_old_shim(root, "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 7")
    first = new_driver()
    report = first.find(AttemptLaunch, "a.1")
    assert report is not None
    assert (report.pid, report.fence, first.shim_pid("a.1")) == (main, 4, shim.pid)
    first.run_coroutine(first.host.launch(a_spec("a.1", "false", fence=4)))  # asked for again, it is not run again
    os.kill(main, signal.SIGTERM)
    assert first.ended("a.1").detail == "as of old"
    shim.wait()
    first.close()
    assert new_driver().ended("a.1").exit_code == -signal.SIGTERM


def test_a_shim_of_the_older_layout_that_was_killed_is_lost_and_cleared(
    root: Path, new_driver: Callable[..., Driver]
) -> None:
    shim, main = an_old_shim(root, "/bin/sleep", "1000")
    driver = new_driver()
    shim.kill()
    assert driver.ended("a.1").kind == "lost"
    shim.wait()
    assert not is_alive(main)


# ---------------------------------------------------------------------- no hard links

LINKAT = {"x86_64": (86, 265), "aarch64": (37,)}.get(os.uname().machine, ())


def refuse_hard_links() -> None:
    """Have the kernel refuse hard links, as a file system without them does, to this process and all it starts."""
    load, equal, give = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0)]
    code += [(equal, len(LINKAT) - place, 0, number) for place, number in enumerate(LINKAT)]
    code += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | 1)]  # allow; EPERM
    packed = b"".join(struct.pack("HBBI", *step) for step in code)
    steps = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, so that anybody may
    assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, os.strerror(ctypes.get_errno())


def without_links(root: Path) -> None:
    """Run, move, adopt, lose and end attempts where there are no hard links; in a process of its own."""
    refuse_hard_links()
    driver = Driver(root)
    assert driver.run("a.1", "/bin/sh", "-c", "exit 7").exit_code == 7
    driver.launch("a.2", "/bin/sh", "-c", "sleep 0.3; exit 8")
    killed = driver.launch("a.3", "sleep", "1000")
    shims = [driver.shim_pid(name) for name in ("a.2", "a.3")]
    driver.close()
    os.kill(shims[1], signal.SIGKILL)
    while any(map(is_alive, shims)):
        time.sleep(0.01)
    Path(root, "a.2/exit.json").unlink()
    driver = Driver(root)
    assert driver.ended("a.1").exit_code == 7
    assert driver.ended("a.2").exit_code == 8
    assert driver.ended("a.3").kind == "lost"
    assert not is_alive(killed.pid)
    driver.run_coroutine(driver.host.launch(a_spec("a.2", "false")))
    assert [report.exit_code for report in driver.reports if isinstance(report, AttemptExit)][-1] == 8
    driver.launch("a.4", *python("import time; time.sleep(1000)"), cpu_milli=1000)
    assert driver.stop("a.4").kind == "cancelled"
    driver.finish()


@pytest.mark.skipif(not LINKAT, reason="knows only the system calls of x86_64 and aarch64")
def test_without_hard_links_everything_works_with_more_files(root: Path) -> None:
    script = f"from pathlib import Path\nfrom {__name__} import without_links\nwithout_links(Path({str(root)!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    names = ("spec.json", "shim.lock", "exit.json")
    assert len({(root / "a.1" / name).stat().st_ino for name in names}) == 3
    assert not (root / ".live/a.1").samefile(root / ".host.lock")
