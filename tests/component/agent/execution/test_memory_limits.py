"""A memory limit holds, is noticed within a second, and is named; in control groups and without."""

import re
from collections.abc import Callable

import pytest

from tests.component.agent.execution.conftest import Driver, python

pytestmark = pytest.mark.e2e
MB = 1 << 20
both_ways = pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "watched"])


@both_ways
def test_a_slow_overrun_is_stopped_and_named(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    grow = "import time\nheld = []\nwhile True: held.append(bytearray(8 << 20)); time.sleep(0.03)"
    ended = driver.run("a.1", *python(grow), memory_bytes=128 * MB)
    assert (ended.ending, ended.signal) == ("over_limit", 9)
    assert re.match(r"over limit: used \d+\.\d+ GB of 0\.12 GB", ended.detail)
    assert 128 * MB <= ended.max_memory_bytes < 400 * MB  # it grows by that much in little more than a second


@both_ways
def test_a_sudden_overrun_is_not_a_plain_signal_9(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    ended = driver.run("a.1", *python("x = b'x' * (2 << 30); import time; time.sleep(1000)"), memory_bytes=256 * MB)
    assert ended.ending == "over_limit"
    assert "of 0.25 GB" in ended.detail


@both_ways
@pytest.mark.parametrize("limit", [1000, 200 << 10, 1 << 20])
def test_a_limit_that_no_program_can_start_with_is_an_overrun_and_no_lost_job(
    new_driver: Callable[..., Driver], use_cgroups: bool, limit: int
) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    ended = driver.run("a.1", *python("import time; time.sleep(1000)"), memory_bytes=limit, env={"LONG": "x" * 100_000})
    assert ended.ending == "over_limit"
    assert re.match(rf"over limit: used \S+ MB of {limit / MB:.3g} MB", ended.detail)


@both_ways
def test_the_limit_is_for_the_whole_tree(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    four = "import os, time\nfor _ in range(3):\n  if os.fork() == 0: break\n"
    code = f"{four}x = b'x' * (60 << 20)\ntime.sleep(1000)"
    assert driver.run("a.1", *python(code), memory_bytes=200 * MB).ending == "over_limit"


@both_ways
def test_what_is_shared_is_counted_once(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    code = "import os, time\nx = b'x' * (80 << 20)\nos.fork(); os.fork()\ntime.sleep(0.6)"
    ended = driver.run("a.1", *python(code), memory_bytes=160 * MB)
    assert (ended.ending, ended.exit_code) == ("exited", 0)


@both_ways
def test_a_job_within_its_limit_is_left_alone(new_driver: Callable[..., Driver], use_cgroups: bool) -> None:
    driver = new_driver(use_cgroups=use_cgroups)
    ended = driver.run("a.1", *python("x = b'x' * (100 << 20)"), memory_bytes=200 * MB)
    assert (ended.ending, ended.exit_code) == ("exited", 0)
    assert driver.run("a.2", "head", "-c", "300M", "/dev/zero", memory_bytes=64 * MB).ending == "exited"


def test_usage_is_of_the_whole_tree(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver()
    assert driver.host.usage() == {}
    code = "import os, time\nos.fork()\nx = b'x' * (50 << 20)\nprint(1)\nwhile True: pass"
    driver.launch("a.1", *python(code))
    driver.numbers("a.1", 2)
    driver.until(lambda: driver.host.usage()["a.1"].cpu_ms > 200)
    usage = driver.host.usage()["a.1"]
    assert 100 * MB < usage.memory_bytes < 140 * MB
