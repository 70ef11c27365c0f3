"""`grid config check --providers`: what each provider lacks, without a control plane and without a secret."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import PROJECT
from tests.support.scripted_provider import plug_in
from tests.support.shell import Shell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
SECRET = "s3cret-of-the-provider"
Check = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Check]:
    shell = Shell(tmp_path / "state", tmp_path)
    shell.env["PYTHONPATH"] = f"{PROJECT}:{plug_in(tmp_path / 'plug')}"

    def run(text: str, **env: str) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "grid.yaml"
        path.write_text(text)
        shown = shell("config", "check", str(path), "--providers", env=env)
        found = shell("config", "check", str(path), "--providers", "--json", env=env)
        assert shown.returncode == found.returncode
        assert not (tmp_path / "state").exists(), "it needs no control plane"
        for said in (shown.stdout, shown.stderr, found.stdout, found.stderr):
            assert SECRET not in said
        return shown.returncode, json.loads(found.stdout), shown.stdout

    yield run
    shell.close()


def config(tmp_path: Path, more: str = "", top: str = "") -> str:
    return f"name: checked\n{top}\nproviders:\n  scripted: {{state_file: {tmp_path}/cloud.json{more}}}\n"


def test_a_provider_that_can_be_used_says_what_it_offers(check: Check, tmp_path: Path) -> None:
    code, found, shown = check(config(tmp_path))
    assert code == 0
    assert found["ok"]
    assert found["providers"][0]["checks"] == [
        "3 offers",
        "small-a: 2 cores, 4 GB, $0.1 an hour",
        "small-b: 2 cores, 4 GB, $0.12 an hour",
        "gpu-a: 4 cores, 16 GB, 1 GPU, $0.9 an hour",
    ]
    assert "scripted: can be used\n  3 offers\n" in shown
    assert not (tmp_path / "cloud.json").exists(), "nothing was called that changes anything"


def test_no_price_under_a_budget_and_an_unreachable_control_plane_are_said(check: Check, tmp_path: Path) -> None:
    more, top = ", prices: false, elsewhere: true", "scaling: {budget_per_day: 5}"
    code, found, shown = check(config(tmp_path, more, top))
    assert (code, found["ok"]) == (1, False)
    reach, nothing = found["providers"][0]["problems"]
    assert "listens on this machine only" in reach
    assert nothing == "nothing that it offers can be started"
    assert "small-a: its price is not known, and there is a budget: set price_per_hour" in shown
    code, found, _ = check(config(tmp_path, ", elsewhere: true", "server: {host: 0.0.0.0}"))
    assert (code, found["ok"]) == (0, True)


def test_a_missing_variable_is_named(check: Check, tmp_path: Path) -> None:
    text = config(tmp_path, ", token: '${CLOUD_TOKEN}'")
    code, found, _ = check(text)
    assert code == 1
    (problem,) = found["providers"][0]["problems"]
    assert problem == (
        "providers.scripted.token: found ${CLOUD_TOKEN}, expected the environment variable CLOUD_TOKEN to be set"
    )
    assert check(text, CLOUD_TOKEN=SECRET)[0] == 0


def test_provider_messages_are_shown_without_credentials(check: Check, tmp_path: Path) -> None:
    more = ", state_file2: x, password: '${CLOUD_TOKEN}', check_says: 'login failed with ${CLOUD_TOKEN}'"
    code, found, _ = check(config(tmp_path, more), CLOUD_TOKEN=SECRET)
    assert code == 1
    assert found["providers"][0]["problems"] == ["login failed with ***"]


def test_an_engine_that_does_not_run_is_said(check: Check, tmp_path: Path) -> None:
    text = f"providers:\n  docker_local: {{endpoint_url: 'unix://{tmp_path}/nobody.sock'}}\n"
    code, found, shown = check(text)
    assert code == 1
    assert "no answer from the Docker engine" in found["providers"][0]["problems"][0]
    assert "docker_local: cannot be used\n  problem: no answer" in shown


def test_without_providers_there_is_nothing_to_check(check: Check) -> None:
    code, found, shown = check("name: none\n")
    assert (code, found["providers"]) == (0, [])
    assert "no providers" in shown
