"""Beginnings of ids: long enough to mean something, and never what all ids begin with."""

from __future__ import annotations

import pytest

from distributed_grid.api.id_prefixes import fits, is_prefix, not_found, prefix_hint


@pytest.mark.parametrize("text", ["", "a", "abc", "job-", "job-abc", "auto-", "auto-abc", "job"])
def test_what_is_too_short_stands_for_nothing_but_itself(text: str) -> None:
    assert not is_prefix(text)
    assert fits(text, text)
    assert not fits(text + "1234567890", text)
    assert str(not_found("job", text)).endswith("the beginning of an id needs 4 characters of its own")


@pytest.mark.parametrize("text", ["abcd", "job-abcd", "auto-abcd", "0123456789abcdef"])
def test_four_characters_of_its_own_are_a_beginning(text: str) -> None:
    assert is_prefix(text)
    assert fits(text + "1234567890", text)
    assert not fits("x" + text, text)
    assert prefix_hint(text) == ""
    assert str(not_found("lease", text)) == f"no lease is called {text!r}"
