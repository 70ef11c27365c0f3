"""Variables with credentials: which a config needs, and that no child process inherits them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distributed_grid.posix.environment import child_environment, pack_variables, variables_for

SHELL = {
    "AWS_PROFILE": "p",
    "AWS_SECRET_ACCESS_KEY": "s",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "MY_TOKEN": "t",
    "OTHER_TOKEN": "o",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("name: plain", set()),
        ("providers: {mine: {token: '${MY_TOKEN}'}}", {"MY_TOKEN"}),
        ("providers: {aws: {region: x}}", {"AWS_PROFILE", "AWS_SECRET_ACCESS_KEY"}),
        ('{"gcp": {"project": "p"}}', {"GOOGLE_APPLICATION_CREDENTIALS"}),
        ("name: my-awesome-grid", set()),
        ("alerts: {webhook: '${UNSET}'}", set()),
    ],
)
def test_a_config_gets_what_it_names_and_what_its_providers_read(text: str, names: set[str]) -> None:
    assert variables_for(text, SHELL).keys() == names


def test_credentials_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "s")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "c")
    found = child_environment()
    assert {"AWS_SESSION_TOKEN", "CLOUDSDK_CONFIG"}.isdisjoint(found)
    assert found["PATH"] == os.environ["PATH"]


def test_variables_that_were_handed_over_are_there_but_neither_inherited_nor_to_be_seen() -> None:
    program = """
import os, sys
from distributed_grid.posix.environment import child_environment, take_variables
take_variables(int(sys.argv[1]))
assert os.environ["MY_TOKEN"] == "secret-1"
assert os.environ["PATH"] != "/evil", "what was there stays"
assert "MY_TOKEN" not in child_environment()
assert b"secret-1" not in open("/proc/self/environ", "rb").read()
"""
    descriptor = pack_variables({"MY_TOKEN": "secret-1", "PATH": "/evil"})
    try:
        command = [sys.executable, "-c", program, str(descriptor)]
        done = subprocess.run(command, pass_fds=(descriptor,), capture_output=True, text=True, check=False)
    finally:
        os.close(descriptor)
    assert (done.returncode, done.stderr) == (0, "")
