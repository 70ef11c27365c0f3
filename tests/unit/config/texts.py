"""Texts of configurations: loaded, or refused with these lines."""

from __future__ import annotations

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems


def problems_of(text: str, *, all_placed: bool = True) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        ClusterConfig.from_text(text, "c.yaml", env={})
    lines = str(caught.value).splitlines()
    assert lines
    assert not all_placed or all(line.startswith("c.yaml") for line in lines)
    return lines


def load(text: str, **env: str) -> ClusterConfig:
    return ClusterConfig.from_text(text, env=env)
