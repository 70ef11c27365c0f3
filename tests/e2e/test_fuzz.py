"""A short run of the fuzz campaign (`make chaos` runs the long one), so that it does not rot."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.campaign import SHARES, Campaign

FRAMES = 4_000


def test_mutated_frames_neither_crash_nor_hang_a_process(tmp_path: Path) -> None:
    with Campaign(tmp_path, seed=1) as campaign:
        for _ in campaign.run(FRAMES):
            pass
        assert set(campaign.tallies) == set(SHARES)
        assert sum(tally.frames for tally in campaign.tallies.values()) >= FRAMES
        for name, tally in campaign.tallies.items():
            assert tally.results["cut"], f"{name}: no frame was refused"
            assert len(tally.results) > 1, f"{name}: every frame was refused"
        assert campaign.honest.jobs > 2
