"""Commands of processes: secrets are masked, and what only looks a little like one is not; what one consent covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.scheduling.offloading.process_commands import MASK, MAX_SHAPE_CHARS, command_shape, mask_secrets

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


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("python train.py --epochs 3 --lr 0.1", "python train.py --epochs --lr"),
        ("/usr/bin/python3.11 -u train.py --lr=0.2 --epochs 9 data.csv", "python train.py --epochs --lr"),
        ("python3 /srv/alice/work/train.py", "python train.py"),
        ("python3 ../other/train.py", "python /srv/alice/other/train.py"),
        ("venv/bin/python -W ignore -X dev train.py -v", "python train.py -v"),
        ("python -m torch.distributed.run --nproc-per-node 4 x.py", "python -m torch.distributed.run --nproc-per-node"),
        ("git clone https://host/x", "git clone"),
        ("sleep 100", "sleep"),
        ("make -j8 all", "make -j"),
        ("java -Xmx4g -jar sim.jar --seed 4", "java -jar sim.jar --seed"),
        ("./solve -n5 -5 --tol=1e-3 -- --not-an-option", "solve --tol -n"),
        ("/home/bob/solve 3", "/home/bob/solve"),
        ("/usr/bin/ffmpeg -i in.mp4 out.mp4", "ffmpeg -i"),
    ],
)
def test_shape(command: str, shape: str) -> None:
    assert command_shape(command.split(), "/srv/alice/work") == shape


def test_code_on_the_command_line_is_part_of_the_shape() -> None:
    one, other = (command_shape(["sh", "-c", code]) for code in ("make data", "rm -r data"))
    assert one != other
    assert "data" not in one
    assert command_shape(["python", "-c", "x"]) != command_shape(["python", "-c", "y"])
    assert command_shape(["sh", "-c", "a\nb"]) != command_shape(["sh", "-c", "a?b"])
    assert command_shape(["./a\nb"]) != command_shape(["./a?b"])
    assert command_shape(["timeout", "9", "make"]) != command_shape(["timeout", "9", "rm"])


def test_no_command_has_no_shape() -> None:
    assert command_shape([]) == ""


@given(st.lists(st.text(max_size=300), max_size=20), st.sampled_from(["", "/", "/srv/alice"]))
def test_every_command_has_a_bounded_shape_that_stays_the_same(words: list[str], cwd: str) -> None:
    shape = command_shape(words, cwd)
    assert len(shape) <= MAX_SHAPE_CHARS
    assert shape == command_shape(words, cwd)
