"""Contract tests of the `Store` port: subclass `StoreContract` and say how to make a store.

class TestMyStore(StoreContract):
    def new_store(self, directory: Path) -> Store:
        return MyStore(directory / "db")
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed_grid.errors import Conflict
from distributed_grid.ports import Batch, EndedRow, EventFilters, EventRow, LentRow, LiveRow, Store, SummaryRow

DAY_MS = 86_400_000


def an_ended(key: str = "L1", *, at_ms: int = 1000, kind: str = "lease", **other: object) -> EndedRow:
    """A row of something that ended, with every field filled."""
    fields: dict[str, object] = {
        "request_id": f"req-{key}",
        "user": "ann",
        "node": "gpu1",
        "started_at_ms": 1,
        "reason": "released",
        "cpu_milli": 1000,
        "memory_bytes": 1 << 30,
        "gpu_milli": 0,
        "blob": b"\x00\xff",
    }
    return EndedRow(kind=kind, key=key, ended_at_ms=at_ms, **(fields | other))  # type: ignore[arg-type]


def an_event(seq: int, *, at_ms: int = 1000, **other: object) -> EventRow:
    """A row of something that happened, with every field filled."""
    fields: dict[str, object] = {
        "type": "LeaseGranted",
        "user": "ann",
        "subject": "L1",
        "node": "gpu1",
        "reason": "fits",
        "blob": b"\x00\xff",
    }
    return EventRow(seq=seq, at_ms=at_ms, **(fields | other))  # type: ignore[arg-type]


names = st.sampled_from(["", "a", "ab", "b", "ü\x00", "a\U0010ffff", "a\U0010ffffz", "\ud7ff", "\ue000"])
times = st.integers(min_value=0, max_value=4 * DAY_MS)
amounts = st.integers(min_value=0, max_value=2**62)
ended_rows = st.builds(
    EndedRow,
    kind=st.sampled_from(["lease", "job"]),
    key=names,
    request_id=names,
    user=names,
    node=names,
    ended_at_ms=times,
    started_at_ms=times,
    reason=st.sampled_from(["released", "lost"]),
    cpu_milli=amounts,
    memory_bytes=amounts,
    gpu_milli=amounts,
    blob=st.binary(max_size=4),
    target=names,
)
event_times = st.lists(times, max_size=30)


class StoreContract(ABC):
    """Every test gets a fresh store in a directory of its own."""

    @abstractmethod
    def new_store(self, directory: Path) -> Store:
        """A store that keeps its files, if any, in `directory`."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """A fresh store, closed afterwards."""
        store = self.new_store(tmp_path)
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store: Store) -> None:
        loaded = store.load()
        assert (loaded.live, loaded.last_event_seq) == ([], 0)
        assert loaded.schema_version >= 1
        assert store.ended("lease") == []
        assert store.events() == []
        assert store.summaries() == []

    def test_what_was_committed_is_loaded_by_kind_and_key(self, store: Store) -> None:
        rows = [LiveRow("node", "b", b"2"), LiveRow("lease", "z", b""), LiveRow("node", "a", b"\x00\xff")]
        store.commit(Batch(live=rows))
        assert store.load().live == [rows[1], rows[2], rows[0]]

    def test_the_last_row_of_a_key_wins(self, store: Store) -> None:
        a, b = LiveRow("k", "a", b"1"), LiveRow("k", "b", b"1")
        store.commit(Batch(live=[a, LiveRow("k", "a", None), LiveRow("k", "b", None), b, LiveRow("k", "c", b"1")]))
        assert [row.key for row in store.load().live] == ["b", "c"]
        store.commit(Batch(live=[LiveRow("k", "b", b"2"), LiveRow("k", "b", b"3"), LiveRow("k", "c", None)]))
        assert store.load().live == [LiveRow("k", "b", b"3")]

    def test_the_same_key_in_two_kinds_is_two_things(self, store: Store) -> None:
        store.commit(Batch(live=[LiveRow("job", "x", b"j"), LiveRow("lease", "x", b"l")]))
        store.commit(Batch(live=[LiveRow("job", "x", None)]))
        assert store.load().live == [LiveRow("lease", "x", b"l")]

    def test_removing_what_is_not_there_and_committing_nothing_are_harmless(self, store: Store) -> None:
        store.commit(Batch(live=[LiveRow("k", "a", None)]))
        store.commit(Batch())
        assert store.load().live == []

    def test_ended_rows_come_newest_first_and_a_key_may_return(self, store: Store) -> None:
        first, second = an_ended("L1", at_ms=5), an_ended("L1", at_ms=9, request_id="r2")
        third = an_ended("L2", at_ms=9)
        store.commit(Batch(ended=[first, second]))
        store.commit(Batch(ended=[third, an_ended("J1", kind="job", at_ms=7)]))
        assert store.ended("lease") == [third, second, first]
        assert store.ended("lease", key="L1") == [second, first]
        assert store.ended("lease", limit=1) == [third]
        assert store.ended("lease", limit=0) == []
        assert [row.key for row in store.ended("job")] == ["J1"]
        assert (store.count_ended("lease"), store.count_ended("job"), store.count_ended("move")) == (3, 1, 0)
        assert store.count_ended("lease", user=first.user) == 3
        assert store.count_ended("lease", user="nobody") == 0

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        rows=st.lists(ended_rows, max_size=12),
        asked=st.fixed_dictionaries(
            {},
            optional={
                "key": names,
                "key_prefix": names,
                "request_id": names,
                "user": names,
                "node": names,
                "since_ms": times,
            },
        ),
    )
    def test_every_filter_of_ended_narrows(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[EndedRow], asked: dict[str, str | int]
    ) -> None:
        def fits(row: EndedRow) -> bool:
            return (
                row.kind == "lease"
                and all(getattr(row, name) == asked.get(name, getattr(row, name)) for name in EXACT)
                and row.key.startswith(str(asked.get("key_prefix", "")))
                and row.ended_at_ms >= int(asked.get("since_ms", 0))
            )

        store = self.new_store(tmp_path_factory.mktemp("store"))
        try:
            store.commit(Batch(ended=rows))
            expected = sorted(filter(fits, reversed(rows)), key=lambda row: row.ended_at_ms, reverse=True)
            assert store.ended("lease", **asked) == expected  # type: ignore[arg-type]
        finally:
            store.close()

    def test_ended_rows_are_numbered_as_they_are_stored(self, store: Store) -> None:
        assert store.last_ended_number() == 0
        rows = [an_ended(f"J{n}", at_ms=at_ms, kind="job") for n, at_ms in enumerate((9, 5, 9, 7))]
        store.commit(Batch(ended=[*rows[:2], an_ended("L1")]))
        first = store.last_ended_number()
        store.commit(Batch(ended=[*rows[2:], an_ended("L2", kind="job", user="other")]))
        last = store.last_ended_number()
        after = store.ended_after("job", 0, limit=9, user=rows[0].user)
        assert [each.row for each in after] == rows
        assert [each.number for each in after] == sorted({each.number for each in after})
        assert [each.row.key for each in store.ended_after("job", first, limit=9)] == ["J2", "J3", "L2"]
        assert [each.row.key for each in store.ended_after("job", first, limit=1)] == ["J2"]
        assert store.ended_after("job", last, limit=9) == []
        assert [each.row.key for each in store.ended_before("job", first, limit=9)] == ["J0", "J1"]

    @pytest.mark.parametrize("user", [None, "ada"])
    def test_a_place_among_ended_rows_stays_when_more_of_them_are_stored(self, store: Store, user: str | None) -> None:
        ends = (9, 5, 9, 7, 5, 9)
        store.commit(Batch(ended=[an_ended(f"J{n}", at_ms=at_ms, user="ada") for n, at_ms in enumerate(ends)]))
        last, place = store.last_ended_number(), None
        shown: list[str] = []
        while page := store.ended_before("lease", last, limit=2, place=place, user=user):
            shown += [each.row.key for each in page]
            place = page[-1].row.ended_at_ms, page[-1].number
            store.commit(Batch(ended=[an_ended(f"later{len(shown)}", at_ms=6, user="ada")]))
        assert shown == ["J5", "J2", "J0", "J3", "J4", "J1"]

    def test_events_come_in_their_order_from_either_end(self, store: Store) -> None:
        events = [an_event(seq, at_ms=seq * 10, subject=f"L{seq % 2}") for seq in (1, 2, 5, 6)]
        store.commit(Batch(events=events[:2]))
        store.commit(Batch(events=events[2:]))
        assert store.load().last_event_seq == 6
        assert store.events() == events
        assert store.events(limit=2) == events[:2]
        assert store.events(limit=2, newest=True) == events[2:]
        assert store.events(limit=0, newest=True) == []
        assert store.events(after_seq=2) == events[2:]
        assert store.events(since_ms=50) == events[2:]
        assert store.events(since_ms=61) == []
        assert store.events(subject="L1") == [events[0], events[2]]
        assert store.events(after_seq=1, since_ms=20, subject="L1", newest=True) == [events[2]]

    def test_events_of_some_types_only(self, store: Store) -> None:
        events = [an_event(seq, type=kind) for seq, kind in enumerate(["A", "B", "C", "B"], start=1)]
        store.commit(Batch(events=events))
        assert store.events(types=["B", "C"]) == events[1:]
        assert store.events(types=["C", "B"], limit=2) == events[1:3]
        assert store.events(types=["C", "B", "A"], limit=2, newest=True) == events[2:]
        assert store.events(types=["B", "B"], after_seq=2) == [events[3]]
        assert store.events(types=["B", "C"], subject="L1", limit=1, newest=True) == [events[3]]

    def test_the_newest_events_begin_after_the_one_before_them(self, store: Store) -> None:
        events = [an_event(seq, type="AB"[seq % 2], subject=f"L{seq % 3}") for seq in range(1, 10)]
        store.commit(Batch(events=events))
        for count in (1, 2, 5, 8, 9, 100):
            for filters in (EventFilters(), EventFilters(types=["A"]), EventFilters(types=["B", "A"])):
                newest = store.events(limit=count, newest=True, **filters)
                filters["after_seq"] = store.begin_of_newest(count, **filters)
                assert store.events(limit=100, **filters) == newest
            begin = store.begin_of_newest(count, subject="L1", types=["A"])
            newest = store.events(limit=count, newest=True, subject="L1", types=["A"])
            assert store.events(after_seq=begin, limit=100, subject="L1", types=["A"]) == newest
        assert store.events(types=["nothing"]) == []

    def test_events_are_found_by_time_even_when_times_cross(self, store: Store) -> None:
        events = [an_event(seq, at_ms=at) for seq, at in enumerate([50, 10, 60, 20], start=1)]
        store.commit(Batch(events=events))
        assert store.events(since_ms=50) == [events[0], events[2]]

    def test_event_numbers_must_grow_and_a_refused_batch_leaves_nothing(self, store: Store) -> None:
        store.commit(Batch(events=[an_event(3)]))
        for seqs in ([3], [2], [4, 4], [5, 4]):
            late = Batch([LiveRow("k", "a", b"1")], [an_ended()], [an_event(seq) for seq in seqs])
            with pytest.raises(Conflict, match="must grow"):
                store.commit(late)
        assert store.load().live == []
        assert store.ended("lease") == []
        assert [row.seq for row in store.events()] == [3]

    def test_readers_on_other_threads_see_whole_batches(self, store: Store) -> None:
        torn: list[int] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                torn.extend(n for n in [len({row.blob for row in store.load().live})] if n > 1)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(100):
            store.commit(Batch(live=[LiveRow("k", key, str(n).encode()) for key in "abcdef"]))
        done.set()
        for reader in readers:
            reader.join()
        assert torn == []
        assert {row.blob for row in store.load().live} == {b"99"}

    def test_what_is_old_is_folded_and_what_is_not_stays(self, store: Store) -> None:
        old, new = an_ended("L1", at_ms=1001, started_at_ms=1), an_ended("L2", at_ms=2000)
        never_started = an_ended("L3", at_ms=1500, started_at_ms=0)
        store.commit(Batch(ended=[old, new, never_started], events=[an_event(1, at_ms=5), an_event(2, at_ms=2000)]))
        assert store.summarise(before_ms=2000) == 3
        assert store.ended("lease") == [new]
        assert [row.seq for row in store.events()] == [2]
        assert store.summaries() == [
            SummaryRow(0, "event:LeaseGranted", "ann", "gpu1", "fits", 1, 0, 0, 0),
            SummaryRow(0, "lease", "ann", "gpu1", "released", 2, 1000 * 1000, (1 << 30) * 1000, 0),
        ]
        assert store.summarise(before_ms=2000) == 0

    def test_event_numbers_are_never_given_again_after_folding(self, store: Store) -> None:
        store.commit(Batch(events=[an_event(7)]))
        assert store.summarise(before_ms=DAY_MS) == 1
        assert store.load().last_event_seq == 7
        with pytest.raises(Conflict):
            store.commit(Batch(events=[an_event(7)]))

    def test_folding_keeps_to_its_limit(self, store: Store) -> None:
        store.commit(Batch(ended=[an_ended(f"L{n}") for n in range(7)], events=[an_event(n + 1) for n in range(4)]))
        assert [store.summarise(before_ms=DAY_MS, limit=5) for _ in range(4)] == [5, 5, 1, 0]

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        ended=st.lists(ended_rows, max_size=30),
        at=event_times,
        cuts=st.lists(times, max_size=3),
        limit=st.integers(min_value=1, max_value=9),
    )
    def test_totals_are_exact_however_they_were_folded(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        ended: list[EndedRow],
        at: list[int],
        cuts: list[int],
        limit: int,
    ) -> None:
        store = self.new_store(tmp_path_factory.mktemp("store"))
        try:
            store.commit(Batch(ended=ended, events=[an_event(n, at_ms=ms) for n, ms in enumerate(at, start=1)]))
            for before_ms in [*cuts, 4 * DAY_MS + 1]:
                while store.summarise(before_ms=before_ms, limit=limit):
                    pass
            assert store.summaries() == _summed_by_hand(ended, at)
            assert (store.ended("lease"), store.ended("job"), store.events()) == ([], [], [])
        finally:
            store.close()

    def test_what_was_lent_counts_from_the_given_time_on(self, store: Store) -> None:
        early, late = an_ended("L1", at_ms=3000, started_at_ms=1000), an_ended("L2", at_ms=5000, started_at_ms=4000)
        other = an_ended("L3", at_ms=5000, started_at_ms=4000, target="gpu9", gpu_milli=500)
        never, gone = an_ended("L4", at_ms=5000, started_at_ms=0, node=""), an_ended("L5", at_ms=100)
        store.commit(Batch(ended=[early, late, other, never, gone, an_ended("J1", kind="job", at_ms=5000)]))
        assert store.lent(since_ms=2000) == [
            LentRow("ann", "gpu1", "", 0, 2, 2000 * 1000, 2000 << 30, 0),
            LentRow("ann", "gpu1", "gpu9", 0, 1, 1000 * 1000, 1000 << 30, 1000 * 500),
        ]
        assert store.lent(since_ms=2000, by_day=True) == [
            LentRow("", "", "", 0, 3, 3000 * 1000, 3000 << 30, 1000 * 500)
        ]
        assert store.lent(since_ms=5001) == []

    def test_what_was_folded_counts_by_whole_days(self, store: Store) -> None:
        old = an_ended("L1", at_ms=DAY_MS + 1000, started_at_ms=DAY_MS)
        new = an_ended("L2", at_ms=3 * DAY_MS, started_at_ms=3 * DAY_MS - 500)
        store.commit(Batch(ended=[old, new, an_ended("L3", at_ms=DAY_MS, started_at_ms=0, node="")]))
        assert store.summarise(before_ms=2 * DAY_MS) == 2
        for since_ms, days in ((0, [1, 3]), (DAY_MS, [1, 3]), (DAY_MS + 1, [3])):
            assert [row.day for row in store.lent(since_ms=since_ms, by_day=True)] == days
        assert store.lent(since_ms=0) == [LentRow("ann", "gpu1", "", 0, 2, 1500 * 1000, 1500 << 30, 0)]

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(rows=st.lists(ended_rows, max_size=30), since_ms=times, fold_ms=times, by_day=st.booleans())
    def test_what_was_lent_is_exact(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: list[EndedRow],
        since_ms: int,
        fold_ms: int,
        by_day: bool,
    ) -> None:
        store = self.new_store(tmp_path_factory.mktemp("store"))
        try:
            store.commit(Batch(ended=rows))
            while store.summarise(before_ms=fold_ms):
                pass
            assert store.lent(since_ms=since_ms, by_day=by_day) == _lent_by_hand(rows, since_ms, fold_ms, by_day)
        finally:
            store.close()

    def test_closing_twice_is_harmless(self, store: Store) -> None:
        store.close()
        store.close()


EXACT = ("key", "request_id", "user", "node")


def _summed_by_hand(ended: list[EndedRow], event_times_ms: list[int]) -> list[SummaryRow]:
    sums: dict[tuple[int, str, str, str, str, str], list[int]] = {}
    for row in ended:
        ran = 0 if row.started_at_ms == 0 else max(0, row.ended_at_ms - row.started_at_ms)
        key = (row.ended_at_ms // DAY_MS, row.kind, row.user, row.node, row.reason, row.target)
        into = sums.setdefault(key, [0, 0, 0, 0])
        into[0] += 1
        into[1] += row.cpu_milli * ran
        into[2] += row.memory_bytes * ran
        into[3] += row.gpu_milli * ran
    for at_ms in event_times_ms:
        sums.setdefault((at_ms // DAY_MS, "event:LeaseGranted", "ann", "gpu1", "fits", ""), [0, 0, 0, 0])[0] += 1
    found = []
    for day, kind, user, node, reason, target in sorted(sums):
        count, cpu, memory, gpu = sums[day, kind, user, node, reason, target]
        found.append(SummaryRow(day, kind, user, node, reason, count, cpu, memory, gpu, target))
    return found


def _lent_by_hand(rows: list[EndedRow], since_ms: int, fold_ms: int, by_day: bool) -> list[LentRow]:
    """One row after the other; those before `fold_ms` have been folded."""
    sums: dict[tuple[str, str, str, int], list[int]] = {}
    for row in rows:
        day = row.ended_at_ms // DAY_MS
        if row.kind != "lease" or not row.node:
            continue
        if row.ended_at_ms < fold_ms:
            if day * DAY_MS < since_ms:
                continue
            ms = max(row.ended_at_ms - row.started_at_ms, 0) if row.started_at_ms else 0
        elif row.ended_at_ms >= since_ms and row.started_at_ms:
            ms = max(row.ended_at_ms - max(row.started_at_ms, since_ms), 0)
        else:
            continue
        key = ("", "", "", day) if by_day else (row.user, row.node, row.target, 0)
        into = sums.setdefault(key, [0, 0, 0, 0])
        into[0] += 1
        for place, amount in enumerate((row.cpu_milli, row.memory_bytes, row.gpu_milli), 1):
            into[place] += amount * ms
    return [LentRow(*key, *sums[key]) for key in sorted(sums)]
