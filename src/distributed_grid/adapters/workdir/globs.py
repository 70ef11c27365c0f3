"""Patterns of file names, read as git reads them, as regular expressions over bytes.

`*` and `?` and `[…]` stay within one name; a name that is just `**` stands for any number of directories, and at the
end for everything below. All but the last `*` of a name, and all but the last `**`, take the first place that fits and
never another (the rest of the path is then longest, so nothing is missed): no pattern takes exponential time.
"""

import re
import string

_STAR, _STARS, _SLASH = b"*", b"**", b"/"  # marks among the tokens; every other token matches one byte
_NEVER = b"(?!)"
_CLASSES = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "blank": " \t",
    "cntrl": "".join(map(chr, [*range(32), 127])),
    "digit": string.digits,
    "graph": "".join(map(chr, range(33, 127))),
    "lower": string.ascii_lowercase,
    "print": "".join(map(chr, range(32, 127))),
    "punct": string.punctuation,
    "space": " \t\n\r\f\v",
    "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}


def translate(pattern: bytes) -> bytes:
    """The regular expression (for `fullmatch`, with DOTALL) of a pattern; of a malformed one, what never matches."""
    tokens = _tokens(pattern)
    if tokens is None:
        return _NEVER
    runs: list[list[bytes]] = [[]]  # what stands between one `**` and the next, name by name
    for name in _split(tokens, _SLASH):
        if name == [_STARS]:
            runs.append([])
        else:
            runs[-1].append(_name(name))
    first, *rest = (b"/".join(run) for run in runs)
    if not rest:
        return first
    *middle, last = rest
    found = first + b"/" if runs[0] else b""
    found += b"".join(b"(?>(?:[^/]+/)*?" + run + b"/)" for run in middle if run)
    return found + (b"(?:[^/]+/)*" + last if runs[-1] else b".+")


def literal(path: bytes) -> bytes:
    """The pattern that means exactly this path."""
    return re.sub(rb"([\\*?\[\]!# ])", rb"\\\1", path)


def _name(tokens: list[bytes]) -> bytes:
    pieces = [b"".join(piece) for piece in _split([_STAR if token == _STARS else token for token in tokens], _STAR)]
    if len(pieces) == 1:
        return pieces[0]
    first, *middle, last = pieces
    return first + b"".join(b"(?>[^/]*?" + piece + b")" for piece in middle) + b"[^/]*" + last


def _split(tokens: list[bytes], mark: bytes) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[]]
    for token in tokens:
        if token == mark:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _tokens(pattern: bytes) -> list[bytes] | None:
    tokens: list[bytes] = []
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            end = at + len(pattern[at:]) - len(pattern[at:].lstrip(b"*"))
            tokens.append(_STAR if end == at else _STARS)
            at = end
        elif byte == b"?":
            tokens.append(b"[^/]")
        elif byte == b"[":
            chosen = _class(pattern, at)
            if chosen is None:
                return None
            token, at = chosen
            tokens.append(token)
        elif byte == b"\\":
            if at == len(pattern):
                return None
            tokens.append(re.escape(pattern[at : at + 1]))
            at += 1
        else:
            tokens.append(re.escape(byte))
    return tokens


def _class(pattern: bytes, at: int) -> tuple[bytes, int] | None:
    """What the bracket that begins before `at` matches, and where it ends; None when it is malformed."""
    inverted = pattern[at : at + 1] in (b"!", b"^")
    at += inverted
    chosen: set[int] = set()
    previous: int | None = None
    first = True
    while at < len(pattern):
        byte = pattern[at]
        if byte == ord("]") and not first:
            members = (set(range(256)) - chosen if inverted else chosen) - {ord("/")}
            listed = b"".join(b"\\x%02x" % member for member in sorted(members))
            return (b"[" + listed + b"]" if members else _NEVER), at + 1
        first = False
        named = re.compile(rb"\[:([^\]]*):\]").match(pattern, at)
        if named:
            name = named[1].decode("latin-1")
            if name not in _CLASSES:
                return None
            chosen.update(map(ord, _CLASSES[name]))
            previous, at = None, named.end()
        elif byte == ord("-") and previous is not None and pattern[at + 1 : at + 2] not in (b"", b"]"):
            at += 1 + (pattern[at + 1] == ord("\\"))
            if at >= len(pattern):
                return None
            chosen.update(range(previous, pattern[at] + 1))
            previous, at = None, at + 1
        else:
            at += byte == ord("\\")
            if at >= len(pattern):
                return None
            previous = pattern[at]
            chosen.add(previous)
            at += 1
    return None
