"""What one word of YAML means: nothing, a truth, a number or text.

YAML 1.1, which most people's files are written for, less its two traps: `010` is not eight and `1:30` is not
ninety; both stay text, and so are refused where a number is expected. What JSON calls a number is one here.
"""

from __future__ import annotations

import re

Scalar = None | bool | int | float | str

_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_TRUTHS = {
    spelling: truth
    for word, truth in {
        "yes": True,
        "on": True,
        "true": True,
        "no": False,
        "off": False,
        "false": False,
    }.items()
    for spelling in (word, word.capitalize(), word.upper())
}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_BROKEN = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MOST_DIGITS = 30


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted word."""
    if text in _NOTHING:
        return None
    if text in _TRUTHS:
        return _TRUTHS[text]
    if len(text) <= _MOST_DIGITS and _WHOLE.fullmatch(text):
        return int(text.replace("_", ""))
    if _BROKEN.fullmatch(text) and not _OCTAL.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text
