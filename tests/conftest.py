"""One Hypothesis profile for every test of the suite: reproducible, and the same whatever is collected first."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "grid",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("grid")
