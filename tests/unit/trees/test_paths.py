"""Glob patterns over paths; that they mean what git says is tested with the ignore rules."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.trees.paths import escape_pattern, pattern_regex


@pytest.mark.parametrize("pattern", [b"*a" * 40 + b"b", b"**/a/" * 40 + b"b", b"*/" * 20 + b"**/" * 20 + b"b"])
@pytest.mark.timeout(10)
def test_no_pattern_takes_for_ever(pattern: bytes) -> None:
    compiled = re.compile(pattern_regex(pattern), re.DOTALL)
    assert not compiled.fullmatch(b"a" * 250)
    assert not compiled.fullmatch(b"/".join([b"a"] * 100))


@given(path=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1))
def test_a_path_made_a_pattern_matches_itself_and_nothing_longer(path: str) -> None:
    pattern = re.compile(pattern_regex(escape_pattern(path.encode())), re.DOTALL)
    assert pattern.fullmatch(path.encode())
    assert not pattern.fullmatch(path.encode() + b"x")
