"""Secrets in command lines are masked, and what only looks a little like one is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.scheduling.offloading.command_secrets import MASK, mask_secrets

SECRET = "xK9" + "vQ2mT7pLs4WzR8bN1"  # put together, so that nobody takes it for a real one


@pytest.mark.parametrize(
    "words",
    [
        ["app", "--password", SECRET],
        ["app", f"--password={SECRET}"],
        ["app", "--db-password", "1234"],
        ["app", f"--api_key={SECRET}"],
        ["app", "--aws-secret-access-key", SECRET],
        ["app", f"token={SECRET}"],
        ["env", f"HF_TOKEN={SECRET}", "python", "train.py"],
        ["app", "--key", SECRET],
        ["psql", f"postgres://ada:{SECRET}@db/work"],
        ["curl", "-u", f"ada:{SECRET}", "http://host"],
        ["curl", f"-uada:{SECRET}", "http://host"],
        ["curl", "-H", f"Authorization: Bearer {SECRET}"],
        ["curl", f"http://host/x?api_key={SECRET}&page=2"],
        ["mysql", f"-p{SECRET}", "work"],
        ["sshpass", "-p", SECRET, "ssh", "host"],
        ["app", "AKIA" + "IOSFODNN7EXAMPLE"],
        ["app", "ghp_" + 2 * SECRET],
        ["sh", "-c", f"export TOKEN={SECRET}; python train.py"],
        ["python", "-c", f"login(password='{SECRET}')"],
        ["app", "--config", '{"password": "' + SECRET + '"}'],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_secret_is_masked(words: list[str]) -> None:
    masked, found = mask_secrets(words)
    assert found
    assert SECRET not in " ".join(masked)
    assert MASK in " ".join(masked)
    assert "1234" not in masked
    assert "IOSFODNN7EXAMPLE" not in " ".join(masked)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --epochs 3 --lr 0.1",
        "python generate.py --max-tokens 5120 --tokenizer gpt2 --pad-token x",
        "app --password-file /run/secrets/db --api-key $KEY",
        "app --token-env HF_TOKEN --auth none",
        "make -j8 all",
        "git clone https://host/repo.git",
        "ssh -i /srv/alice/.ssh/id_ed25519 host",
        "mysql -u ada work",
        "rsync -a a/ b/",
        "app --keypoints 17 --passes 3 --key short",
        "psql postgres://ada@db/work",
    ],
)
def test_an_ordinary_command_stays_as_it_is(command: str) -> None:
    assert mask_secrets(command.split()) == (tuple(command.split()), False)


@given(st.lists(st.text(max_size=60), max_size=12))
def test_any_words_are_masked_without_an_error_and_keep_their_number(words: list[str]) -> None:
    masked, found = mask_secrets(words)
    assert len(masked) == len(words)
    assert found == (masked != tuple(words))
    assert mask_secrets(masked)[0] == masked


def test_a_very_long_word_takes_no_time() -> None:
    mask_secrets(["app", "-" * 30_000, "a_" * 15_000, "a=" * 15_000, "key:" * 8_000, "a.b-" * 8_000 + "=x"])
