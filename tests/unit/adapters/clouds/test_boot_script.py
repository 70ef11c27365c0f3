"""The boot script as a text: the same for the same order, small enough, and nothing of an order becomes a command."""

from __future__ import annotations

import subprocess

from distributed_grid.adapters.clouds.boot_script import EXIT_VARIABLE, HEARD_FILE, MAX_BYTES, boot_script
from distributed_grid.agent import agent_process, join_client
from distributed_grid.agent.join_client import JoinToken
from tests.support.bare_machine import order_for

TOKEN = JoinToken(("192.0.2.1:7433", "[2001:db8::1]:7433"), "ab" * 32, "0123456789ab", "s3cret").text()


def test_the_identical_order_makes_the_identical_script() -> None:
    one = order_for("worker-1", TOKEN, B_VARIABLE="2", A_VARIABLE="1")
    other = order_for("worker-1", TOKEN, A_VARIABLE="1", B_VARIABLE="2")
    assert boot_script(one) == boot_script(other)


def test_it_is_small_enough_for_every_cloud() -> None:
    many = tuple(f"control-plane-{number}.example.org:7433" for number in range(20))
    token = JoinToken(many, "ab" * 32, "0123456789ab", "s" * 43).text()
    assert len(boot_script(order_for("worker-0123456789ab", token)).encode()) < MAX_BYTES * 3 / 4


def test_it_is_a_script_that_every_shell_reads() -> None:
    done = subprocess.run(["sh", "-n"], input=boot_script(order_for("worker-1", TOKEN)), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_in_an_order_becomes_a_command() -> None:
    script = boot_script(order_for("worker-1", TOKEN, NOTE="'; touch /tmp/x; echo '$(id)`id`"))
    line = next(one for one in script.splitlines() if one.startswith("export NOTE="))
    done = subprocess.run(["sh", "-c", f'{line}\nprintf %s "$NOTE"'], text=True, capture_output=True, check=True)
    assert done.stdout == "'; touch /tmp/x; echo '$(id)`id`"


def test_the_token_is_neither_exported_nor_in_the_program() -> None:
    script = boot_script(order_for("worker-1", TOKEN))
    assert script.count(TOKEN) == 1
    assert f"token={TOKEN}" in script.splitlines()
    assert "GRID_JOIN_TOKEN" not in script


def test_a_hung_agent_is_given_some_time_more_than_it_gives_itself() -> None:
    assert "silence=151" in boot_script(order_for("worker-1", TOKEN, GRID_WORKER_EXIT_SECONDS="30.5")).splitlines()
    assert "silence=1000120" in boot_script(order_for("worker-1", TOKEN, GRID_WORKER_EXIT_SECONDS="1e+06")).splitlines()
    assert "silence=''" in boot_script(order_for("worker-1", TOKEN, GRID_WORKER_EXIT_SECONDS="0")).splitlines()


def test_script_and_agent_mean_the_same_variable_and_the_same_file() -> None:
    assert (EXIT_VARIABLE, HEARD_FILE) == (join_client.EXIT_VARIABLE, agent_process.HEARD_FILE)
