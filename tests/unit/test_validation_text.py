"""Validation errors name no regular expression."""

from __future__ import annotations

import msgspec
import pytest

from distributed_grid.config import NodeConfig
from distributed_grid.validation_text import describe_patterns


def test_a_pattern_without_words_is_not_shown_either() -> None:
    pattern = r"^(it's|\d)$"
    error = f"Expected `str` matching regex {pattern!r} - at `$.x`"
    assert describe_patterns(error, {}) == "Expected text of another form - at `$.x`"
    assert describe_patterns(error, {pattern: "a digit"}) == "Expected a digit - at `$.x`"
    assert describe_patterns("Expected `int`, got `str`", {}) == "Expected `int`, got `str`"


def test_a_node_made_in_python_with_a_wrong_name_says_what_a_name_is() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"NodeConfig\.name: Expected a name such as gpu-1, of letters"):
        NodeConfig(name="-x")
