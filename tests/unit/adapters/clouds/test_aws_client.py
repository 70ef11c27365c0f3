"""Errors of AWS: every code has one meaning for the grid, and nothing secret is in the words."""

from __future__ import annotations

import botocore.exceptions as sdk
import pytest

from distributed_grid.adapters.clouds.aws_client import error_code, grid_error
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

SPOT = WorkerOffer("t3.medium/us-west-2a/spot", "cpu", WorkerResources(2000, 1 << 32), 1, "us-west-2a", "spot")


def answered(code: str, status: int = 400, message: str = "something") -> sdk.ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return sdk.ClientError(response, "RunInstances")


@pytest.mark.parametrize(
    ("code", "status", "scope"),
    [
        ("InsufficientInstanceCapacity", 500, ""),
        ("Server.InsufficientInstanceCapacity", 500, ""),
        ("InsufficientHostCapacity", 500, ""),
        ("SpotMaxPriceTooLow", 400, ""),
        ("Unsupported", 400, ""),
        ("InsufficientFreeAddressesInSubnet", 400, "zone:us-west-2a"),
        ("MaxSpotInstanceCountExceeded", 400, "market:spot"),
        ("VcpuLimitExceeded", 400, "market:spot kind:cpu"),
        ("InstanceLimitExceeded", 400, "market:spot kind:cpu"),
    ],
)
def test_a_lack_of_capacity_has_the_scope_that_is_short_of_it(code: str, status: int, scope: str) -> None:
    found = grid_error(answered(code, status), "run instances", SPOT)
    assert isinstance(found, NoCapacity)
    assert found.scope == scope


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RequestLimitExceeded", 503, Throttled),
        ("Throttling", 400, Throttled),
        ("ThrottlingException", 400, Throttled),
        ("EC2ThrottledException", 400, Throttled),
        ("InternalError", 500, Unreachable),
        ("Unavailable", 503, Unreachable),
        ("SomethingNew", 502, Unreachable),
        ("SomethingNew", 0, Unreachable),
        ("UnauthorizedOperation", 403, Refused),
        ("AuthFailure", 401, Refused),
        ("ExpiredToken", 400, Refused),
        ("InvalidParameterValue", 400, Refused),
        ("InvalidAMIID.NotFound", 400, Refused),
        ("SomethingNew", 400, Refused),
    ],
)
def test_every_code_has_one_meaning(code: str, status: int, kind: type[GridError]) -> None:
    assert type(grid_error(answered(code, status), "run instances", SPOT)) is kind


def test_what_was_not_answered_may_have_happened() -> None:
    for failure in (
        sdk.EndpointConnectionError(endpoint_url="http://x"),
        sdk.ConnectTimeoutError(endpoint_url="http://x"),
        sdk.ReadTimeoutError(endpoint_url="http://x"),
        sdk.ConnectionClosedError(endpoint_url="http://x"),
        RuntimeError("a bug of the SDK"),
    ):
        assert isinstance(grid_error(failure, "run instances"), Unreachable)
        assert error_code(failure) == ""


def test_missing_credentials_and_a_wrong_region_are_named() -> None:
    assert "providers.aws.credentials" in str(grid_error(sdk.NoCredentialsError(), "x"))
    assert isinstance(grid_error(sdk.InvalidRegionError(region_name="x_y"), "x"), BadInput)


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("InvalidAMIID.Malformed", "image_id"),
        ("InvalidGroup.NotFound", "security_group_ids"),
        ("InvalidSubnetID.NotFound", "subnet_ids"),
        ("InvalidKeyPair.NotFound", "key_name"),
    ],
)
def test_a_wrong_setting_is_named(code: str, key: str) -> None:
    assert f"see providers.aws.{key}" in str(grid_error(answered(code), "run instances"))


def test_nothing_secret_is_in_the_words() -> None:
    encoded = "You are not authorized. Encoded authorization failure message: eyJzZWNyZXQi"
    found = str(grid_error(answered("UnauthorizedOperation", 403, encoded), "run instances"))
    assert found == "AWS run instances: not allowed: You are not authorized (UnauthorizedOperation)"
    signed = "The canonical string should have been: x-amz-security-token:FwoGZXIvYXdzEBYaD"
    assert "FwoG" not in str(grid_error(answered("SignatureDoesNotMatch", 403, signed), "x"))
    assert "AKIA" not in str(grid_error(answered("Something", 400, "the key AKIAIOSFODNN7EXAMPLE is odd"), "x"))
    invalid = sdk.ParamValidationError(report="Invalid type for parameter UserData, value: gridjoin1_secret")
    assert "gridjoin1" not in str(grid_error(invalid, "x"))
