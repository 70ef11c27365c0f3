"""Whatever happens to a move: never two, never none, and nothing is left behind."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from distributed_grid.domain import events
from tests.unit.reactor.offloading.source_model import LIVING, NODES, SOURCE, TARGETS, Scene


def act(scene: Scene, action: str, which: int) -> None:
    name = NODES[which % 3]
    moves = sorted(scene.ledger.moves)
    match action:
        case "request":
            scene.request(which)
        case "send":
            scene.send()
        case "deliver":
            scene.deliver(1 + which)
        case "drop the link":
            scene.in_flight = []
        case "kill":
            scene.original.kill()
        case "report":
            scene.report(backwards=which % 3 == 2)
        case "lie":
            scene.report(lies=True, backwards=which % 2 == 1)
        case "run":
            scene.run_attempts()
        case "hear":
            scene.hear(again=which % 3 == 0, backwards=which % 4 == 3)
        case "complete" if which % 3 == 0:
            scene.complete()
        case "time":
            scene.advance((100, 1_000, 9_700, 12_000, 70_000, 700_000)[which % 6])
        case "cancel" if moves:
            scene.handle(events.MoveCancelled(moves[which % len(moves)], "ada"))
        case "fail" if moves:
            scene.handle(events.MoveFailed(moves[which % len(moves)], "the disk is full"))
        case "reclaim" if moves:
            scene.handle(events.LeaseReclaimed(moves[which % len(moves)], "its owner is back"))
        case "cancel job":
            uids = sorted(scene.ledger.jobs)
            if uids:
                scene.cancelled.add(uids[which % len(uids)])
                scene.handle(events.JobCancelled(uids[which % len(uids)], "ada"))
        case "lose":
            scene.lose(name)
        case "drain":
            scene.handle(events.NodeDrained(TARGETS[which % 2], cooling=True, reclaims=which % 3 == 0))
        case "resume":
            scene.handle(events.NodeResumed(TARGETS[which % 2]))
        case "forget":
            scene.handle(events.NodeForgotten(SOURCE))
        case "reboot":
            scene.reboot()
        case "finish":
            scene.original.finish()
        case "restart":
            scene.restart_control_plane()


USUAL = ("request", "send", "deliver", "run", "hear", "report", "kill", "time")
TROUBLE = ("drop the link", "lie", "complete", "cancel", "fail", "reclaim", "cancel job", "lose", "drain", "resume",
           "forget", "reboot", "finish", "restart")  # fmt: skip
MOVED = [("request", 0), ("send", 0), ("deliver", 9), ("send", 0), ("hear", 1), ("deliver", 9), ("report", 0)]
COMMITTED = [*MOVED, ("send", 0), ("hear", 1), ("deliver", 9)]


def check_end(scene: Scene) -> None:
    """Conditions after every fault has ended."""
    scene.settle()
    ledger = scene.ledger
    assert ledger.is_empty, f"left: {[*ledger.moves.values()]}, {[*ledger.leases]}, {[*ledger.jobs]}"
    assert not scene.running, "something runs that nobody knows of"
    original = scene.original.original
    assert original != "stands still", "the original was never thawed"
    if original in (*LIVING, "ended"):
        assert not scene.submitted, f"the original {original}, and its job was made"
    if original == "killed":
        assert scene.submitted, "the original was killed, and nothing came of it"
    for uid in {*scene.submitted, "r1"}:
        assert uid in scene.completed | scene.cancelled, f"{uid} has never been run to its end"


@example([*COMMITTED, ("report", 0), ("reboot", 0), ("restart", 0)])
@example([*COMMITTED, ("reboot", 0), ("cancel", 0), ("report", 0)])
@example([*COMMITTED, ("cancel", 0), ("kill", 0), ("drop the link", 0), ("lose", 1)])
@example([*MOVED, ("time", 3), ("send", 0), ("hear", 1), ("deliver", 9), ("lie", 0)])
@example([("request", 1), ("run", 0), ("hear", 1), ("lose", 1), ("run", 0), ("restart", 0)])
@given(st.lists(st.tuples(st.sampled_from((*USUAL, *USUAL, *TROUBLE)), st.integers(0, 11)), max_size=70))
def test_never_two_never_none_and_nothing_is_left(script):
    scene = Scene()
    for action, which in script:
        act(scene, action, which)
    check_end(scene)


@given(st.lists(st.tuples(st.sampled_from(TROUBLE), st.integers(0, 11)), max_size=12), st.integers(0, 60))
def test_trouble_at_any_point_of_a_move_that_goes_its_way(trouble, at):
    """A move that goes on by itself, with trouble in the middle of it: that way every state is reached."""
    scene = Scene()
    steps = [(one, 1) for one in ("send", "deliver", "hear", "report", "run", "kill")]
    way = [("request", 0), ("request", 1), *steps * 9]
    for place, (action, which) in enumerate(way):
        if place == at:
            for one in trouble:
                act(scene, *one)
        act(scene, action, 9 if action == "deliver" else which)
    check_end(scene)
