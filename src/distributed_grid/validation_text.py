"""Errors of validation for people: the letters that a value may have in words, and no regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNMATCHED = re.compile(r"Expected `str` matching regex ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")


def describe_patterns(message: str, words: Mapping[str, str]) -> str:
    """The message of a validation error, with the words for each pattern in its place."""
    known = {repr(pattern): text for pattern, text in words.items()}
    return _UNMATCHED.sub(lambda match: f"Expected {known.get(match[1], 'text of another form')}", message)
