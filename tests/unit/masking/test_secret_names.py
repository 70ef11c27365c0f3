"""Names and values of secrets."""

from __future__ import annotations

import pytest

from distributed_grid.masking.secret_names import holds_secret, is_random, is_reference, is_secret_name, normal_name


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
