"""Errors of AWS as errors of the port: what a code means, in plain words and without secrets.

Codes come before HTTP statuses: EC2 answers a lack of capacity with status 500 and throttling with 503, and neither had
an effect. What is not known and not answered in the 400s may have had one: `Unreachable`.
"""

from __future__ import annotations

import re
from typing import Any

from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

MAX_WORDS = 300
DRY_RUN_SUCCEEDED = "DryRunOperation"
PARAMETER_MISMATCH = "IdempotentParameterMismatch"
INSTANCE_TERMINATED = "IdempotentInstanceTerminated"
UNKNOWN_IDS = frozenset({"InvalidInstanceID.NotFound", "InvalidSpotInstanceRequestID.NotFound"})

_OFFER_IS_FULL = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientCapacity",
    "InsufficientReservedInstanceCapacity",
    "ReservationCapacityExceeded",
    "SpotMaxPriceTooLow",
    "Unsupported",
    "UnfulfillableCapacity",
}
_ZONE_IS_FULL = {"InsufficientFreeAddressesInSubnet"}
_SPOT_IS_FULL = {"MaxSpotInstanceCountExceeded"}
_LIMIT_IS_REACHED = {"VcpuLimitExceeded", "InstanceLimitExceeded"}
_THROTTLED = {
    "RequestLimitExceeded",
    "EC2ThrottledException",
    "RequestThrottled",
    "RequestThrottledException",
    "TooManyRequestsException",
    "BandwidthLimitExceeded",
    "PriorRequestNotComplete",
    "SlowDown",
}
_FAILED = {
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "Unavailable",
    "ServiceUnavailable",
    "RequestTimeout",
    "RequestTimeoutException",
}
_NOT_ALLOWED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "UnauthorizedException"}
_CREDENTIALS = {
    "AuthFailure": "AWS does not accept the credentials",
    "InvalidClientTokenId": "AWS does not know the access key",
    "UnrecognizedClientException": "AWS does not know the access key",
    "SignatureDoesNotMatch": "the secret access key does not belong to the access key, or the clock is wrong",
    "InvalidSignatureException": "the secret access key does not belong to the access key, or the clock is wrong",
    "RequestExpired": "the credentials have expired, or the clock of this machine is wrong",
    "ExpiredToken": "the session token has expired",
    "ExpiredTokenException": "the session token has expired",
    "MissingAuthenticationToken": "AWS got no credentials",
    "OptInRequired": "the account is not enabled for EC2 in this region",
    "PendingVerification": "AWS is still verifying the account for this region",
    "Blocked": "the account is blocked by AWS",
}
_SETTINGS = {
    "InvalidAMIID": "image_id",
    "InvalidSubnetID": "subnet_ids",
    "InvalidSubnet": "subnet_ids",
    "InvalidGroup": "security_group_ids",
    "InvalidGroupId": "security_group_ids",
    "InvalidSecurityGroupID": "security_group_ids",
    "InvalidKeyPair": "key_name",
    "InvalidInstanceType": "instance_types",
    "InvalidAvailabilityZone": "zones",
}
_ENCODED = re.compile(r"\s*Encoded authorization failure message:.*", re.DOTALL)
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{8,}\b")


def error_code(failure: BaseException) -> str:
    """The code of AWS's answer, without the side it blames; empty where there was no answer."""
    response = getattr(failure, "response", None)
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    return code.removeprefix("Client.").removeprefix("Server.")


def grid_error(failure: Exception, doing: str, offer: WorkerOffer | None = None) -> GridError:
    """The error of the port for one of boto3; `offer` is what was ordered, for the scope of a lack of capacity."""
    import botocore.exceptions as sdk

    if isinstance(failure, sdk.ClientError):
        return _answered(failure, doing, offer)
    if isinstance(failure, sdk.NoCredentialsError | sdk.PartialCredentialsError):
        return Refused("no AWS credentials: set providers.aws.credentials, AWS_ACCESS_KEY_ID, a profile or a role")
    if isinstance(failure, sdk.ParamValidationError):  # its text repeats the parameters, which must not be shown
        return Refused(f"AWS {doing}: a setting under providers.aws has a form that the API does not take")
    if isinstance(failure, sdk.NoRegionError | sdk.InvalidRegionError | sdk.UnknownEndpointError):
        return BadInput("providers.aws.region is not the name of a region")
    return Unreachable(f"AWS {doing}: no answer ({type(failure).__name__})")


def _answered(failure: Any, doing: str, offer: WorkerOffer | None) -> GridError:
    code = error_code(failure)
    status = int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    said = f"AWS {doing}: {_words(failure)} ({code})"
    if (scope := _scope(code, offer)) is not None:
        return NoCapacity(said, scope)
    if code in _THROTTLED or code.startswith("Throttl"):
        return Throttled(said)
    if code in _CREDENTIALS:  # what AWS says then may repeat parts of the request
        return Refused(f"AWS {doing}: {_CREDENTIALS[code]} ({code})")
    if code in _FAILED or status >= 500 or not 400 <= status < 500:
        return Unreachable(said)
    if code in _NOT_ALLOWED:
        return Refused(f"AWS {doing}: not allowed: {_words(failure)} ({code})")
    key = _SETTINGS.get(code.partition(".")[0])
    return Refused(f"{said}; see providers.aws.{key}" if key else said)


def _scope(code: str, offer: WorkerOffer | None) -> str | None:
    """What cannot be had now; empty: the one offer. None where the code is about something else."""
    if code in _OFFER_IS_FULL:
        return ""
    if offer is None:
        return None
    if code in _ZONE_IS_FULL:
        return f"zone:{offer.zone}" if offer.zone else ""
    if code in _SPOT_IS_FULL:
        return f"market:{offer.market}"
    if code in _LIMIT_IS_REACHED:  # of the account, for a family of types in one market, whatever the zone
        return f"market:{offer.market} kind:{offer.worker_type}"
    return None


def _words(failure: Any) -> str:
    """What AWS said, in one line, without what only AWS can read and without keys."""
    text = str(failure.response.get("Error", {}).get("Message", ""))
    text = _KEY_ID.sub("***", _ENCODED.sub("", text))
    return " ".join(text.split())[:MAX_WORDS].rstrip(". ") or "refused"
