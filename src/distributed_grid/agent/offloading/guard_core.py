"""Guard of a move at its source, as a state machine without input, output or clock.

    opened → freezing → frozen → checked → decided → dead
       ↘        ↘         ↘         ↘
             thawed or gone, both final

Its state is the content of its journal: only `apply` changes it, and the successor of a guard that was killed applies
the same records. The driver performs actions in their order, and applies a record once it is written; if it cannot be
written, the rest of the actions is dropped and `not_recorded` returns others.

- Thaw: a frozen tree is continued when the freeze lease ends, unless the decision is in the journal. So no failure of
  agent, control plane or network keeps it frozen for longer.
- Check: the agent reads the frozen tree a second time. `checked` is recorded if it is as it was at the request; any
  difference thaws the tree.
- Decision: written only after `checked`, while the whole tree is still and a margin of the lease is left. After it
  the tree is killed, never thawed, by this guard or by the next.
- A thaw is final for the original: every later order to commit is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from distributed_grid.domain.states import MoveState

MIN_LEASE_MS, MAX_LEASE_MS = 500, 60_000
MAX_MARGIN_MS = 500
ANOTHER_BOOT = "its machine was restarted"


FINAL_PHASES = frozenset((MoveState.DEAD, MoveState.THAWED, MoveState.GONE))
STILL_PHASES = frozenset((MoveState.FROZEN, MoveState.CHECKED))
"""The whole tree is stopped, and is continued when the lease ends."""
GUARD_TRANSITIONS: dict[MoveState, frozenset[MoveState]] = {
    MoveState.OPENED: frozenset((MoveState.FREEZING, MoveState.THAWED, MoveState.GONE)),
    MoveState.FREEZING: frozenset((MoveState.FROZEN, MoveState.THAWED, MoveState.GONE)),
    MoveState.FROZEN: frozenset((MoveState.CHECKED, MoveState.DECIDED, MoveState.THAWED, MoveState.GONE)),
    MoveState.CHECKED: frozenset((MoveState.DECIDED, MoveState.THAWED, MoveState.GONE)),
    MoveState.DECIDED: frozenset((MoveState.DEAD,)),
    MoveState.DEAD: frozenset(),
    MoveState.THAWED: frozenset(),
    MoveState.GONE: frozenset(),
}
"""From frozen to decided only in the journal of an earlier version: its decision holds."""
Member = tuple[int, int]
"""A process of the tree: its pid and its start time, in clock ticks since boot."""


class GuardRecord(NamedTuple):
    """One line of the journal: the phase that begins, and its time (milliseconds since boot)."""

    step: MoveState
    at_ms: int
    until_ms: int = 0  # the end of the freeze lease
    members: tuple[Member, ...] = ()  # the processes of the tree
    spared: tuple[Member, ...] = ()  # those of them that were stopped before the freeze: a thaw leaves them stopped
    why: str = ""
    frozen_ms: int = 0  # time that the tree was frozen


class TreeView(NamedTuple):
    """Observation of the tree: whether the original lives, and whether every process of it is stopped."""

    is_alive: bool
    is_still: bool = False
    why: str = ""


class WriteRecord(NamedTuple):
    """Write a record into the journal and apply it; `durable`: it must be on the disk before anything else is done."""

    record: GuardRecord
    durable: bool = False


class StopTree(NamedTuple):
    """Stop the whole tree by this time, then call `stopped` or `not_stopped`."""

    by_ms: int


class ContinueTree(NamedTuple):
    """Continue all that was stopped by this guard or by the one before; repeated, it changes nothing."""


class KillTree(NamedTuple):
    """Kill the whole tree, and call `killed` when all of it is gone."""


GuardAction = WriteRecord | StopTree | ContinueTree | KillTree
_UNRECORDED = "its journal cannot be written"


class GuardCore:
    """Decides about one original."""

    def __init__(self, records: tuple[GuardRecord, ...] = ()) -> None:
        self.phase = MoveState.OPENED
        self.until_ms = self.lease_ms = self.frozen_at_ms = 0
        self.members: tuple[Member, ...] = ()
        self.spared: tuple[Member, ...] = ()
        for record in records:
            self.apply(record)

    @property
    def is_final(self) -> bool:
        return self.phase in FINAL_PHASES

    @property
    def margin_ms(self) -> int:
        """Part of the lease that must be left when the decision is written."""
        return min(self.lease_ms // 10, MAX_MARGIN_MS)

    def apply(self, record: GuardRecord) -> None:
        """A record is in the journal. One that the phase has no room for is ignored: the first word stays."""
        if record.step not in GUARD_TRANSITIONS[self.phase]:
            return
        self.phase = record.step
        if record.step is MoveState.FREEZING:
            self.frozen_at_ms, self.until_ms = record.at_ms, record.until_ms
            self.lease_ms = record.until_ms - record.at_ms
        if record.members or record.spared:
            self.members, self.spared = record.members, record.spared

    # ------------------------------------------------------------------ orders

    def freeze(
        self, now: int, lease_ms: int, members: tuple[Member, ...], spared: tuple[Member, ...]
    ) -> list[GuardAction]:
        """Freeze the tree for so long at most. It is frozen once; a second order adds no time."""
        if self.phase is not MoveState.OPENED:
            return []
        lease_ms = min(max(lease_ms, MIN_LEASE_MS), MAX_LEASE_MS)
        begun = GuardRecord(MoveState.FREEZING, now, now + lease_ms, members, spared)
        return [WriteRecord(begun), StopTree(now + lease_ms // 4)]

    def check(self, now: int, changes: str) -> list[GuardAction]:
        """Record the result of the second look: without changes the original may be ended, otherwise it is thawed.
        `commit` checks that the tree has been still since."""
        if self.phase is not MoveState.FROZEN:
            return []
        if changes:
            return self.thaw(now, changes)
        return [WriteRecord(GuardRecord(MoveState.CHECKED, now, self.until_ms))]

    def commit(self, now: int, view: TreeView) -> list[GuardAction]:
        """End the original, if it was checked and its lease lasts long enough; else thaw it, and that is final."""
        if self.phase is MoveState.DECIDED or self.is_final:
            return []
        if self.phase is MoveState.FROZEN:
            return self.thaw(now, "it was not looked at a second time")
        if self.phase is not MoveState.CHECKED:
            return self.thaw(now, "it was not frozen")
        if ended := self._unless_continued(now, view):
            return ended
        if self.until_ms - now < max(self.margin_ms, 1):
            return self.thaw(now, "too little of the freeze lease was left")
        decided = GuardRecord(
            MoveState.DECIDED, now, self.until_ms, self.members, self.spared, frozen_ms=self._frozen_ms(now)
        )
        return [WriteRecord(decided, durable=True), KillTree()]

    def thaw(self, now: int, why: str) -> list[GuardAction]:
        """Continue the original for good; not once it is decided."""
        if self.phase is MoveState.DECIDED or self.is_final:
            return []
        was_frozen = self.phase is not MoveState.OPENED
        record = GuardRecord(MoveState.THAWED, now, why=why, frozen_ms=self._frozen_ms(now))
        return [WriteRecord(record), *([ContinueTree()] if was_frozen else [])]

    # ------------------------------------------------------------------ observations

    def stopped(self, now: int, members: tuple[Member, ...], spared: tuple[Member, ...]) -> list[GuardAction]:
        """Record that the whole tree is stopped."""
        if self.phase is not MoveState.FREEZING:
            return []
        if self.until_ms - now <= self.margin_ms:
            return self.thaw(now, "it took too long to freeze")
        return [WriteRecord(GuardRecord(MoveState.FROZEN, now, self.until_ms, members, spared))]

    def not_stopped(self, now: int, why: str) -> list[GuardAction]:
        """Thaw a tree that cannot be frozen as a whole."""
        return self.thaw(now, why) if self.phase is MoveState.FREEZING else []

    def killed(self, now: int) -> list[GuardAction]:
        """Nothing of the tree is left."""
        if self.phase is not MoveState.DECIDED:
            return []
        return [WriteRecord(GuardRecord(MoveState.DEAD, now, frozen_ms=self._frozen_ms(now)), durable=True)]

    def observe(self, now: int, view: TreeView) -> list[GuardAction]:
        """Time has passed, or something has happened to the tree."""
        if self.phase is MoveState.DECIDED:
            return [KillTree()]
        if self.is_final:
            return []
        if not view.is_alive:
            return self._gone(now)
        if self.phase is not MoveState.OPENED and now >= self.until_ms:
            return self.thaw(now, "its freeze lease has ended")
        return []

    def resume(self, now: int, view: TreeView, *, same_boot: bool) -> list[GuardAction]:
        """Take over from a guard that has ended in any phase: its unfinished actions are repeated or undone."""
        if not same_boot:
            if self.is_final:
                return []
            if self.phase is MoveState.DECIDED:
                return [WriteRecord(GuardRecord(MoveState.DEAD, now, why=ANOTHER_BOOT), durable=True)]
            return [WriteRecord(GuardRecord(MoveState.GONE, now, why=ANOTHER_BOOT))]
        if self.phase in (MoveState.THAWED, MoveState.GONE):
            return [ContinueTree()] if self.until_ms else []
        if self.phase is MoveState.FREEZING and view.is_alive:
            return self.thaw(now, "its guard was killed while it froze the tree")
        if self.phase in STILL_PHASES and (ended := self._unless_continued(now, view)):
            return ended
        return self.observe(now, view)

    def not_recorded(self, record: GuardRecord, now: int, reason: str) -> list[GuardAction]:
        """Actions for a record that cannot be written; none after it was performed. A thaw is performed all the same;
        a decision is not made; a death is recorded later."""
        if record.step in (MoveState.THAWED, MoveState.GONE):
            self.apply(record)
            return [ContinueTree()] if self.until_ms else []
        if record.step in (*STILL_PHASES, MoveState.DECIDED):
            return self.thaw(now, f"{_UNRECORDED}: {reason}")
        return []

    @property
    def wakes_at_ms(self) -> int:
        """When to observe unasked; 0: time alone changes nothing."""
        return self.until_ms if self.phase in (MoveState.FREEZING, *STILL_PHASES) else 0

    def _unless_continued(self, now: int, view: TreeView) -> list[GuardAction]:
        """Nothing while the tree is still; else the end of the move."""
        if not view.is_alive:
            return self._gone(now)
        if not view.is_still:
            return self.thaw(now, view.why or "somebody has continued it while it was frozen")
        return []

    def _gone(self, now: int) -> list[GuardAction]:
        was_frozen = self.phase is not MoveState.OPENED
        record = GuardRecord(MoveState.GONE, now, why="it ended by itself", frozen_ms=self._frozen_ms(now))
        return [WriteRecord(record), *([ContinueTree()] if was_frozen else [])]

    def _frozen_ms(self, now: int) -> int:
        return max(now - self.frozen_at_ms, 0) if self.frozen_at_ms else 0
