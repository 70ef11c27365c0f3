"""The permissions in the guide are exactly those that the adapters need: no call without one, and none too many."""

from __future__ import annotations

import ast
import json

import yaml

from distributed_grid.adapters.clouds.gcp import needed_permissions
from distributed_grid.config.providers import GcpSettings
from tests.e2e.guides import page_blocks
from tests.support.project import PROJECT

GUIDE = "docs/guide/clouds.md"
ADAPTERS = PROJECT / "src/distributed_grid/adapters/clouds"
CALLERS = {"call", "pages", "_end"}


def ec2_operations() -> set[str]:
    """The operations that the adapter names where it calls EC2, and those of Service Quotas."""
    found = set()
    for file in ADAPTERS.glob("aws*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            first = node.args[0] if node.args else None
            if node.func.attr in CALLERS and isinstance(first, ast.Constant):
                found.add("ec2:" + "".join(word.capitalize() for word in str(first.value).split("_")))
            if node.func.attr.startswith("get_service"):
                found.add("servicequotas:" + "".join(word.capitalize() for word in node.func.attr.split("_")))
    return found


def test_the_policy_allows_the_calls_of_the_adapter_and_no_others() -> None:
    (policy,) = page_blocks(GUIDE, "json")
    allowed = [action for statement in json.loads(policy)["Statement"] for action in statement["Action"]]
    assert len(allowed) == len(set(allowed))
    operations = ec2_operations()
    assert len(operations) > 8
    assert set(allowed) == operations | {"ec2:CreateTags"}, "tags are part of the call that starts an instance"


def test_what_ends_machines_is_allowed_for_those_of_a_grid_only() -> None:
    (policy,) = page_blocks(GUIDE, "json")
    for statement in json.loads(policy)["Statement"]:
        if {"ec2:TerminateInstances", "ec2:CancelSpotInstanceRequests", "ec2:CreateTags"} & set(statement["Action"]):
            assert statement["Condition"]


def test_the_role_has_the_permissions_that_the_adapter_asks_google_about() -> None:
    role = next(yaml.safe_load(block) for block in page_blocks(GUIDE, "yaml") if "includedPermissions" in block)
    assert role["includedPermissions"] == needed_permissions(GcpSettings(project="my-project", tags=("grid",)))
