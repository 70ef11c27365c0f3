"""The laws of `allocate_cores`, over any history of claims coming and going."""

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.limits.core_allocation import (
    CORE,
    CoreClaim,
    allocate_cores,
    allowed_cores,
    cgroup_weight,
    niceness,
)

MILLI = st.one_of(st.integers(1, 999), st.sampled_from([250, 500, 1000, 1500, 2000, 3000, 9000]), st.integers(1, 5000))
# Each step adds a claim or, when negative, ends one.
HISTORIES = st.lists(st.one_of(MILLI, st.integers(-20, -1)), max_size=25)
MACHINES = st.integers(1, 8).map(lambda count: tuple(range(10, 10 + count)))


def live_through(history: list[int], cores: tuple[int, ...]) -> list[dict[str, CoreClaim]]:
    """The claims with their cores after each step."""
    claims: dict[str, CoreClaim] = {}
    states = []
    for number, step in enumerate(history):
        if step > 0:
            claims[f"job{number}"] = CoreClaim(step)
        elif claims:
            claims.pop(list(claims)[step % len(claims)])
        placed = allocate_cores(claims, cores)
        claims = {name: CoreClaim(claims[name].milli, placed[name]) for name in claims}
        states.append(dict(claims))
    return states


@given(HISTORIES, MACHINES)
def test_everybody_has_as_many_distinct_cores_as_asked_or_all(history: list[int], cores: tuple[int, ...]) -> None:
    for claims in live_through(history, cores):
        for claim in claims.values():
            assert len(set(claim.cores)) == len(claim.cores) == min(len(cores), -(-claim.milli // CORE))
            assert set(claim.cores) <= set(cores)


@given(HISTORIES, MACHINES)
def test_while_there_is_plenty_nothing_is_overbooked(history: list[int], cores: tuple[int, ...]) -> None:
    for claims in live_through(history, cores):
        # Two halves of a core and a bit cannot always be packed; a core for each fraction always can.
        if sum(-(-claim.milli // CORE) for claim in claims.values()) <= len(cores):
            load = dict.fromkeys(cores, 0)
            for claim in claims.values():
                for core in claim.whole_cores:
                    load[core] += CORE
                if claim.rest_core is not None:
                    load[claim.rest_core] += claim.rest
            assert max(load.values()) <= CORE


@given(HISTORIES, MACHINES)
def test_arranging_again_moves_nobody(history: list[int], cores: tuple[int, ...]) -> None:
    for claims in live_through(history, cores):
        assert allocate_cores(claims, cores) == {name: claim.cores for name, claim in claims.items()}


@given(st.lists(st.just(1000), min_size=1, max_size=30), MACHINES)
def test_too_many_are_spread_evenly(history: list[int], cores: tuple[int, ...]) -> None:
    held = [core for claim in live_through(history, cores)[-1].values() for core in claim.cores]
    counts = [held.count(core) for core in cores]
    assert max(counts) - min(counts) <= 1


def test_fractions_share_and_make_room() -> None:
    half, rest = CoreClaim(500, (0,)), CoreClaim(400, (1,))
    assert allocate_cores({"a": half, "b": CoreClaim(500)}, (0, 1)) == {"a": (0,), "b": (0,)}
    packed = allocate_cores({"a": half, "b": rest, "c": CoreClaim(1000)}, (0, 1))
    assert packed["a"] == packed["b"] != packed["c"]


def test_a_claim_beyond_all_measure_gets_all_cores_and_no_more_memory() -> None:
    assert allocate_cores({"a": CoreClaim(2**62)}, (0, 1)) == {"a": (0, 1)}


def test_a_core_and_a_half_is_one_alone_and_one_shared() -> None:
    placed = allocate_cores({"a": CoreClaim(1500), "b": CoreClaim(500)}, (0, 1))
    assert placed["a"][1] == placed["b"][0]


def test_weights_follow_the_fraction() -> None:
    assert [cgroup_weight(milli, 1) for milli in (0, 1000, 500, 250)] == [0, 0, 512, 256]
    assert cgroup_weight(1500, 2) == 1024
    assert [niceness(milli) for milli in (1000, 999, 500, 250, 1)] == [0, 0, 3, 6, 19]


CORE_LISTS = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(tuple)


@given(CORE_LISTS, CORE_LISTS)
def test_confined_work_stays_on_its_own_cores_as_far_as_it_may(
    cores: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    assert allowed_cores(cores, None) == cores
    confined = allowed_cores(cores, allowed)
    assert set(confined) == (set(cores) & set(allowed) or set(allowed))
