"""Paths below a person's directory that no returned file is ever written to.

A file that a program reads by itself (a hook of git, a start-up file of a shell or an editor) would run the code of
whoever wrote it. Returned are therefore neither such files, nor the directories that are never shipped, nor secrets.
Names are compared without regard to case: some file systems do not have any.
"""

from __future__ import annotations

from distributed_grid.trees.secret_files import is_secret

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
"""Names that ordinary programs make by themselves: they are left out without a word."""


def is_protected(names: tuple[bytes, ...]) -> bool:
    """True if nothing may be written to this path, which is given name by name."""
    return any(_folded(name) in _PROTECTED for name in names) or is_secret(b"/".join(names), is_directory=False)


def is_unremarkable(names: tuple[bytes, ...]) -> bool:
    """True if a protected path is one of the caches that programs make by themselves."""
    return any(_folded(name) in _SILENT for name in names)


def _folded(name: bytes) -> bytes:
    """The name as a forgiving file system compares it: without case, and without trailing dots and spaces."""
    return name.decode("utf-8", "surrogateescape").casefold().encode("utf-8", "surrogateescape").rstrip(b". ")
