"""Settings of a cluster file for everybody reach the rules of the ledger."""

from __future__ import annotations

import msgspec
import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import scheduling_policy
from distributed_grid.domain.scheduling_policy import HOUR_MS, Quota, SchedulingPolicy, Strategy

EVERYTHING = """\
resource_sharing: {strategy: spread}
fairness: {half_life_hours: 12, weights: {bo: 0.5, ana: 2}, starvation_hours: 2, patience_seconds: 90}
preemption: {minimum_run_seconds: 2.5, max_per_job: 7}
quotas:
  vision: {members: [ana, bo], gpu: 0.5, custom: {tpu: 3}}
  ana: {cpu: 4, memory_gb: 8, jobs: 3}
nodes: [{name: a, custom: {tpu: 4}}]
"""


def policy(text: str) -> SchedulingPolicy:
    return scheduling_policy(ClusterConfig.from_text(text))


def test_a_file_that_says_nothing_about_rules_means_the_default_ones():
    assert policy("name: lab") == SchedulingPolicy()


def test_what_a_file_says_reaches_the_rules_in_their_own_units():
    assert policy(EVERYTHING) == SchedulingPolicy(
        strategy=Strategy.SPREAD,
        half_life_ms=12 * HOUR_MS,
        weights=(("ana", 2000), ("bo", 500)),
        quotas=(
            Quota(name="ana", cpu_milli=4000, memory_bytes=8 * 1024**3, leases=3),
            Quota(name="vision", members=("ana", "bo"), gpu_milli=500, custom=(("tpu", 3),)),
        ),
        reserve_after_ms=90_000,
        starvation_ms=2 * HOUR_MS,
        minimum_run_ms=2_500,
        preemptions_max=7,
    )


@pytest.mark.parametrize("field", SchedulingPolicy.__struct_fields__)
def test_there_is_no_rule_that_a_file_cannot_change(field):
    assert getattr(policy(EVERYTHING), field) != getattr(SchedulingPolicy(), field)


def test_the_order_in_a_file_does_not_make_other_rules():
    shuffled = EVERYTHING.replace("{bo: 0.5, ana: 2}", "{ana: 2, bo: 0.5}")
    assert shuffled != EVERYTHING
    assert msgspec.msgpack.encode(policy(shuffled)) == msgspec.msgpack.encode(policy(EVERYTHING))
