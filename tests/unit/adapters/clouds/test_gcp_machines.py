"""Offers of Compute Engine: meaning of a config, prices, and limits of zero."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distributed_grid.adapters.clouds.gcp import (
    MachineShape,
    WantedShape,
    limits_of,
    make_offer,
    ordered_machine,
    price_micro,
    resources_of,
    shapes_of,
)
from distributed_grid.config.providers import GcpSettings, open_provider
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import WorkerOffer
from tests.support.project import PROJECT

HAS = WorkerResources(4000, 16 << 30)


def settings(**keys: Any) -> GcpSettings:
    found = open_provider("gcp", {"gcp": {"project": "my-project", "zone": "us-central1-a", **keys}}, {})
    assert isinstance(found, GcpSettings)
    return found


def offer(shape: str, market: str, limits: dict[str, float], *, gpus: int = 0, **keys: Any) -> WorkerOffer:
    """The offer of a machine type as a config writes it, under these limits."""
    config = settings(machine_types={"x": shape}, **keys)
    has = WorkerResources(4000, 16 << 30, gpus)
    return make_offer(config, shapes_of(config)["x"][0], ("x", market, "us-central1-a"), has, limits)


def test_the_machine_types_of_the_guide_are_understood() -> None:
    text = (PROJECT / "tests/fixtures/seeds/cloud_providers.json").read_text()
    config = open_provider("gcp", json.loads(text), {})
    assert isinstance(config, GcpSettings)
    (cpu,), (gpu,) = shapes_of(config)["cpu"], shapes_of(config)["gpu"]
    assert cpu.shape == MachineShape("n2-standard-4")
    assert gpu.shape == MachineShape("n1-standard-4", "nvidia-tesla-t4", 1)
    assert config.zone_names == ("us-central1-a",)


def test_accelerators_are_named_beside_the_type_with_their_count() -> None:
    config = settings(machine_types={"gpu": ["n1-standard-8", "n1-standard-4"]}, accelerators={"gpu": "nvidia-l4:2"})
    assert [one.shape for one in shapes_of(config)["gpu"]] == [
        MachineShape("n1-standard-8", "nvidia-l4", 2),
        MachineShape("n1-standard-4", "nvidia-l4", 2),
    ]
    with pytest.raises(BadInput, match="TYPE:COUNT"):
        shapes_of(settings(machine_types={"gpu": "n1-standard-8"}, accelerators={"gpu": "nvidia-l4:x"}))


@pytest.mark.parametrize("shape", ["n2-standard-4", "n1-standard-4-nvidia-tesla-t4"])
@pytest.mark.parametrize("market", ["spot", "standard"])
def test_an_offer_says_all_that_a_machine_is_made_from(shape: str, market: str) -> None:
    made = offer(shape, market, {})
    wanted = shapes_of(settings(machine_types={"x": shape}))["x"][0]
    assert ordered_machine(made) == (wanted.shape, market, "us-central1-a")


@pytest.mark.parametrize(
    "name", ["", "cpu", "cpu/x/spot", "cpu/x/other/zone", "cpu/X/spot/zone", "cpu/x/spot/zone/more"]
)
def test_what_is_no_offer_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="no offer"):
        ordered_machine(WorkerOffer(name, "cpu", HAS))


def test_the_price_of_a_type_goes_before_that_of_the_kind_and_spot_never_costs_more() -> None:
    config = settings(price_per_hour={"cpu": 0.2, "n2-standard-4": 0.19, "cpu:spot": 0.05, "gpu": 1})
    assert price_micro(config, "cpu", "n2-standard-4", "standard") == 190_000
    assert price_micro(config, "cpu", "e2-standard-4", "standard") == 200_000
    assert price_micro(config, "cpu", "n2-standard-4", "spot") == 50_000
    assert price_micro(config, "gpu", "g2-standard-4", "spot") == 1_000_000
    assert price_micro(config, "memory", "m1-megamem-96", "spot") is None


def test_what_a_machine_has_is_what_google_says_with_the_accelerators_of_its_own() -> None:
    g2 = {"guestCpus": 4, "memoryMb": 16384, "accelerators": [{"guestAcceleratorCount": 1}]}
    assert resources_of(g2, MachineShape("g2-standard-4")) == WorkerResources(4000, 16384 << 20, 1)
    n1 = {"guestCpus": 4, "memoryMb": 15360}
    assert resources_of(n1, MachineShape("n1-standard-4", "nvidia-l4", 2)) == WorkerResources(4000, 15360 << 20, 2)


@pytest.mark.parametrize(
    ("shape", "market", "limits", "forbids"),
    [
        ("e2-standard-4", "standard", {"CPUS": 0}, "CPUS"),
        ("e2-standard-4", "standard", {"CPUS": 8, "PREEMPTIBLE_CPUS": 0}, ""),
        ("e2-standard-4", "spot", {"CPUS": 8, "PREEMPTIBLE_CPUS": 0}, ""),
        ("e2-standard-4", "spot", {"CPUS": 0, "PREEMPTIBLE_CPUS": 0}, "CPUS"),
        ("e2-standard-4", "spot", {"CPUS": 0}, ""),  # the other is not known
        ("n2-standard-4", "standard", {"CPUS": 0}, ""),
        ("n2-standard-4", "standard", {"N2_CPUS": 0}, "N2_CPUS"),
        ("n2-standard-4", "standard", {"CPUS_ALL_REGIONS": 0}, "CPUS_ALL_REGIONS"),
        ("n1-standard-4-nvidia-tesla-t4", "standard", {"GPUS_ALL_REGIONS": 0}, "GPUS_ALL_REGIONS"),
        ("n1-standard-4-nvidia-tesla-t4", "spot", {"NVIDIA_T4_GPUS": 0, "PREEMPTIBLE_NVIDIA_T4_GPUS": 1}, ""),
        ("n1-standard-4-nvidia-tesla-t4", "standard", {"NVIDIA_T4_GPUS": 0, "PREEMPTIBLE_NVIDIA_T4_GPUS": 1}, ""),
        ("n1-standard-4-nvidia-l4", "spot", {"NVIDIA_L4_GPUS": 0, "PREEMPTIBLE_NVIDIA_L4_GPUS": 0}, "NVIDIA_L4_GPUS"),
        ("n1-standard-4-nvidia-l4", "spot", {}, ""),
    ],
)
def test_a_limit_of_zero_forbids_and_what_is_not_known_does_not(
    shape: str, market: str, limits: dict[str, float], forbids: str
) -> None:
    gpus = int("nvidia" in shape)
    assert offer(shape, market, limits, gpus=gpus).unavailable == (f"the quota {forbids} is 0" if forbids else "")


def test_a_machine_that_may_run_for_more_than_a_week_needs_the_limit_for_standard_gpus() -> None:
    limits = {"NVIDIA_T4_GPUS": 0.0, "PREEMPTIBLE_NVIDIA_T4_GPUS": 1.0}
    made = offer("n1-standard-4-nvidia-tesla-t4", "standard", limits, gpus=1, max_run_hours=24 * 8)
    assert made.unavailable == "the quota NVIDIA_T4_GPUS is 0"
    assert made.lifetime_seconds == 8 * 86_400


def test_limits_that_are_no_numbers_are_not_known() -> None:
    assert limits_of([{"metric": "CPUS", "limit": 8}, {"metric": "X", "limit": "8"}, "x", {}]) == {"CPUS": 8.0}


def test_a_type_that_the_config_writes_is_also_the_key_of_its_price() -> None:
    wanted = WantedShape("n1-standard-4-nvidia-l4", MachineShape("n1-standard-4", "nvidia-l4", 1))
    config = settings(price_per_hour={"n1-standard-4-nvidia-l4": 0.5})
    assert make_offer(config, wanted, ("gpu", "spot", "us-central1-a"), HAS, {}).price_micro == 500_000
