"""Where the checkout is that the tests run in, and its configs for tests of something else than rebalancing."""

import shutil
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NEVER_SECONDS = 86_400


def copy_configs(folder: Path) -> None:
    """The shipped configs as `folder`; within a test nothing is borrowed automatically."""
    shutil.copytree(PROJECT / "config", folder)
    set_rebalance_interval(folder, NEVER_SECONDS)


def set_rebalance_interval(folder: Path, seconds: float, *, was: float = 30) -> None:
    """Let the shipped configs in `folder` rebalance so often."""
    old = f"rebalance_interval_seconds: {was:g}\n"
    paths = [path for path in folder.glob("*.yaml") if old in path.read_text()]
    assert paths, f"no config in {folder} rebalances every {was:g} s"
    for path in paths:
        path.write_text(path.read_text().replace(old, f"rebalance_interval_seconds: {seconds:g}\n"))
