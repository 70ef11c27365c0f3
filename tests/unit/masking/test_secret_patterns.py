"""Names and values of secrets."""

from __future__ import annotations

import pytest

from distributed_grid.masking.secret_patterns import (
    PROGRAM_SECRETS,
    holds_secret,
    is_random,
    is_reference,
    is_secret_name,
    mask_tokens,
    normal_name,
)


@pytest.mark.parametrize(
    "name",
    [
        "--db-password",
        "dbPassword",
        "DB_PASSWORD",
        "PGPASSWORD",
        "SSHPASS",
        "-Dpassword",
        "-eAPI_TOKEN",
        "X-Auth-Token",
        "-pw",
        "--otp",
        "MYSQL_PWD",
        "aws_secret_access_key",
        "clientsecret",
        "//registry/:_authToken",
        "STORAGE_KEY",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert holds_secret(name, "hunter2x")


@pytest.mark.parametrize(
    "name",
    [
        "--password-file",
        "--tokenizer",
        "--token-limit",
        "--pad-token",
        "--next-token",
        "--secret-id",
        "PATH",
        "KEY",
        "--",
        "bypass",
        "compass",
        "--two-pass",
        "--keypoints",
        "--author",
        "--pin-memory",
        "PASSWORD_STORE_DIR",
    ],
)
def test_names_that_only_resemble_one(name: str) -> None:
    assert not is_secret_name(name)
    assert not holds_secret(name, "hunter2x")


def test_a_key_is_a_secret_if_it_looks_random() -> None:
    assert holds_secret("--key", "xK9vQ2mT7p" + "Ls4WzR8bN1")
    assert not holds_secret("--key", "name-of-a-column-that-is-long")
    assert not is_random("a" * 50)


def test_a_variable_or_a_path_only_says_where_a_secret_is() -> None:
    for value in ("$TOKEN", "${TOKEN}", "$(cat f)", "/run/secrets/db", "~/.token", "@dir/file", "env:NAME", "op://a/b"):
        assert is_reference(value), value
    for value in ("$ecret1", "hunter2", "@Dm1n", "/" + "aB3dE5gH7jK9mN1pQ3sT5"):
        assert not is_reference(value), value
    assert is_reference("$token", in_code=True)
    assert is_reference("key.pem", "private_key")
    assert not is_reference("key.pem", "password")


def test_the_parts_of_a_name_are_separated_in_one_way() -> None:
    assert {normal_name(name) for name in ("--db-password", "dbPassword", "DB_PASSWORD", "db.password")} == {
        "db_password"
    }


BODY = "xK9" + "vQ2mT7pLs4WzR8bN1"


def test_a_token_is_masked_and_the_text_around_it_is_kept() -> None:
    assert mask_tokens(f"a ghp_{BODY}, b") == "a ***, b"
    assert mask_tokens(f"x=hvs.{BODY}&y") == "x=***&y"


def test_all_three_parts_of_a_json_web_token_are_masked() -> None:
    assert mask_tokens(f"eyJ{BODY}.eyJ{BODY}.{BODY} x") == "*** x"


def test_words_that_begin_like_a_token_are_kept() -> None:
    for text in ("sk-learn-contrib-preprocessing", "pypi-publish-to-the-index", "hf_model", "s.method", "task-runner"):
        assert mask_tokens(text) == text


def test_a_private_key_is_masked_to_its_end() -> None:
    key = f"-----BEGIN EC PRIVATE KEY-----\n{BODY}\n-----END EC PRIVATE KEY-----"
    assert mask_tokens(f"a {key} b {key} c") == "a *** b *** c"
    assert mask_tokens(f"a -----BEGIN PRIVATE KEY-----\n{BODY}") == "a ***"


def test_programs_where_p_is_a_port_or_a_path_are_not_listed() -> None:
    assert not {"psql", "pg_dump", "ssh", "scp", "nmap", "tar", "mkdir", "cp", "ps", "patch"} & PROGRAM_SECRETS.keys()


def test_glued_options_have_one_dash() -> None:
    for name, secrets in PROGRAM_SECRETS.items():
        assert all(option.startswith("-") for option in secrets.options | secrets.glued), name
        assert not any(option.startswith("--") for option in secrets.glued), name
