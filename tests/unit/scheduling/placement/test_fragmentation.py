"""The least cut off: a slow reckoning of the same laws beside the index, what follows from them, and typical shapes of
requests: counted, bounded, forgotten after a while, and weighed by how scarce their GPUs are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import floor, inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.indexes.columns import WHOLE_ONLY, FreeColumns
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.statistics import RequestShape, RequestShapes
from distributed_grid.scheduling.placement.fragmentation import (
    HALVE_AFTER,
    MAX_COLUMNS,
    MAX_SHAPES,
    TOTAL_WEIGHT,
    FragmentationIndex,
    count_shape,
    fragmentation_index,
    reweigh,
    shape_of,
    usable_supply,
)
from distributed_grid.scheduling.placement.placement import find_placement
from tests.support.builders import Scenario, a_node, a_request

MODELS = [frozenset({"NVIDIA A100"}), frozenset({"Tesla T4"})]
HALF, WHOLE, PAIR = RequestShape(1000, 2**30, 500), RequestShape(4000, 2**30, 1000), RequestShape(8000, 2**30, 2000)


@dataclass(frozen=True)
class Node:
    cpu: int
    memory: int
    devices: tuple[int, ...]
    model: int = 0


class Choice(NamedTuple):
    """A row, and the device for part of one; whole devices are not told apart."""

    row: int
    device: int | None


def choose(index: FragmentationIndex, shape: RequestShape, *rows: int) -> Choice | None:
    """Of some rows the one with the least loss, or None where none of them has room."""
    losses = index.losses(shape).tolist()
    row = min((row for row in rows if losses[row] < inf), key=lambda row: (losses[row], row), default=None)
    if row is None:
        return None
    return Choice(row, index.device(shape, row) if shape.is_part else None)


def columns_of(*nodes: Node) -> FreeColumns:
    columns = FreeColumns()
    for number, node in enumerate(nodes):
        write(columns, columns.row_of(f"n{number}"), node)
    return columns


def write(columns: FreeColumns, row: int, node: Node) -> None:
    columns.cpu[row], columns.memory[row] = node.cpu, node.memory
    columns.model[row] = columns.model_of(MODELS[node.model])
    columns.put_devices(row, node.devices)
    columns.touch(row)


def typical_of(*weights: tuple[RequestShape, int]) -> RequestShapes:
    return RequestShapes(weights=weights)


def free_node(*devices: int, cores: int = 16, model: int = 0) -> Node:
    return Node(cores * 1000, 2**36, devices, model)


def chosen(shape: RequestShape, request_shapes: RequestShapes, *nodes: Node) -> Choice | None:
    return choose(FragmentationIndex(columns_of(*nodes), request_shapes), shape, *range(len(nodes)))


# ---------------------------------------------------------------- the slow reckoning
def allowed(shape: RequestShape, model: int) -> bool:
    return not shape.models or any(word in name.lower() for word in shape.models for name in MODELS[model])


def usable(shape: RequestShape, node: Node) -> int:
    """How much of a node's free GPUs a shape could use."""
    part = shape.gpu_milli < 1000
    if part:
        held = sum(left // shape.gpu_milli * shape.gpu_milli for left in node.devices if 0 <= left <= 1000)
    else:
        held = sum(1000 for left in node.devices if left >= 1000)
    for left, need in ((max(node.cpu, 0), shape.cpu_milli), (node.memory, shape.memory_bytes)):
        if need:
            held = min(held, floor(Fraction(3 * shape.gpu_milli * left, 2 * need)))
    return held if held >= shape.gpu_milli and allowed(shape, node.model) else 0


def worth(request_shapes: RequestShapes, node: Node) -> int:
    return sum(weight * usable(shape, node) for shape, weight in request_shapes.weights)


def afterwards(shape: RequestShape, node: Node) -> list[tuple[int | None, Node]]:
    """Every way to place a shape on a node: the device, and what is left."""
    cpu, memory = node.cpu - shape.cpu_milli, node.memory - shape.memory_bytes
    if cpu < 0 or memory < 0 or (shape.gpu_milli and not allowed(shape, node.model)):
        return []
    devices = list(node.devices)
    if 0 < shape.gpu_milli < 1000:
        fits = [at for at, left in enumerate(devices) if shape.gpu_milli <= left <= 1000]
        taken = [(at, [left - shape.gpu_milli * (i == at) for i, left in enumerate(devices)]) for at in fits]
        return [(at, Node(cpu, memory, tuple(left), node.model)) for at, left in taken]
    wanted = shape.gpu_milli // 1000
    idle = sorted((at for at, left in enumerate(devices) if left >= 1000), key=lambda at: -devices[at])
    if len(idle) < wanted:
        return []
    for at in idle[:wanted]:
        devices[at] = 0
    return [(None, Node(cpu, memory, tuple(devices), node.model))]


def slowly(shape: RequestShape, request_shapes: RequestShapes, nodes: list[Node]) -> tuple[list[float], Choice | None]:
    """The loss on every row, and the choice."""
    losses, best = [], None
    for row, node in enumerate(nodes):
        ways = [(worth(request_shapes, node) - worth(request_shapes, left), at) for at, left in afterwards(shape, node)]
        loss, device = min(ways, key=lambda way: way[0], default=(inf, None))
        losses.append(loss)
        if loss < inf and (best is None or loss < losses[best.row]):
            best = Choice(row, device)
    return losses, best


# ---------------------------------------------------------------- laws
amounts = st.sampled_from([0, 1000, 3500, 12_000])

memories = st.sampled_from([0, 2**30, 5 * 2**30 + 7])

gpus = st.sampled_from([110, 250, 470, 500, 810, 1000, 1000, 2000, 4000])

models = st.sampled_from([(), (), (), ("t4",), ("a100", "t4")])

gpu_shapes = st.builds(RequestShape, amounts, memories, gpus, models)

any_shapes = gpu_shapes | st.builds(RequestShape, amounts, memories)

devices = st.lists(st.sampled_from([0, 190, 250, 530, 810, 1000, 1000, WHOLE_ONLY]), max_size=5)

nodes_of = st.builds(Node, st.integers(-500, 40_000), st.integers(0, 2**34), devices.map(tuple), st.integers(0, 1))

learned = st.lists(st.tuples(gpu_shapes, st.integers(1, 5000)), max_size=9, unique_by=lambda one: one[0]).map(
    lambda weights: typical_of(*weights)
)


@given(st.lists(nodes_of, min_size=1, max_size=12), learned, any_shapes)
def test_losses_and_choice_are_those_of_a_slow_reckoning(nodes, request_shapes, shape):
    index = FragmentationIndex(columns_of(*nodes), request_shapes)
    losses, choice = slowly(shape, request_shapes, nodes)
    assert index.losses(shape).tolist() == pytest.approx(
        losses, abs=sum(weight for _, weight in request_shapes.weights)
    )
    found = choose(index, shape, *range(len(nodes)))
    assert (found is None) == (choice is None)
    if found is not None and choice is not None and _exact(request_shapes):
        assert found == choice


def _exact(request_shapes: RequestShapes) -> bool:
    """Whether no limit can fall between two whole numbers, where a float may round to the other one."""
    return all(not shape.cpu_milli and not shape.memory_bytes for shape, _ in request_shapes.weights)


@given(st.lists(nodes_of, min_size=1, max_size=40), learned, st.lists(any_shapes, min_size=1, max_size=4), st.data())
def test_kept_losses_are_those_of_a_fresh_index_after_any_touches(nodes, request_shapes, asked, data):
    columns = columns_of(*nodes)
    index = FragmentationIndex(columns, request_shapes)
    for _ in range(data.draw(st.integers(1, 6))):
        index.losses(data.draw(st.sampled_from(asked)))
        for row in data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=12)):
            cpu, milli = data.draw(st.integers(0, 40_000)), data.draw(st.integers(0, 1000))
            write(columns, row, Node(cpu, nodes[row].memory, (milli,) * len(nodes[row].devices), nodes[row].model))
    fresh = FragmentationIndex(columns, request_shapes)
    for shape in asked:
        assert index.losses(shape).tolist() == fresh.losses(shape).tolist()
        assert choose(index, shape, *range(len(nodes))) == choose(fresh, shape, *range(len(nodes)))


@given(st.lists(nodes_of, min_size=1, max_size=20), learned, any_shapes)
def test_no_placement_makes_a_node_worth_more(nodes, request_shapes, shape):
    assert (FragmentationIndex(columns_of(*nodes), request_shapes).losses(shape) >= 0).all()


@given(st.lists(nodes_of, min_size=1, max_size=20), learned, any_shapes, st.randoms(use_true_random=False))
def test_the_order_in_which_shapes_were_learned_does_not_matter(nodes, request_shapes, shape, dice):
    weights = list(request_shapes.weights)
    dice.shuffle(weights)
    one, other = (FragmentationIndex(columns_of(*nodes), known) for known in (request_shapes, typical_of(*weights)))
    assert one.losses(shape).tolist() == other.losses(shape).tolist()


@given(st.lists(nodes_of, min_size=1, max_size=20), st.lists(gpu_shapes, min_size=1, max_size=20), st.data())
def test_supply_is_what_each_shape_could_use_in_the_order_of_the_counts(nodes, asked, data):
    request_shapes = RequestShapes()
    for shape in asked:
        request_shapes = count_shape(request_shapes, shape)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes))))
    could_use = usable_supply(request_shapes.counts, columns_of(*nodes), mask)
    for (shape, _), had in zip(request_shapes.counts, could_use, strict=True):
        reckoned = sum(usable(shape, node) for node, counts in zip(nodes, mask, strict=True) if counts)
        assert had == pytest.approx(reckoned, abs=len(nodes))


# ---------------------------------------------------------------- what follows
def test_request_that_fills_a_started_device_goes_there():
    request_shapes = typical_of((HALF, 1), (WHOLE, 1))
    assert chosen(HALF, request_shapes, free_node(1000), free_node(1000, 500)) == Choice(1, 1)


def test_a_part_that_leaves_too_little_goes_where_it_leaves_enough():
    request_shapes = typical_of((RequestShape(gpu_milli=300), 1))
    assert chosen(RequestShape(gpu_milli=400), request_shapes, free_node(600), free_node(700)) == Choice(1, 0)


def test_work_without_a_gpu_stays_off_the_cpu_that_gpus_need():
    request_shapes = typical_of((WHOLE, 1))
    assert chosen(
        RequestShape(8000), request_shapes, free_node(1000, 1000, cores=12), free_node(1000, 0, cores=12)
    ) == Choice(1, None)


def test_request_for_any_model_leaves_the_scarce_one():
    request_shapes = typical_of((WHOLE, 3), (RequestShape(4000, 2**30, 1000, ("a100",)), 1))
    assert chosen(WHOLE, request_shapes, free_node(1000, model=0), free_node(1000, model=1)) == Choice(1, None)


def test_one_device_is_taken_from_a_node_whose_pair_is_broken_already():
    request_shapes = typical_of((WHOLE, 1), (PAIR, 1))
    assert chosen(WHOLE, request_shapes, free_node(1000, 1000), free_node(1000, 0)) == Choice(1, None)


def test_a_part_never_goes_to_a_device_that_is_only_lent_whole():
    request_shapes = typical_of((HALF, 1))
    assert chosen(HALF, request_shapes, free_node(WHOLE_ONLY)) is None
    assert chosen(HALF, request_shapes, free_node(WHOLE_ONLY, 1000)) == Choice(0, 1)


def test_a_whole_device_goes_where_it_cannot_be_shared_anyway():
    request_shapes = typical_of((HALF, 1), (WHOLE, 1))
    assert chosen(WHOLE, request_shapes, free_node(1000), free_node(WHOLE_ONLY)) == Choice(1, None)


def test_without_room_on_an_allowed_row_there_is_no_choice():
    index = FragmentationIndex(columns_of(free_node(1000), free_node(0)), typical_of((HALF, 1)))
    assert choose(index, HALF, 1) is None
    assert choose(index, HALF, 0, 1) == Choice(0, 0)
    assert chosen(HALF, typical_of((HALF, 1))) is None


def test_while_nothing_is_known_the_first_row_with_room_is_as_good_as_any():
    assert chosen(HALF, RequestShapes(), free_node(200), free_node(1000), free_node(500)) == Choice(1, 0)


def test_a_model_that_came_later_is_known():
    columns = columns_of(free_node(1000), free_node(1000))
    index = FragmentationIndex(columns, typical_of((HALF, 1)))
    wanted = RequestShape(gpu_milli=500, models=("h100",))
    assert choose(index, wanted, 0, 1) is None
    columns.model[1] = columns.model_of({"NVIDIA H100"})
    columns.touch(1)
    assert choose(index, wanted, 0, 1) == Choice(1, 0)


def test_other_weights_count_at_once():
    index = FragmentationIndex(columns_of(free_node(600), free_node(700)), typical_of((RequestShape(gpu_milli=300), 1)))
    asked = RequestShape(gpu_milli=400)
    assert choose(index, asked, 0, 1) == Choice(1, 0)
    index.set_weights(typical_of((RequestShape(gpu_milli=700), 1)))
    assert choose(index, asked, 0, 1) == Choice(0, 0)


def test_more_shapes_than_are_kept_are_still_right():
    request_shapes = typical_of((HALF, 2), (RequestShape(gpu_milli=300), 1))
    index = FragmentationIndex(columns_of(free_node(1000, 530), free_node(810)), request_shapes)
    for _ in range(2):
        for milli in range(1, MAX_COLUMNS + 20):
            losses, _ = slowly(RequestShape(gpu_milli=milli), request_shapes, [free_node(1000, 530), free_node(810)])
            assert index.losses(RequestShape(gpu_milli=milli)).tolist() == losses


shapes = st.builds(RequestShape, st.integers(0, 40), st.just(0), st.sampled_from([10, 250, 500, 1000, 4000]))


def after(*asked: RequestShape) -> RequestShapes:
    request_shapes = RequestShapes()
    for shape in asked:
        request_shapes = count_shape(request_shapes, shape)
    return request_shapes


def test_a_request_without_a_gpu_teaches_nothing():
    assert after(RequestShape(4000, 2**30)) == RequestShapes()


def test_similar_shapes_are_counted_together():
    assert after(RequestShape(8000, 2**30, 500), RequestShape(8100, 2**30, 505)).counts == (
        (RequestShape(7680, 2**30, 500), 2),
    )
    assert len(after(RequestShape(7000, 2**30, 500), RequestShape(8000, 2**30, 500)).counts) == 2
    assert after(RequestShape(gpu_milli=3)).counts == ((RequestShape(gpu_milli=3), 1),)


def test_the_order_in_which_models_are_named_does_not_matter():
    assert (
        len(
            after(
                RequestShape(gpu_milli=1000, models=("b", "a")), RequestShape(gpu_milli=1000, models=("a", "b"))
            ).counts
        )
        == 1
    )


@given(st.lists(shapes, max_size=300))
def test_few_shapes_are_kept_and_none_of_them_counts_too_little(asked):
    request_shapes, truth = after(*asked), Counter(shape.rounded for shape in asked)
    kept = dict(request_shapes.counts)
    assert len(kept) == len(request_shapes.counts) <= MAX_SHAPES
    assert sum(kept.values()) == request_shapes.counted == len(asked)
    rarest = min(kept.values(), default=0) if len(kept) == MAX_SHAPES else 0
    assert all(truth[shape] <= count <= truth[shape] + rarest for shape, count in kept.items())
    assert all(truth[shape] <= rarest for shape in truth.keys() - kept.keys())


def test_outdated_shape_is_forgotten():
    old, new = RequestShape(gpu_milli=500), RequestShape(gpu_milli=1000)
    request_shapes = RequestShapes(((old, 3), (new, HALVE_AFTER - 4)), HALVE_AFTER - 1, taken=HALVE_AFTER - 1)
    request_shapes = count_shape(request_shapes, new)
    assert request_shapes.counts == ((old, 1), (new, (HALVE_AFTER - 3) // 2))
    assert (request_shapes.counted, request_shapes.taken) == (1 + (HALVE_AFTER - 3) // 2, (HALVE_AFTER - 1) // 2)
    request_shapes = count_shape(RequestShapes(request_shapes.counts, HALVE_AFTER - 1), new)
    assert [shape for shape, _ in request_shapes.counts] == [new]


def test_weights_are_due_with_the_first_request_and_then_after_a_fifth_more():
    request_shapes, due = RequestShapes(), []
    for number in range(1, 60):
        request_shapes = count_shape(request_shapes, RequestShape(gpu_milli=1000))
        if request_shapes.is_due:
            due.append(number)
            request_shapes = reweigh(request_shapes, [8000], 8000)
    assert due == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 19, 22, 26, 31, 37, 44, 52]


def test_the_scarcer_its_gpus_the_more_a_shape_matters():
    request_shapes = after(
        *[RequestShape(gpu_milli=1000)] * 3, RequestShape(gpu_milli=500), RequestShape(gpu_milli=8000)
    )
    weights = dict(reweigh(request_shapes, [6000, 6000, 1000], 6000).weights)
    assert weights[RequestShape(gpu_milli=1000)] == pytest.approx(3 * weights[RequestShape(gpu_milli=500)], abs=3)
    assert weights[RequestShape(gpu_milli=8000)] == pytest.approx(6 * weights[RequestShape(gpu_milli=500)], abs=6)


@given(st.lists(shapes, min_size=1, max_size=100), st.data())
def test_every_shape_weighs_something_and_all_together_stay_below_the_limit(asked, data):
    request_shapes = after(*asked)
    supply = data.draw(
        st.lists(st.integers(0, 2**40), min_size=len(request_shapes.counts), max_size=len(request_shapes.counts))
    )
    taken = reweigh(request_shapes, supply, 2**40)
    assert [shape for shape, _ in taken.weights] == [shape for shape, _ in request_shapes.counts]
    assert all(weight >= 1 for _, weight in taken.weights)
    assert sum(weight for _, weight in taken.weights) <= TOTAL_WEIGHT + MAX_SHAPES
    assert (taken.counts, taken.taken) == (request_shapes.counts, request_shapes.counted)
    assert not taken.is_due


SPARING = Strategy.FRAGMENTATION_AWARE


def a_grid_that_has_seen(*asks: float) -> Scenario:
    """Two nodes with two GPUs each, after requests for so many GPUs each came and went."""
    scenario = Scenario(a_node("one", gpus=2), a_node("two", gpus=2))
    for number, gpus in enumerate(asks):
        scenario.ask(a_request(f"t{number}", gpus=gpus))
        scenario.release(f"t{number}")
    return scenario


def test_only_requests_for_gpus_teach_something():
    scenario = a_grid_that_has_seen()
    scenario.ask(a_request("r1", cores=1))
    assert scenario.ledger.request_shapes.counted == 0
    scenario.ask(a_request("r2", gpus=1))
    scenario.ask(a_request("r2", gpus=1))
    assert scenario.ledger.request_shapes.counted == 1, "asking again is the same request"


def test_learned_shapes_are_stored_and_restored():
    scenario = a_grid_that_has_seen(1, 1, 2, 0.5)
    request_shapes = scenario.ledger.request_shapes
    assert {shape.gpu_milli for shape, _ in request_shapes.weights} == {500, 1000, 2000}
    again = Ledger(decode_row(row.kind, encode_row(row)) for row in scenario.ledger.rows(durable_only=True))
    assert again.request_shapes == request_shapes


def test_where_pairs_are_usual_a_single_one_goes_where_a_pair_is_broken_already():
    scenario = a_grid_that_has_seen(2, 2, 2)
    scenario.ask(a_request("r1", gpus=1, require=["two"]))
    assert find_placement(scenario.ledger, a_request("r2", gpus=1, strategy=SPARING)).node == "two"


def test_a_part_goes_onto_the_device_where_it_leaves_the_least_useless():
    scenario = a_grid_that_has_seen(1, 1, 1, 0.5)
    scenario.ask(a_request("r1", gpus=0.5, require=["two"]))
    found = find_placement(scenario.ledger, a_request("r2", gpus=0.5, strategy=SPARING))
    (used,) = scenario.ledger.leases["r1"].claim.gpus
    assert (found.node, found.claim.gpus[0].index) == ("two", used.index)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0.25, 0.5, 1, 2]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20
    )
)
def test_the_index_always_says_what_one_made_anew_would_say(steps):
    scenario = Scenario(*(a_node(f"n{i}", cores=8, gpus=i) for i in range(4)))
    for number, (gpus, cores, lets_go) in enumerate(steps):
        scenario.ask(a_request(f"r{number}", gpus=gpus, cores=cores or 1, strategy=SPARING))
        if lets_go:
            held = sorted(lease.id for lease in scenario.ledger.leases.values() if lease.holds)
            if held:
                scenario.release(held[number % len(held)])
        shape = shape_of(a_request(gpus=gpus, cores=cores or 1).ask)
        anew = FragmentationIndex(scenario.ledger.columns, scenario.ledger.request_shapes).losses(shape)
        assert np.array_equal(fragmentation_index(scenario.ledger).losses(shape), anew)
        scenario.ledger.check()
