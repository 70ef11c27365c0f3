"""The guide to clouds, walked from nothing to a task that ran there: the clouds are stand-ins, their machines boot."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.guides import page_blocks
from tests.support.clouds.ec2 import Ec2StandIn
from tests.support.clouds.gce import PROJECT_ID, ZONES, GceStandIn
from tests.support.clouds.gce_credentials import write_service_account
from tests.support.shell import Shell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
GUIDE = "docs/guide/clouds.md"


def configs() -> dict[str, dict[str, Any]]:
    found = [yaml.safe_load(block) for block in page_blocks(GUIDE, "yaml")]
    return {next(iter(one["providers"])): one for one in found if "providers" in one}


def walk(shell: Shell, config: dict[str, Any], file: str) -> str:
    """Run the commands of the guide with a config; their output."""
    config["server"] |= {"names": ["127.0.0.1"], "port": 0}
    (shell.cwd / file).write_text(yaml.safe_dump(config))
    (commands,) = page_blocks(GUIDE, "bash")
    done = subprocess.run(
        ["bash", "-ec", commands.replace("aws.yaml", file)],
        cwd=shell.cwd,
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (worker,) = shell.json("workers", "list", "--all")["workers"]
    assert f"\n{worker['worker_id']}\n" in done.stdout, "the task has printed where it ran"
    assert f"{worker['worker_id']}: gone" in done.stdout
    return done.stdout


def test_a_task_runs_on_an_instance_of_ec2(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    cloud = Ec2StandIn(boot_folder=tmp_path / "machines")
    shell.env |= {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "a-secret-of-this-test"}
    try:
        config = configs()["aws"]
        config["providers"]["aws"] |= {"endpoint_url": cloud.url, "image_id": cloud.image_id}
        said = walk(shell, config, "aws.yaml")
        assert "aws: can be used" in said
        assert "a-secret-of-this-test" not in said
        assert "t3.medium" in said
        assert all(one.ended_at is not None for one in cloud.machines())
    finally:
        shell.close()
        cloud.close()


def test_a_task_runs_on_a_machine_of_compute_engine(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "state", tmp_path)
    cloud = GceStandIn(boots=tmp_path / "machines")
    try:
        config = configs()["gcp"]
        key = write_service_account(tmp_path / "key.json", f"{cloud.url}/token")
        mine = {"project": PROJECT_ID, "zones": list(ZONES), "endpoint_url": cloud.url, "credentials_file": str(key)}
        config["providers"]["gcp"] |= mine
        said = walk(shell, config, "gcp.yaml")
        assert "gcp: can be used" in said
        assert "e2-standard-2" in said
        assert cloud.existing() == {}
    finally:
        shell.close()
        cloud.close()
