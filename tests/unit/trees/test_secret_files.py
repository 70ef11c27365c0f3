"""Names of secrets: every pattern of the list with a name it withholds, and names that are no secrets."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

import pytest

from distributed_grid.errors import BadInput
from distributed_grid.trees.secret_files import (
    SECRET_PATTERNS,
    ShipPatterns,
    is_secret,
    is_withheld,
    name_some,
    never_shipped_unasked,
    withheld_note,
)
from tests.unit.trees.tree_files import write_tree

GUIDE = Path(__file__).parents[3] / "docs/guide/working-directories.md"
EXAMPLES = {
    ".ssh": ".ssh/config",
    ".gnupg": "home/.gnupg/secring.gpg",
    "id_rsa*": "keys/id_rsa",
    "id_dsa*": "id_dsa",
    "id_ecdsa*": "id_ecdsa_sk",
    "id_ed25519*": "id_ed25519.bak",
    "!id_*.pub": "id_rsa.pub",
    "*.ppk": "putty.ppk",
    "*.pem": "certs/server.pem",
    "!ca.pem": "ca.pem",
    "!cacert.pem": "lib/certifi/cacert.pem",
    "!cacerts.pem": "cacerts.pem",
    "!chain.pem": "chain.pem",
    "!fullchain.pem": "live/fullchain.pem",
    "!dhparam.pem": "dhparam.pem",
    "!roots.pem": "grpc/roots.pem",
    "!*-ca.pem": "internal-ca.pem",
    "!*_ca.pem": "internal_ca.pem",
    "!*-bundle.pem": "global-bundle.pem",
    "!*_bundle.pem": "ca_bundle.pem",
    "!ca-certificates.pem": "ca-certificates.pem",
    "!public.pem": "public.pem",
    "!*publickey.pem": "jwt_publickey.pem",
    "!*public_key.pem": "jwt_public_key.pem",
    "!*public-key.pem": "jwt-public-key.pem",
    "!*.pub.pem": "jwt.pub.pem",
    "*.key": "tls/server.key",
    "!public.key": "public.key",
    "*.p8": "AuthKey_1.p8",
    "*.p12": "me.p12",
    "*.pfx": "me.pfx",
    "*.pkcs12": "me.pkcs12",
    "*.jks": "trust.jks",
    "*.keystore": "release.keystore",
    "*.keytab": "krb5.keytab",
    "*.ovpn": "office.ovpn",
    ".env": "app/.env",
    ".env.*": ".env.production",
    "!.env.example": ".env.example",
    "!.env.sample": ".env.sample",
    "!.env.template": ".env.template",
    "!.env.dist": ".env.dist",
    ".envs": ".envs/.production/.django",
    "*.env": "prod.env",
    "!example.env": "example.env",
    "!sample.env": "sample.env",
    "!template.env": "template.env",
    ".envrc": ".envrc",
    "secrets.yaml": "deploy/secrets.yaml",
    "secrets.yml": "secrets.yml",
    "secrets.json": "secrets.json",
    "secrets.toml": ".streamlit/secrets.toml",
    "*.tfvars": "prod.tfvars",
    "*.tfvars.json": "prod.tfvars.json",
    "*.tfstate": "terraform.tfstate",
    "*.tfstate.*": "terraform.tfstate.backup",
    ".htpasswd": "www/.htpasswd",
    ".vault-token": ".vault-token",
    ".vault[-_]pass*": ".vault_password.txt",
    ".netrc": ".netrc",
    "_netrc": "_netrc",
    ".authinfo": ".authinfo",
    ".git-credentials": ".git-credentials",
    ".gitcookies": ".gitcookies",
    "**/.config/git/credentials": ".config/git/credentials",
    "**/.git/config": "here/.git/config",
    "**/.git/config.worktree": ".git/config.worktree",
    "**/.git/modules/**/config": ".git/modules/lib/inner/config",
    "**/.hg/hgrc": ".hg/hgrc",
    "**/.config/gh": "me/.config/gh/hosts.yml",
    "**/.config/glab-cli": ".config/glab-cli/config.yml",
    "**/.config/hub": ".config/hub",
    ".npmrc": "web/.npmrc",
    ".pypirc": ".pypirc",
    "**/.cargo/credentials*": ".cargo/credentials.toml",
    "**/.gem/credentials": ".gem/credentials",
    "**/.m2/settings*.xml": ".m2/settings-security.xml",
    "**/.gradle/gradle.properties": ".gradle/gradle.properties",
    "**/.docker/config.json": ".docker/config.json",
    ".dockercfg": ".dockercfg",
    "**/containers/auth.json": ".config/containers/auth.json",
    ".pgpass": ".pgpass",
    ".my.cnf": ".my.cnf",
    ".mylogin.cnf": ".mylogin.cnf",
    ".smbcredentials": ".smbcredentials",
    ".kaggle": ".kaggle/kaggle.json",
    "kaggle.json": "kaggle.json",
    "**/huggingface/token": ".cache/huggingface/token",
    "**/huggingface/stored_tokens": ".cache/huggingface/stored_tokens",
    ".databrickscfg": ".databrickscfg",
    ".aws": ".aws/credentials",
    ".azure": ".azure/accessTokens.json",
    ".oci": ".oci/config",
    "**/.config/gcloud": ".config/gcloud/access_tokens.db",
    "**/.config/doctl": ".config/doctl/config.yaml",
    ".boto": ".boto",
    ".s3cfg": ".s3cfg",
    ".rclone.conf": ".rclone.conf",
    "rclone.conf": ".config/rclone/rclone.conf",
    ".kube": ".kube/config",
    "kubeconfig": "deploy/kubeconfig",
    "!kubeconfig/": "pkg/kubeconfig/loader.go",
    "kubeconfig.yaml": "kubeconfig.yaml",
    "kubeconfig.yml": "kubeconfig.yml",
    "*.kubeconfig": "prod.kubeconfig",
    "credentials.json": "credentials.json",
    "application_default_credentials.json": "application_default_credentials.json",
    "client_secret*.json": "client_secret_1.apps.json",
    "service-account*.json": "service-account-prod.json",
    "service_account*.json": "service_account.json",
    "serviceaccount*.json": "serviceAccountKey.json",
    "**/.terraform.d/credentials*": ".terraform.d/credentials.tfrc.json",
    "*.kdbx": "passwords.kdbx",
    ".password-store": ".password-store/mail.gpg",
    "**/.local/share/keyrings": ".local/share/keyrings/login.keyring",
    ".mozilla": ".mozilla/firefox/x/key4.db",
    ".thunderbird": ".thunderbird/x/key4.db",
    "**/.config/google-chrome": ".config/google-chrome/Default/Cookies",
    "**/.config/chromium": ".config/chromium/Default/Cookies",
    ".xauthority": ".Xauthority",
    ".*history": ".bash_history",
    "fish_history": ".local/share/fish/fish_history",
}
"""A path for each pattern of the list; one of a `!` pattern is no secret."""
LISTED = [pattern.decode() for _, patterns in SECRET_PATTERNS for pattern in patterns]


def test_every_pattern_of_the_list_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(LISTED)


@pytest.mark.parametrize("pattern", LISTED)
def test_a_pattern_withholds_its_example_at_any_depth_and_in_any_case(pattern: str) -> None:
    for path in (EXAMPLES[pattern], f"deep/down/{EXAMPLES[pattern]}", EXAMPLES[pattern].upper()):
        assert is_secret(path.encode(), is_directory=False) == (not pattern.startswith("!"))


@pytest.mark.parametrize(
    "path",
    [
        "train.py", "environment.yml", "env", ".environment", "keys.txt", "key", "monkey", "pem", "model.pemx",
        "credentials.py", "credentials/__init__.py", "secrets.py", "secret/notes.txt", "config.json",
        "docker/config.json", "tokenizer.json", "token", "auth.json", "settings.xml", ".gitignore",
        ".config/matplotlib/matplotlibrc",
        "known_hosts", "history.csv", "training_history.json", "ssh/config", "aws/main.tf", "kube/deployment.yaml",
        "id_map.csv", "kubeconfig.py", ".envrc.example", "caf\udce9", "a\nb",
    ],
)  # fmt: skip
def test_an_ordinary_name_is_no_secret(path: str) -> None:
    assert not is_secret(path.encode(errors="surrogateescape"), is_directory=False)


def test_a_secret_directory_stands_for_everything_below_it() -> None:
    assert is_secret(b".ssh", is_directory=True)
    assert is_secret(b"a/.ssh/deep/notes.txt", is_directory=False)
    assert is_secret(b".config/gcloud/logs", is_directory=True)
    assert not is_secret(b".config", is_directory=True)
    assert not is_secret(b"kubeconfig", is_directory=True)


def test_the_guide_has_the_list_of_the_code() -> None:
    table = GUIDE.read_text().partition("| kind | not shipped | but shipped |\n")[2].partition("\n\n")[0]
    listed = [[re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[2:4]] for row in table.splitlines()[1:]]
    kinds = [row.split("|")[1].strip() for row in table.splitlines()[1:]]
    assert kinds == [kind for kind, _ in SECRET_PATTERNS]
    for (_, patterns), (withheld, exempt) in zip(SECRET_PATTERNS, listed, strict=True):
        names = [pattern.decode() for pattern in patterns]
        assert withheld == [name for name in names if not name.startswith("!")]
        assert exempt == [name[1:] for name in names if name.startswith("!")]


@pytest.mark.parametrize(
    "pattern", ["", ".", "/", "/etc/shadow", "~/.ssh", "../.env", "a/../b", "!.env", "[a", "a\\", "\0"]
)
def test_a_bad_pattern_is_refused_in_one_line(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"^--ship '.*': .+") as caught:
        ShipPatterns([pattern])
    assert "\n" not in str(caught.value)


def test_a_pattern_names_a_name_anywhere_a_path_from_the_top_and_all_below_a_directory() -> None:
    assert ShipPatterns([".env"]).allow(b"a/b/.env")
    assert ShipPatterns([".ssh/"]).allow(b"a/.ssh/id_rsa")
    assert ShipPatterns(["./.env"]).allow(b".env")
    assert not ShipPatterns(["./.env"]).allow(b"a/.env")
    assert not ShipPatterns(["certs/*.pem"]).allow(b"a/certs/x.pem")
    patterns = ShipPatterns(["*.pem", "*.key"])
    assert patterns.allow(b"x.pem")
    assert patterns.unused == ("*.key",)


def test_few_names_are_shown_and_the_others_counted() -> None:
    assert name_some([b"a%d" % number for number in range(17)]) == "a0, a1, a2, a3, a4 and 12 more"
    assert withheld_note([b".env", b".ssh/"]) == (
        "not shipped, as they look like secrets: .env, .ssh/ (allow with --ship PATTERN)"
    )
    assert withheld_note([b"\x1b.env"]).startswith("not shipped, as it looks like a secret: \\x1b.env (")
    assert withheld_note([]) == ""


def test_a_home_directory_and_those_above_it_are_never_shipped_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "homes/ann"
    (home / "project/.ssh/keys").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    for directory in (
        "/",
        tmp_path,
        tmp_path / "homes",
        home,
        tmp_path / "link",
        Path(pwd.getpwuid(os.getuid()).pw_dir),
    ):
        assert "home directory" in never_shipped_unasked(str(directory))
    assert never_shipped_unasked(str(home / "project")) == ""
    assert "secrets" in never_shipped_unasked(str(home / "project/.ssh/keys"))


def test_a_gridignore_file_at_any_level_allows_a_secret(tmp_path: Path) -> None:
    tree = {".env": b"", "a/.env": b"", "a/b/.env": b"", ".ssh/id_rsa": b"", "a/.gridignore": b"!.env\n", "c": b""}
    write_tree(tmp_path, tree)
    assert is_withheld(str(tmp_path), b".env")
    assert not is_withheld(str(tmp_path), b"a/.env")
    assert not is_withheld(str(tmp_path), b"a/b/.env")
    assert is_withheld(str(tmp_path), b".ssh/id_rsa")
    assert not is_withheld(str(tmp_path), b"c")
    (tmp_path / ".gridignore").write_bytes(b"!.ssh/\n")
    assert not is_withheld(str(tmp_path), b".ssh/id_rsa")
