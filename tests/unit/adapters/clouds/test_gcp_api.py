"""What Google says when something fails, and what that means for a worker."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.adapters.clouds.gcp_api import ApiFailure, call_error, one_line, operation_error
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

OFFER = WorkerOffer("gpu/n1-standard-4/spot/us-central1-a", "gpu", WorkerResources(4000, 1 << 30), 1, "z", "spot")


def answered(status: int, reason: str, message: str = "it failed") -> ApiFailure:
    """The failure of a call, in the form that Compute Engine has."""
    error = {"code": status, "message": message, "errors": [{"reason": reason, "domain": "global"}]}
    return ApiFailure.of(status, {"error": error})


def ended(code: str, message: str = "it failed", **more: Any) -> ApiFailure:
    """The failure of an operation."""
    operation = {"status": "DONE", "error": {"errors": [{"code": code, "message": message, **more}]}}
    found = ApiFailure.of_operation({**operation, "httpErrorStatusCode": 503})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("status", "reason", "message", "kind"),
    [
        (400, "invalid", "Invalid value for field 'resource.machineType'", Refused),
        (400, "resourceNotReady", "The resource is not ready", Unreachable),
        (401, "authError", "Request had invalid authentication credentials", Refused),
        (403, "forbidden", "Required 'compute.instances.create' permission for 'projects/p'", Refused),
        (403, "accessNotConfigured", "Compute Engine API has not been used in project 1 before", Refused),
        (403, "quotaExceeded", "Quota 'CPUS' exceeded.  Limit: 24.0 in region us-central1.", NoCapacity),
        (403, "rateLimitExceeded", "Quota exceeded for quota group 'default'", Throttled),
        (403, "userRateLimitExceeded", "User Rate Limit Exceeded", Throttled),
        (404, "notFound", "The resource 'projects/p/global/images/x' was not found", Refused),
        (408, "timeout", "", Unreachable),
        (409, "resourceInUseByAnotherResource", "", Unreachable),
        (412, "conditionNotMet", "Constraint constraints/compute.vmExternalIpAccess violated", Refused),
        (429, "", "", Throttled),
        (500, "backendError", "Internal error", Unreachable),
        (503, "insufficientCapacity", "no machines", NoCapacity),
        (503, "backendError", "The service is unavailable", Unreachable),
        (302, "", "", Unreachable),
    ],
)
def test_a_creation_that_is_refused(status: int, reason: str, message: str, kind: type[GridError]) -> None:
    error = call_error(answered(status, reason, message), "create worker-1", OFFER)
    assert type(error) is kind
    assert "create worker-1" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", NoCapacity),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NoCapacity),
        ("STOCKOUT", NoCapacity),
        ("UNSUPPORTED_OPERATION", NoCapacity),
        ("QUOTA_EXCEEDED", NoCapacity),
        ("INTERNAL_ERROR", NoCapacity),
        ("RESOURCE_OPERATION_RATE_EXCEEDED", NoCapacity),
        ("RESOURCE_NOT_FOUND", Refused),
        ("INVALID_FIELD_VALUE", Refused),
        ("PERMISSIONS_ERROR", Refused),
        ("SOMETHING_NEW", NoCapacity),
    ],
)
def test_an_operation_that_failed_made_nothing_and_is_never_repeated_as_it_is(code: str, kind: type[GridError]) -> None:
    assert type(operation_error(ended(code), "create worker-1", OFFER)) is kind


@pytest.mark.parametrize(
    ("message", "is_one_region", "scope"),
    [
        ("Quota 'CPUS' exceeded.  Limit: 8.0 in region us-central1.", True, "market:spot kind:gpu"),
        ("Quota 'NVIDIA_T4_GPUS' exceeded.  Limit: 1.0 in region us-central1.", True, "market:spot kind:gpu"),
        ("Quota 'NVIDIA_T4_GPUS' exceeded.  Limit: 1.0 in region us-central1.", False, ""),
        ("Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.", False, "kind:gpu"),
        ("Quota 'CPUS_ALL_REGIONS' exceeded.  Limit: 12.0 globally.", True, "kind:gpu"),
    ],
)
def test_a_limit_of_the_project_closes_what_it_counts(message: str, is_one_region: bool, scope: str) -> None:
    for failure in (ended("QUOTA_EXCEEDED", message), answered(403, "quotaExceeded", message)):
        error = call_error(failure, "create", OFFER, is_one_region=is_one_region)
        assert isinstance(error, NoCapacity)
        assert error.scope == scope


def test_the_limit_is_also_named_in_the_details() -> None:
    quota = {"quotaInfo": {"metricName": "compute.googleapis.com/cpus_all_regions"}}
    quota["quotaInfo"]["limitName"] = "CPUS-ALL-REGIONS-per-project"
    assert ended("QUOTA_EXCEEDED", "Quota exceeded", errorDetails=[quota]).metric == "CPUS_ALL_REGIONS"


def test_a_stockout_closes_only_the_offer() -> None:
    error = operation_error(ended("ZONE_RESOURCE_POOL_EXHAUSTED"), "create", OFFER)
    assert isinstance(error, NoCapacity)
    assert error.scope == ""


def test_a_quota_is_no_shortage_where_nothing_is_created() -> None:
    assert isinstance(call_error(answered(403, "quotaExceeded"), "terminate worker-1"), Refused)


def test_the_missing_permission_is_named() -> None:
    failure = answered(403, "forbidden", "Required 'compute.instances.delete' permission for 'projects/p/zones/z'")
    assert "lack the permission compute.instances.delete" in str(call_error(failure, "terminate worker-1"))


def test_the_new_form_of_errors_is_read_too() -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RATE_LIMIT_EXCEEDED"}]
    body = {"error": {"code": 403, "message": "Quota exceeded", "status": "PERMISSION_DENIED", "details": details}}
    assert isinstance(call_error(ApiFailure.of(403, body), "list"), Throttled)


@pytest.mark.parametrize("body", [None, [], "x", {"error": "x"}, {"error": {"errors": "x", "details": [1]}}, {}])
def test_what_is_no_error_of_google_is_one_all_the_same(body: Any) -> None:
    assert isinstance(call_error(ApiFailure.of(502, body), "list"), Unreachable)
    assert ApiFailure.of_operation({"error": body, "status": "DONE"}) is None


def test_messages_are_one_printable_line_of_bounded_length() -> None:
    assert one_line("a\n b\x1b[31m\tc") == "a b [31m c"
    assert len(one_line("x" * 10_000)) == 300
