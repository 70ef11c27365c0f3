"""What `grid cluster` says about the use of Ray."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.api.answers.cluster import RayStatus
from distributed_grid.cli.commands.cluster import ray_hint

RAY = RayStatus(
    mode="grid",
    address="10.0.0.1:6379",
    session=None,
    authenticated=True,
    nodes={},
    risk=None,
    dashboard="http://127.0.0.1:8265",
    client=None,
    head="10.0.0.1:6379",
)
EVAL = 'in each new shell: eval "$(grid cluster env)"'
TOKEN = 'the dashboard\'s token: cat "$RAY_AUTH_TOKEN_PATH"'


def test_the_hint_says_that_each_shell_needs_it_and_where_the_token_of_the_dashboard_is() -> None:
    assert ray_hint(RAY) == f"for `ray status` and Ray programs, {EVAL}; {TOKEN}"
    assert ray_hint(replace(RAY, authenticated=False)) == f"for `ray status` and Ray programs, {EVAL}"


def test_a_head_on_another_machine_needs_another_address() -> None:
    far = ray_hint(replace(RAY, head="127.0.0.2:6379"))
    assert far == f"for Ray programs, {EVAL}; then also: ray status --address 127.0.0.2:6379; {TOKEN}"
    later = ray_hint(replace(RAY, head=None, dashboard=None))
    assert later == f"for Ray programs, once the ports of its head are forwarded, {EVAL}"
