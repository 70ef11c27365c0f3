"""Commands of processes: the words that look like a secret, masked; and the shape, for which a user consents.

Better one word too many than one too few: a command that seems to hold a secret is only not moved.

A shape is the program, its script or subcommand, and the names of options without values. Programs of the system are
named without their folder, others by their path. Two runs that differ only in values have one shape: `python train.py
--epochs 3 --lr 0.1` and `python train.py --lr=0.2 --epochs 9` are both `python train.py --epochs --lr`. Code that is
given on the command line (`-c`) is part of the shape by its digest: a consent for one piece of code is none for
another.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from posixpath import basename, normpath

from distributed_grid.scheduling.offloading.obstacles import one_line

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
MAX_SHAPE_CHARS = 500
_VERSION = re.compile(r"^(python|pypy|node|ruby|perl|lua|php|java|julia)[\d.]*$")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "ash"})
_INTERPRETERS = frozenset({"python", "pypy", "node", "ruby", "perl", "lua", "php", "julia", "Rscript", *_SHELLS})
_CODE_OPTIONS = {"node": ("-e", "--eval", "-p"), "ruby": ("-e",), "perl": ("-e", "-E"), "lua": ("-e",), "php": ("-r",)}
_WITH_VALUE = {
    "python": frozenset({"-W", "-X"}),
    "node": frozenset({"-r", "--require"}),
    "ruby": frozenset({"-r", "-I"}),
}
_LAUNCHERS = frozenset({"nohup", "setsid", "nice", "ionice", "time", "stdbuf", "env", "chrt", "taskset", "timeout"})
_SYSTEM_BIN = ("/usr/", "/bin/", "/sbin/", "/opt/")
_SUBCOMMAND = re.compile(r"^[a-z][a-z0-9_-]{0,30}$")
_OPTION = re.compile(r"^(--?[A-Za-z][\w.-]*)")


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


def command_shape(argv: Sequence[str], cwd: str = "") -> str:
    """The shape of a command; paths below its working directory are relative to it. Empty for no command."""
    words = list(argv)
    if not words:
        return ""
    program = _program(words[0])
    is_of_system = "/" not in words[0] or words[0].startswith(_SYSTEM_BIN)
    parts = [program if is_of_system or program in _INTERPRETERS or program == "java" else _relative(words[0], cwd)]
    rest = words[1:]
    if program in _INTERPRETERS:
        script, rest = _script(program, rest, cwd)
        parts += script
    elif program == "java":
        script, rest = _jar(rest, cwd)
        parts += script
    elif program in _LAUNCHERS:  # what it launches is what matters, and it is not always told where that begins
        return _cut(" ".join([program, _digest(" ".join(rest))]))
    elif rest and _SUBCOMMAND.match(rest[0]):
        parts.append(rest[0])
        rest = rest[1:]
    return _cut(" ".join([*parts, *_option_names(rest)]))


def _program(word: str) -> str:
    name = basename(word.lstrip("-")) or word
    version = _VERSION.match(name)
    return version[1] if version is not None else name


def _script(program: str, words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    """The script, module or code that an interpreter runs, and the words after it."""
    code = ("-c",) if program in ("python", "pypy", *_SHELLS) else _CODE_OPTIONS.get(program, ())
    takes_value = _WITH_VALUE.get(program, frozenset())
    at = 0
    while at < len(words):
        word = words[at]
        if word in code or (program in _SHELLS and re.fullmatch(r"-[a-z]*c", word)):
            return ["-c", _digest(words[at + 1] if at + 1 < len(words) else "")], words[at + 2 :]
        if word == "-m" and program in ("python", "pypy"):
            return ["-m", *words[at + 1 : at + 2]], words[at + 2 :]
        if word in takes_value:
            at += 2
        elif word.startswith(("-", "+")):
            at += 1
        else:
            return [_relative(word, cwd)], words[at + 1 :]
    return [], words


def _jar(words: list[str], cwd: str) -> tuple[list[str], list[str]]:
    for at, word in enumerate(words):
        if word == "-jar":
            return ["-jar", *(_relative(path, cwd) for path in words[at + 1 : at + 2])], words[at + 2 :]
        if not word.startswith("-") and (not at or words[at - 1] not in ("-cp", "-classpath", "--class-path")):
            return [word], words[at + 1 :]
    return [], words


def _relative(path: str, cwd: str) -> str:
    whole = normpath(path if path.startswith("/") or not cwd else f"{cwd}/{path}")
    return whole[len(cwd) + 1 :] if cwd and whole.startswith(cwd + "/") else whole


def _option_names(words: Sequence[str]) -> list[str]:
    """Each option once, sorted: the order in which they are given does not matter."""
    found = set()
    for word in words:
        if word == "--":
            break
        name = _OPTION.match(word.partition("=")[0])
        if name is not None:
            found.add(name[1] if word.startswith("--") else name[1].rstrip("0123456789."))
    return sorted(found)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


def _cut(shape: str) -> str:
    """A shape that can be shown and stored; one that had to be changed for that is told apart by its digest."""
    shown = one_line(shape)
    if shown == shape and len(shape) <= MAX_SHAPE_CHARS:
        return shape
    return f"{shown[: MAX_SHAPE_CHARS - 13]} {_digest(shape)}"
