"""Secret and protected files: the one list of the names of secrets, their allowances, and paths that are never written.

- A name decides, never the content: nothing of such a file is read before it is known to be shipped.
- A secret directory stands for everything below it. Upper and lower case are the same.
- `--ship PATTERN` allows the files it names, even if an ignore file names them. An explicit `!` line of `.gridignore`
  allows the files it names; a line whose last name is only wildcards (`!*`, `!src/**`) is not explicit.
- Public keys and certificates are no secrets. The list is in docs/guide/working-directories.md, too; a test compares.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from distributed_grid.errors import BadInput
from distributed_grid.posix.environment import holds_home
from distributed_grid.trees.file_selection import FilePatterns
from distributed_grid.trees.ignore_rules import GridIgnoreMatcher, IgnoreMatcher, IgnoreRules
from distributed_grid.trees.paths import display_path, is_malformed, pattern_regex

SECRET_PATTERNS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    (
        "keys of SSH, TLS and PGP",
        (
            b".ssh", b".gnupg", b"id_rsa*", b"id_dsa*", b"id_ecdsa*", b"id_ed25519*", b"!id_*.pub", b"*.ppk",
            b"*.pem", b"!ca.pem", b"!cacert.pem", b"!cacerts.pem", b"!chain.pem", b"!fullchain.pem",
            b"!dhparam.pem", b"!roots.pem", b"!*-ca.pem", b"!*_ca.pem", b"!*-bundle.pem", b"!*_bundle.pem",
            b"!ca-certificates.pem", b"!public.pem", b"!*publickey.pem", b"!*public_key.pem", b"!*public-key.pem",
            b"!*.pub.pem", b"*.key", b"!public.key", b"*.p8", b"*.p12", b"*.pfx",
            b"*.pkcs12", b"*.jks", b"*.keystore", b"*.keytab", b"*.ovpn",
        ),
    ),
    (
        "variables and settings of programs",
        (
            b".env", b".env.*", b"!.env.example", b"!.env.sample", b"!.env.template", b"!.env.dist", b".envs",
            b"*.env", b"!example.env", b"!sample.env", b"!template.env", b".envrc", b"secrets.yaml", b"secrets.yml",
            b"secrets.json", b"secrets.toml", b"*.tfvars", b"*.tfvars.json", b"*.tfstate", b"*.tfstate.*",
            b".htpasswd", b".vault-token", b".vault[-_]pass*",
        ),
    ),
    (
        "passwords and tokens of tools",
        (
            b".netrc", b"_netrc", b".authinfo", b".git-credentials", b".gitcookies", b"**/.config/git/credentials",
            b"**/.git/config", b"**/.git/config.worktree", b"**/.git/modules/**/config", b"**/.hg/hgrc",
            b"**/.config/gh", b"**/.config/glab-cli", b"**/.config/hub", b".npmrc", b".pypirc",
            b"**/.cargo/credentials*", b"**/.gem/credentials", b"**/.m2/settings*.xml",
            b"**/.gradle/gradle.properties", b"**/.docker/config.json", b".dockercfg",
            b"**/containers/auth.json", b".pgpass", b".my.cnf", b".mylogin.cnf", b".smbcredentials", b".kaggle",
            b"kaggle.json", b"**/huggingface/token", b"**/huggingface/stored_tokens", b".databrickscfg",
        ),
    ),
    (
        "credentials of clouds and clusters",
        (
            b".aws", b".azure", b".oci", b"**/.config/gcloud", b"**/.config/doctl", b".boto", b".s3cfg",
            b".rclone.conf", b"rclone.conf", b".kube", b"kubeconfig", b"!kubeconfig/", b"kubeconfig.yaml",
            b"kubeconfig.yml", b"*.kubeconfig", b"credentials.json", b"application_default_credentials.json",
            b"client_secret*.json", b"service-account*.json", b"service_account*.json", b"serviceaccount*.json",
            b"**/.terraform.d/credentials*",
        ),
    ),
    (
        "password stores, browsers, histories",
        (
            b"*.kdbx", b".password-store", b"**/.local/share/keyrings", b".mozilla", b".thunderbird",
            b"**/.config/google-chrome", b"**/.config/chromium", b".xauthority", b".*history", b"fish_history",
        ),
    ),
)  # fmt: skip
"""Patterns with the syntax and the precedence of `.gitignore` (the last match decides), by the kind of secret."""

SHOWN_NAMES = 5
SHIP_HINT = "allow with --ship PATTERN"


def _names_regex(patterns: Iterable[bytes]) -> re.Pattern[bytes]:
    """One expression over a lower-case name that every secret matches, and few others: most names cost one match."""
    by_start: dict[bytes, list[bytes]] = {}
    for pattern in patterns:
        name = pattern.removesuffix(b"/").rpartition(b"/")[2]
        start = 2 if name.startswith(b"*.") else 1
        by_start.setdefault(name[:start], []).append(name[start:])
    heads = {start: pattern_regex(start) for start in by_start}
    groups = [heads[start] + b"(?:" + b"|".join(map(pattern_regex, rests)) + b")" for start, rests in by_start.items()]
    return re.compile(b"|".join(groups), re.DOTALL)


_PATTERNS = tuple(pattern for _, patterns in SECRET_PATTERNS for pattern in patterns)
_RULES = IgnoreRules(b"\n".join(_PATTERNS))
_NAMES = _names_regex(pattern for pattern in _PATTERNS if not pattern.startswith(b"!"))


def is_secret(path: bytes, *, is_directory: bool) -> bool:
    """True if a path relative to the top of a tree looks like a secret, itself or by a directory that it is in."""
    names = path.split(b"/")
    return any(
        _is_secret_entry(b"/".join(names[:depth]), is_directory=is_directory or depth < len(names))
        for depth in range(1, len(names) + 1)
    )


def _is_secret_entry(path: bytes, *, is_directory: bool) -> bool:
    """True if the last name of a path looks like a secret; its parents only lend it their names."""
    lowered = path.lower()
    if _NAMES.fullmatch(lowered.rpartition(b"/")[2]) is None:
        return False
    return bool(_RULES.verdict(lowered, is_directory=is_directory))


def never_shipped_unasked(directory: str) -> str:
    """Reason to ship a directory only if it is named, as the end of a sentence about it; empty if there is none."""
    real = os.path.realpath(directory)
    if holds_home(real):
        return "is a home directory or above one, which is never shipped unless it is named"
    if is_secret(os.fsencode(real).strip(b"/"), is_directory=True):
        return "looks like a directory of secrets, which is never shipped unless it is named"
    return ""


def is_withheld(top: str, path: bytes) -> bool:
    """True if a file below the directory `top` looks like a secret and no `.gridignore` file allows it."""
    names = path.split(b"/")
    secrets = SecretFilter(os.fsencode(top))
    rules: IgnoreMatcher = GridIgnoreMatcher()
    zone = SecretZone.CHECKED
    for depth in range(len(names)):
        above = b"/".join(names[:depth])
        with contextlib.suppress(OSError):
            folder = os.open(os.path.join(os.fsencode(top), above), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                rules = rules.inside(folder, above)
            finally:
                os.close(folder)
        below, is_directory = b"/".join(names[: depth + 1]), depth + 1 < len(names)
        inside = secrets.zone(below, zone, rules, is_directory=is_directory, is_ignored=False)
        if inside is None:
            return True
        zone = inside
    return False


class ShipPatterns:
    """Patterns of `--ship`: secrets that may be shipped, in the syntax of `.gitignore`."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Raises BadInput for a pattern that cannot name anything inside a directory."""
        self._shown = tuple(patterns)
        self._patterns = FilePatterns([_anywhere(pattern) for pattern in patterns])
        self._matched: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._shown)

    def allow(self, path: bytes) -> bool:
        """True if a pattern names this secret, or a directory above it; the pattern counts as used."""
        matching = self._patterns.matches(path)
        self._matched.update(matching)
        return bool(matching)

    def may_allow_below(self, directory: bytes) -> bool:
        return self._patterns.may_match_below(directory)

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(pattern for number, pattern in enumerate(self._shown) if number not in self._matched)


def _anywhere(pattern: str) -> str:
    """The pattern as a path from the top; a bare name means that name anywhere."""
    raw = pattern.encode("utf-8", "surrogateescape")
    shown = f"--ship '{display_path(raw)}'"
    names = [name for name in raw.split(b"/") if name not in (b"", b".")]
    if not names or b"\0" in raw or is_malformed(raw):
        raise BadInput(f"{shown}: is not a pattern of files, such as .env or 'certs/*.pem'")
    if raw.startswith(b"!"):
        raise BadInput(f"{shown}: takes no '!'; name what may be shipped")
    if raw.startswith((b"/", b"~")) or b".." in names:
        raise BadInput(f"{shown}: leads outside the directory; give a path inside it, such as .env or 'certs/*.pem'")
    path = b"/".join(names if b"/" in raw.rstrip(b"/") else [b"**", *names])
    return path.decode("utf-8", "surrogateescape")


class SecretZone(enum.Enum):
    """Treatment of secrets in one directory of a walk."""

    CHECKED = enum.auto()
    """Each entry is checked by its name."""
    WITHHELD = enum.auto()
    """The directory is a secret: only what `--ship` names is taken."""
    ALLOWED = enum.auto()
    """The directory is a secret that the user allows, with everything in it."""


class SecretFilter:
    """Secrets of one walk through a tree: which entries are taken, and the names of the others (`withheld`).

    `top` is the real path of the tree, whose last names count for patterns of several names (`.docker/config.json`).
    """

    def __init__(self, top: bytes = b"", ship: ShipPatterns | None = None) -> None:
        self._lead = top.strip(b"/") + b"/" if top.strip(b"/") else b""
        self._ship = ship if ship is not None else ShipPatterns()
        self._withheld: list[bytes] = []
        self._searched: set[bytes] = set()  # secret directories in which `--ship` may name something

    def zone(
        self, path: bytes, above: SecretZone, rules: IgnoreMatcher, *, is_directory: bool, is_ignored: bool
    ) -> SecretZone | None:
        """The zone of an entry of a directory whose zone is `above`; None where it is left out, ignored or withheld."""
        if above is SecretZone.ALLOWED:
            return None if is_ignored and not (self._ship and self._ship.allow(path)) else above
        if is_ignored and not self._ship:
            return None
        if above is SecretZone.CHECKED and not _is_secret_entry(self._lead + path, is_directory=is_directory):
            return None if is_ignored else SecretZone.CHECKED
        if self._ship and self._ship.allow(path):
            return SecretZone.ALLOWED
        if is_ignored:
            return None
        if above is SecretZone.CHECKED and rules.allows_secret(path, is_directory=is_directory):
            return SecretZone.ALLOWED
        if is_directory and self._ship and self._ship.may_allow_below(path):
            self._searched.add(path)
            return SecretZone.WITHHELD
        self._withheld.append(path + b"/" if is_directory else path)
        return None

    def settle(self, paths: Iterable[bytes]) -> tuple[tuple[bytes, ...], set[bytes]]:
        """The withheld paths, sorted, and the directories to drop from the paths of the walk: secret ones in which
        `--ship` has named nothing. Each of these is one name."""
        taken = (path for path in paths if path not in self._searched) if self._searched else ()
        dropped = self._searched - {above for path in taken for above in _parents(path)}
        names = [name for name in self._withheld if dropped.isdisjoint(_parents(name.rstrip(b"/")))]
        names += [path + b"/" for path in dropped if dropped.isdisjoint(_parents(path))]
        return tuple(sorted(names)), dropped


def _parents(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def withheld_note(paths: Sequence[bytes]) -> str:
    """One line that names secrets that are not shipped; empty where there are none."""
    if not paths:
        return ""
    reason = "it looks like a secret" if len(paths) == 1 else "they look like secrets"
    return f"not shipped, as {reason}: {name_some(paths)} ({SHIP_HINT})"


def name_some(paths: Sequence[bytes]) -> str:
    shown = ", ".join(display_path(path) for path in paths[:SHOWN_NAMES])
    return shown + (f" and {len(paths) - SHOWN_NAMES} more" if len(paths) > SHOWN_NAMES else "")


def unused_note(patterns: Sequence[str]) -> str:
    """One line about patterns of `--ship` that have named no secret; empty where there are none."""
    if not patterns:
        return ""
    shown = ", ".join(f"'{display_path(pattern)}'" for pattern in patterns)
    return f"--ship {shown}: no file that looks like a secret matches, outside of ignored directories"


REPOSITORIES = frozenset({b".git", b".hg", b".svn", b".bzr", b"_darcs", b".fossil", b".jj"})
NEVER_SHIPPED = frozenset({b"__pycache__", b".venv", b"node_modules", b".distributed_grid"})
"""Directories that a scan leaves out, besides those of repositories (`ignore_rules.ALWAYS_IGNORED`)."""
STARTUP_FILES = frozenset(
    {
        # shells and logins
        *(b".profile", b".bashrc", b".bash_profile", b".bash_login", b".bash_logout", b".bash_aliases", b".inputrc"),
        *(b".zshrc", b".zshenv", b".zprofile", b".zlogin", b".zlogout", b".kshrc", b".mkshrc", b".cshrc", b".tcshrc"),
        *(b".login", b".logout", b".pam_environment", b".xinitrc", b".xsession", b".xprofile", b".xsessionrc"),
        *(b".rhosts", b".shosts", b".forward", b".procmailrc", b".envrc", b".tmux.conf", b".screenrc", b".autoenv"),
        # editors, pagers, debuggers
        *(b".vimrc", b".gvimrc", b".nvimrc", b".exrc", b".nvim.lua", b".emacs", b".dir-locals.el", b".dir-locals-2.el"),
        *(b".nanorc", b".gdbinit", b".lldbinit", b".pdbrc", b".pdbrc.py", b".lessfilter", b".lesskey", b".mailcap"),
        # interpreters and their tools
        *(b"sitecustomize.py", b"usercustomize.py", b".pythonrc", b".pythonrc.py", b".pythonstartup"),
        *(b".rprofile", b".renviron", b".irbrc", b".pryrc", b".octaverc", b".psqlrc", b".sqliterc", b".duckdbrc"),
        *(b".npmrc", b".yarnrc", b".yarnrc.yml", b".pnpmfile.cjs", b".bazelrc", b".condarc", b".mambarc"),
        *(b".mise.toml", b".mise.local.toml", b".gemrc", b".curlrc", b".wgetrc", b".netrc"),
        # git and what runs at a commit; an own HEAD makes a directory a repository
        *(b".gitconfig", b".gitmodules", b".pre-commit-config.yaml", b".lefthook.yml", b"head"),
        # rules of the grid: they say what is shipped next time
        b".gridignore",
    }
)
STARTUP_DIRECTORIES = frozenset(
    {
        *(b".ssh", b".gnupg", b".githooks", b".husky", b".vscode", b".idea", b".devcontainer", b".direnv"),
        *(b".config", b".emacs.d", b".vim", b".nvim", b".ipython", b".jupyter", b".cargo", b".bundle", b".gdbinit.d"),
        *(b".yarn", b".julia", b".zsh", b".oh-my-zsh", b".mise", b".autostart"),
    }
)
_PROTECTED = REPOSITORIES | NEVER_SHIPPED | STARTUP_FILES | STARTUP_DIRECTORIES
_SILENT = frozenset({b"__pycache__", b"node_modules", b".venv"})
"""Names that ordinary programs make by themselves: they are left out without a note."""


def is_protected(names: tuple[bytes, ...]) -> bool:
    """True if this path, given name by name, must never be written."""
    return any(_folded(name) in _PROTECTED for name in names) or is_secret(b"/".join(names), is_directory=False)


def is_unremarkable(names: tuple[bytes, ...]) -> bool:
    """True if a protected path is one of the caches that programs make by themselves."""
    return any(_folded(name) in _SILENT for name in names)


def _folded(name: bytes) -> bytes:
    """Name as a forgiving file system compares it: without case, and without trailing dots and spaces."""
    return name.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape").rstrip(b". ")
