"""Connection to AWS: calls of EC2 and of Service Quotas, each made once and with a time limit, and their errors.

boto3 never repeats a call by itself: the control plane repeats an order identically. The credentials are those of the
settings, or those the SDK finds; the SDK alone keeps them.

Messages are in plain words and without secrets. Codes come before HTTP statuses: EC2 answers a lack of capacity with
status 500 and throttling with 503, and neither had an effect. An unknown code with a status outside the 400s may have
had one: `Unreachable`.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Collection, Iterator
from typing import Any

from distributed_grid.config.providers import AwsSettings
from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

CONNECT_SECONDS, READ_SECONDS = 5.0, 15.0
PAGE_SIZE = 500
MAX_PAGES = 200
_SOURCES = {
    "explicit": "providers.aws.credentials",
    "env": "the environment",
    "shared-credentials-file": "the file of credentials",
    "config-file": "the config file of AWS",
    "iam-role": "the role of this instance",
    "container-role": "the role of this container",
}
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


class AwsCodeError(Exception):
    """An error code of AWS that the caller handles itself."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@functools.cache
def _service_models() -> Any:
    from botocore.loaders import create_loader

    return create_loader()


class AwsClient:
    """Calls to one region; safe in threads. Errors are those of the port."""

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    def call(
        self, operation: str, *, offer: WorkerOffer | None = None, raised_codes: Collection[str] = (), **parameters: Any
    ) -> dict[str, Any]:
        """The answer of one call of EC2, such as `run_instances`; a code in `raised_codes` raises `AwsCodeError`."""
        try:
            answer: dict[str, Any] = getattr(self._client("ec2"), operation)(**parameters)
        except GridError:
            raise
        except Exception as failure:  # any error of the SDK becomes one of the port
            if (code := error_code(failure)) in raised_codes:
                raise AwsCodeError(code) from None
            raise grid_error(failure, operation.replace("_", " "), offer) from None
        return answer

    def pages(self, operation: str, key: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Everything under `key` in all pages of an answer."""
        token: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            answer = self.call(operation, MaxResults=PAGE_SIZE, **token, **parameters)
            yield from answer.get(key, ())
            if not answer.get("NextToken"):
                return
            token = {"NextToken": answer["NextToken"]}
        raise Unreachable(f"AWS {operation.replace('_', ' ')}: more than {MAX_PAGES * PAGE_SIZE} things, or no end")

    def quota(self, code: str) -> float | None:
        """A limit of the account for EC2; None (not zero) where AWS does not answer with one."""
        try:
            client = self._client("service-quotas")
            return float(client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
        except GridError:
            raise
        except Exception as failure:  # any error of the SDK becomes one of the port
            if error_code(failure):  # another service with another permission: nothing depends on it
                return None
            raise grid_error(failure, "quotas") from None

    def credentials_source(self) -> str:
        """Name of the place that the credentials come from; raises where there are none."""
        try:
            self._client("ec2")
            credentials = self._session.get_credentials()
            if credentials is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            credentials.get_frozen_credentials()
        except GridError:
            raise
        except Exception as failure:  # any error of the SDK becomes one of the port
            raise grid_error(failure, "credentials") from None
        return _SOURCES.get(credentials.method, str(credentials.method))

    def _client(self, service: str) -> Any:
        with self._lock:  # making a session or a client is not safe in threads, using one is
            if service in self._clients:
                return self._clients[service]
            try:
                import boto3
                import botocore.session
                from botocore.config import Config
            except ImportError:
                raise BadInput("aws needs the package boto3: pip install 'distributed-grid[aws]'") from None
            if self._session is None:
                for name in ("boto3", "botocore"):  # at DEBUG they log requests: keys, session tokens, user-data
                    logger = logging.getLogger(name)
                    logger.setLevel(max(logger.level, logging.INFO))
                core = botocore.session.Session()
                core.register_component("data_loader", _service_models())
                secrets = {
                    "aws_access_key_id": self._settings.access_key_id,
                    "aws_secret_access_key": self._settings.secret_access_key,
                    "aws_session_token": self._settings.session_token,
                }
                self._session = boto3.Session(
                    botocore_session=core,
                    **{name: secret.reveal() for name, secret in secrets.items() if secret is not None},
                )
            config = Config(
                region_name=self._settings.region,
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"total_max_attempts": 1, "mode": "standard"},
            )
            client = self._session.client(service, config=config, endpoint_url=self._settings.endpoint_url)
            self._clients[service] = client
            return client


def error_code(failure: BaseException) -> str:
    """Code of AWS's answer without its prefix `Client.` or `Server.`; empty without an answer."""
    response = getattr(failure, "response", None)
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    return code.removeprefix("Client.").removeprefix("Server.")


def grid_error(failure: Exception, doing: str, offer: WorkerOffer | None = None) -> GridError:
    """The error of the port for one of boto3; `offer` gives the scope of a lack of capacity."""
    import botocore.exceptions as sdk

    if isinstance(failure, sdk.ClientError):
        code = error_code(failure)
        status = int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
        text = f"AWS {doing}: {_words(failure)} ({code})"
        if code in _OFFER_IS_FULL:
            return NoCapacity(text)
        if offer is not None and code in _ZONE_IS_FULL:
            return NoCapacity(text, f"zone:{offer.zone}" if offer.zone else "")
        if offer is not None and code in _SPOT_IS_FULL:
            return NoCapacity(text, f"market:{offer.market}")
        if offer is not None and code in _LIMIT_IS_REACHED:  # for a family of types in one market, whatever the zone
            return NoCapacity(text, f"market:{offer.market} kind:{offer.worker_type}")
        if code in _THROTTLED or code.startswith("Throttl"):
            return Throttled(text)
        if code in _CREDENTIALS:  # the message of AWS may repeat parts of the request
            return Refused(f"AWS {doing}: {_CREDENTIALS[code]} ({code})")
        if code in _FAILED or status >= 500 or not 400 <= status < 500:
            return Unreachable(text)
        if code in _NOT_ALLOWED:
            return Refused(f"AWS {doing}: not allowed: {_words(failure)} ({code})")
        key = _SETTINGS.get(code.partition(".")[0])
        return Refused(f"{text}; see providers.aws.{key}" if key else text)
    if isinstance(failure, sdk.NoCredentialsError | sdk.PartialCredentialsError):
        return Refused("no AWS credentials: set providers.aws.credentials, AWS_ACCESS_KEY_ID, a profile or a role")
    if isinstance(failure, sdk.ParamValidationError):  # its text repeats the parameters, which must not be shown
        return Refused(f"AWS {doing}: a setting under providers.aws has a form that the API does not take")
    if isinstance(failure, sdk.NoRegionError | sdk.InvalidRegionError | sdk.UnknownEndpointError):
        return BadInput("providers.aws.region is not the name of a region")
    return Unreachable(f"AWS {doing}: no answer ({type(failure).__name__})")


def _words(failure: Any) -> str:
    text = str(failure.response.get("Error", {}).get("Message", ""))
    text = _KEY_ID.sub("***", _ENCODED.sub("", text))
    return " ".join(text.split())[:MAX_WORDS].rstrip(". ") or "refused"
