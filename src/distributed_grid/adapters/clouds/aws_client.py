"""Connection to AWS: calls of EC2 and of Service Quotas, each made once and with a time limit.

boto3 never repeats a call by itself: an order is made again identically by whoever keeps its record. The credentials
are those of the settings, or what the SDK finds; they are kept by the SDK alone.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Collection, Iterator
from typing import Any

from distributed_grid.adapters.clouds.aws_errors import error_code, grid_error
from distributed_grid.config.providers import AwsSettings
from distributed_grid.errors import BadInput, GridError, Unreachable
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


class AwsCodeError(Exception):
    """AWS has answered with an error code that the caller asks to be told of."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@functools.cache
def _service_models() -> Any:
    """The SDK's descriptions of services: megabytes of JSON, read once in a process."""
    from botocore.loaders import create_loader

    return create_loader()


def _silence_sdk() -> None:
    """Keep the SDK from logging its requests: at debug level they have keys, session tokens and user-data in them."""
    for name in ("boto3", "botocore"):
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.INFO))


class AwsClient:
    """Calls to one region; safe in threads. Errors are those of the port."""

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    def call(
        self, operation: str, *, offer: WorkerOffer | None = None, telling: Collection[str] = (), **parameters: Any
    ) -> dict[str, Any]:
        """The answer of one call of EC2, such as `run_instances`; an error code in `telling` raises `AwsCodeError`."""
        try:
            answer: dict[str, Any] = getattr(self._client("ec2"), operation)(**parameters)
        except GridError:
            raise
        except Exception as failure:  # whatever the SDK raises: it is one of ours from here on
            if (code := error_code(failure)) in telling:
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
        """A limit of the account for EC2; None where AWS does not tell it, which is no zero."""
        try:
            client = self._client("service-quotas")
            return float(client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
        except GridError:
            raise
        except Exception as failure:  # whatever the SDK raises: it is one of ours from here on
            if error_code(failure):  # another service with another permission: nothing depends on it
                return None
            raise grid_error(failure, "quotas") from None

    def credentials_source(self) -> str:
        """Where the credentials come from; raises where there are none."""
        try:
            self._client("ec2")
            found = self._session.get_credentials()
            if found is None:
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            found.get_frozen_credentials()
        except GridError:
            raise
        except Exception as failure:  # whatever the SDK raises: it is one of ours from here on
            raise grid_error(failure, "credentials") from None
        return _SOURCES.get(found.method, str(found.method))

    def _client(self, service: str) -> Any:
        with self._lock:  # making a session or a client is not safe in threads, using one is
            found = self._clients.get(service)
            if found is None:
                found = self._clients[service] = self._make(service)
            return found

    def _make(self, service: str) -> Any:
        try:
            import boto3
            import botocore.session
            from botocore.config import Config
        except ImportError:
            raise BadInput("aws needs the package boto3: pip install 'distributed-grid[aws]'") from None
        if self._session is None:
            _silence_sdk()
            core = botocore.session.Session()
            core.register_component("data_loader", _service_models())
            self._session = boto3.Session(botocore_session=core, **self._credentials())
        config = Config(
            region_name=self._settings.region,
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        return self._session.client(service, config=config, endpoint_url=self._settings.endpoint_url)

    def _credentials(self) -> dict[str, str]:
        given = {
            "aws_access_key_id": self._settings.access_key_id,
            "aws_secret_access_key": self._settings.secret_access_key,
            "aws_session_token": self._settings.session_token,
        }
        return {name: secret.reveal() for name, secret in given.items() if secret is not None}
