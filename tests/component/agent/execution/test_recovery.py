"""Files on the disk are read after any failure: a crash, a power failure, no hard links."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.agent.execution.attempt import AttemptExit
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
    return first.root / ".control/a.1"


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
    assert driver.ended("a.1").ending == "lost"
    assert driver.run("a.1", "true").ending == "lost"


def test_a_shim_that_did_not_get_to_say_who_it_is_never_ran(new_driver: Callable[..., Driver]) -> None:
    folder = ended_unheard(new_driver, 9)
    (folder / "exit.json").unlink()
    text = (folder / "spec.json").read_bytes()
    os.truncate(folder / "spec.json", text.index(b'{"shim"') + 20)
    driver = new_driver()
    assert driver.reports == []
    assert driver.run("a.1", "/bin/sh", "-c", "exit 7").exit_code == 7


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
    Path(root, ".control/a.2/exit.json").unlink()
    driver = Driver(root)
    assert driver.ended("a.1").exit_code == 7
    assert driver.ended("a.2").exit_code == 8
    assert driver.ended("a.3").ending == "lost"
    assert not is_alive(killed.pid)
    driver.run_coroutine(driver.host.launch(a_spec("a.2", "false")))
    assert [report.outcome.exit_code for report in driver.reports if isinstance(report, AttemptExit)][-1] == 8
    driver.launch("a.4", *python("import time; time.sleep(1000)"), cpu_milli=1000)
    assert driver.stop("a.4").ending == "cancelled"
    driver.finish()


@pytest.mark.skipif(not LINKAT, reason="knows only the system calls of x86_64 and aarch64")
def test_without_hard_links_everything_works_with_more_files(root: Path) -> None:
    script = f"from pathlib import Path\nfrom {__name__} import without_links\nwithout_links(Path({str(root)!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    names = ("spec.json", "shim.lock", "exit.json")
    assert len({(root / ".control/a.1" / name).stat().st_ino for name in names}) == 3
    assert not (root / ".control/.live/a.1").samefile(root / ".control/.host.lock")
