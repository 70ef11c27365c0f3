"""Commands that no node can start are refused at submission; everything below the limit really starts."""

from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from distributed_grid.api.command_limits import MAX_COMMAND_BYTES, MAX_STRING_BYTES, command_problem
from distributed_grid.api.requests import parse
from distributed_grid.client.job_payload import check_command
from distributed_grid.errors import BadInput


def submission(argv: list[str], env: dict[str, str]) -> bytes:
    return msgspec.json.encode({"op": "submit_job", "request_id": "r1", "argv": argv, "env": env})


@pytest.mark.parametrize(
    ("argv", "env", "says"),
    [
        (["true", "x" * (MAX_STRING_BYTES + 1)], {}, "argument 1 has 131,072 bytes"),
        (["true", "é" * (MAX_STRING_BYTES // 2 + 1)], {}, "argument 1 has 131,072 bytes"),
        (["x" * 5_000_000], {}, "the name of the command has 5,000,000 bytes"),
        (["true"], {"DATA": "x" * MAX_STRING_BYTES}, "the variable DATA has 131,076 bytes"),
        (["true"], {"N" * 200_000: ""}, f"the variable {'N' * 40}… has"),
        (["true", *["x" * 100_000] * 20], {}, "the command and its variables take 2,000,"),
        (["true", *["x" * 100_000] * 10], {f"V{n}": "x" * 100_000 for n in range(10)}, "take 2,000,"),
        (["true", *[""] * 19_999], {f"V{n}": "" for n in range(160_000)}, "put long lists into a file"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_cannot_be_started_is_refused_in_one_line_by_client_and_server(
    argv: list[str], env: dict[str, str], says: str
) -> None:
    for refuse in (lambda: check_command(argv, env), lambda: parse(submission(argv, env))):
        with pytest.raises(BadInput) as refused:
            refuse()
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300


def test_the_largest_command_that_is_taken_is_one_that_the_kernel_starts() -> None:
    word = "x" * MAX_STRING_BYTES
    argv = ["/bin/true", *[word] * (MAX_COMMAND_BYTES // (MAX_STRING_BYTES + 9) - 1)]
    env = {"LONG": "y" * (MAX_STRING_BYTES - 5)}
    assert command_problem(argv, env) is None
    own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    assert subprocess.run(argv, env=own | env, check=False).returncode == 0
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true", word + "x"], check=False)
