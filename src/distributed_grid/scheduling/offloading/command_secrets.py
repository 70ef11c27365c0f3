"""Secrets in command lines: which words look like one, and the command with them masked.

Better one word too many than one too few: a command that seems to hold a secret is only not moved.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

MASK = "***"
MIN_RANDOM_CHARS = 20
MIN_KNOWN_CHARS = 15
"""No token of a known kind is shorter."""
MIN_ENTROPY_BITS = 3.0
"""Per character: random hexadecimal digits have almost four, other random letters and digits more."""

_NAME = (
    r"pass(?:word|wd|phrase)?|pwd|secrets?|tokens?|api[-_.]?keys?|access[-_.]?keys?|secret[-_.]?keys?|private[-_.]?keys?"
    r"|auth(?:orization)?|bearer|credentials?|cookie|session[-_.]?key|signing[-_.]?key|encryption[-_.]?key"
    r"|connection[-_.]?string|dsn|webhook|otp|pin"
)
_SIGNS = re.compile(r"[=:@?]")
"""A word without one of these holds a secret only if it is one."""
# Whoever starts a process chooses its words: no pattern may take more than linear time, so repetitions are bounded.
_SECRET_NAME = re.compile(rf"(?:^|[-_./:])(?:{_NAME})$", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z0-9_./:-]{0,80}?)(?P<sep>[=:])(?P<value>.+)", re.DOTALL)
_NOT_SECRET = re.compile(
    r"(?:file|path|dir|name|env|var|id|type|size|len(?:gth)?|count|limit|max|min|ttl)$"
    r"|(?:^|[-_])(?:pad|bos|eos|unk|sep|cls|mask|special)[-_]tokens?$",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"tokens$", re.IGNORECASE)
_USERINFO = re.compile(r"[a-z][a-z0-9+.-]{0,20}://[^/\s:@]{0,200}:(?P<secret>[^/\s@]{1,500})@", re.IGNORECASE)
_HEADER = re.compile(
    r"(?<![a-z0-9])(?P<name>authorization|x-[a-z-]{0,40}(?:key|token)|cookie)\s{0,3}:\s{0,3}(?P<secret>.+)",
    re.IGNORECASE | re.DOTALL,
)
_INLINE = re.compile(
    rf"(?<![a-z0-9])(?P<name>{_NAME})['\"]?\s{{0,3}}(?:=|:)\s{{0,3}}['\"]?(?P<secret>[^\s'\";,)}}&]+)", re.IGNORECASE
)
_SIGNED = re.compile(r"[?&](?P<name>sig|signature|key|x-amz-signature)=(?P<secret>[^&\s]+)", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:A(?:KIA|SIA|GPA|IDA|ROA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}"
    r"|dckr_pat_[\w-]{16,}|eyJ[\w-]{8,300}\.[\w-]{8,})"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*", re.DOTALL)
_KEY_LIKE = re.compile(r"(?:^|[-_.])(?:key|hash|salt|seed-phrase|sas|jwt|creds?)$", re.IGNORECASE)
# Options of well-known programs that are secrets and do not say so: mysql's and sshpass's -p, curl's -u.
_PROGRAM_OPTIONS = {
    "mysql": ("-p",),
    "mysqldump": ("-p",),
    "mariadb": ("-p",),
    "sshpass": ("-p",),
    "curl": ("-u", "--user", "-U", "--proxy-user"),
    "wget": (),
    "redis-cli": ("-a",),
    "mongosh": ("-p",),
    "mongo": ("-p",),
    "smbclient": ("-U",),
    "ldapsearch": ("-w",),
    "openssl": ("-passin", "-passout", "-k", "-K"),
    "7z": ("-p",),
    "zip": ("-P",),
    "unzip": ("-P",),
}


def mask_secrets(argv: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The words of a command with what looks like a secret masked, and whether anything was."""
    if not argv:
        return (), False
    options = _PROGRAM_OPTIONS.get(argv[0].rpartition("/")[2], ())
    found: list[str] = []
    name = ""
    for word in argv:
        masked = _mask_word(word, name, options)
        found.append(masked)
        name = word if word.startswith("-") and "=" not in word else ""
    return tuple(found), any(new != old for new, old in zip(found, argv, strict=True))


def _mask_word(word: str, name: str, options: tuple[str, ...]) -> str:
    """One word, after the option `name`."""
    if name and not _is_option(word) and (name in options or _holds_secret(name, word)):
        return MASK
    for option in options:
        if not option.startswith("--") and word.startswith(option) and len(word) > len(option) and len(option) == 2:
            return option + MASK
    if len(word) < MIN_KNOWN_CHARS and not _SIGNS.search(word):
        return word
    assigned = _ASSIGNED.match(word)
    if assigned is not None and "://" not in word and _holds_secret(assigned["name"], assigned["value"]):
        return f"{assigned['name']}{assigned['sep']}{MASK}"
    for pattern in (_USERINFO, _HEADER, _SIGNED, _INLINE):
        word = pattern.sub(_masked_part, word)
    return _PEM.sub(MASK, _KNOWN.sub(MASK, word))


def _masked_part(found: re.Match[str]) -> str:
    secret = found["secret"]
    name = found["name"] if "name" in found.re.groupindex else ""
    if _is_reference(secret) or secret == MASK or _is_plain(name, secret):
        return found[0]
    at = found.start("secret") - found.start()
    return found[0][:at] + MASK + found[0][at + len(secret) :]


def _holds_secret(name: str, value: str) -> bool:
    """Whether a value of this name is a secret: by the name, or by a name like `key` and a value like a random one."""
    plain = name.lstrip("-")
    if not plain or _is_reference(value) or _NOT_SECRET.search(plain):
        return False
    if _SECRET_NAME.search(plain):
        return not _is_plain(plain, value)
    return bool(_KEY_LIKE.search(plain)) and _is_random(value)


def _is_plain(name: str, value: str) -> bool:
    """Whether a value is only a switch, or a number of tokens, as in `--max-tokens 512`."""
    if value.isdecimal():
        return bool(_COUNTED.search(name))
    return value.lower() in ("true", "false", "yes", "no", "none", "null", "auto", "on", "off")


def _is_reference(value: str) -> bool:
    """Whether a value only says where the secret is: a variable, or the path of a file."""
    return value.startswith(("$", "/", "./", "~/", "../", "@", "env:", "file:"))


def _is_random(value: str) -> bool:
    if len(value) < MIN_RANDOM_CHARS or "/" in value[:2]:
        return False
    counts = Counter(value)
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return bits >= MIN_ENTROPY_BITS and any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and len(word) > 1
