"""Calls of Google's Compute Engine API: JSON over HTTPS, as Google's own documentation of its REST methods has them.

Google's library for it takes seconds to load and stalls everything else meanwhile (docs/adr/0039); only its sessions
with credentials are used. A call that fails raises `ApiFailure` with Google's message, an unanswered one `Unreachable`.
Times are Google's: the age of a machine does not depend on the clock of this one.

`call_error` and `operation_error` translate to errors of the port: Google describes a failure in the answer to a call,
or in an operation that has ended, with different codes of the same meaning. A failed operation made nothing, and the
same request would only bring back the same failure: another machine may be had under another name, so it is
`NoCapacity` unless it can never succeed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import stat
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from msgspec import Struct

from distributed_grid.config.providers import GcpSettings
from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

MAX_LINE = 300
STOCKOUT = frozenset(
    {
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "STOCKOUT",
        "UNSUPPORTED_OPERATION",
        "insufficientCapacity",
        "resource_availability",
    }
)
QUOTA = frozenset({"QUOTA_EXCEEDED", "quotaExceeded"})
RATE = frozenset(
    {
        "rateLimitExceeded",
        "userRateLimitExceeded",
        "RATE_LIMIT_EXCEEDED",
        "resourceOperationRateExceeded",
        "RESOURCE_OPERATION_RATE_EXCEEDED",
        "concurrentOperationQuotaExceeded",
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
    }
)
BUSY = frozenset({"resourceNotReady", "resourceInUseByAnotherResource"})
DISABLED = frozenset({"accessNotConfigured", "SERVICE_DISABLED"})
IMPOSSIBLE = re.compile(r"INVALID|NOT_FOUND|PERMISSION|NOT_SUPPORTED|BAD_|CONDITION_NOT_MET", re.ASCII)
_PERMISSION = re.compile(r"[Rr]equired '?([a-z]+\.[A-Za-z]+\.[A-Za-z]+)'? permission")
_METRIC = re.compile(r"[Qq]uota '([A-Z0-9_]+)' exceeded")


class ApiFailure(Exception):
    """Failure of a call or an operation, as Google describes it."""

    def __init__(self, status: int, codes: Iterable[str], message: str, metric: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.codes = frozenset(codes)  # Google's names of the failure
        self.message = message
        named = _METRIC.search(message)
        self.metric = metric or (named[1] if named else "")  # the quota that was exceeded

    @classmethod
    def of(cls, status: int, body: Any) -> ApiFailure:
        """The failure that the answer to a call describes, in the old or the new form."""
        error = _mapping(_mapping(body).get("error"))
        parts = (*_mappings(error.get("errors")), *_mappings(error.get("details")))
        codes = {str(error.get("status") or ""), *(str(part.get("reason") or "") for part in parts)}
        message = one_line(str(error.get("message") or "")) or f"HTTP {status}"
        return cls(status, codes - {""}, message)

    @classmethod
    def of_operation(cls, operation: Mapping[str, Any]) -> ApiFailure | None:
        errors = _mappings(_mapping(operation.get("error")).get("errors"))
        if not errors:
            return None
        codes, metric = set(), ""
        for error in errors:
            codes.add(str(error.get("code") or ""))
            for detail in _mappings(error.get("errorDetails")):
                codes.add(str(_mapping(detail.get("errorInfo")).get("reason") or ""))
                limit = str(_mapping(detail.get("quotaInfo")).get("limitName") or "")
                metric = metric or limit.partition("-per-")[0].replace("-", "_")
        status = operation.get("httpErrorStatusCode")
        message = one_line("; ".join(str(error.get("message") or error.get("code")) for error in errors))
        return cls(status if isinstance(status, int) else 0, codes - {""}, message, metric)


def call_error(
    failure: ApiFailure, action: str, offer: WorkerOffer | None = None, *, is_one_region: bool = True
) -> GridError:
    """The error of the port for a failed call; `offer` is the machine to be created."""
    if offer is not None and (shortage := _shortage(failure, action, offer, is_one_region)):
        return shortage
    if failure.codes & RATE or failure.status == 429:
        return Throttled(f"{action}: {failure.message}")
    if failure.status == 401:
        return Refused(f"{action}: Google does not accept the credentials: {failure.message}")
    if failure.codes & DISABLED:
        return Refused(f"{action}: the Compute Engine API is not enabled in this project: {failure.message}")
    if failure.status == 403:
        missing = _PERMISSION.search(failure.message)
        reason = f"the credentials lack the permission {missing[1]}" if missing else "the credentials may not do that"
        return Refused(f"{action}: {reason}: {failure.message}")
    if failure.codes & BUSY or failure.status in (408, 409) or not 400 <= failure.status < 500:
        return Unreachable(f"{action}: {failure.message}")
    return Refused(f"{action}: {failure.message}")


def operation_error(failure: ApiFailure, action: str, offer: WorkerOffer, *, is_one_region: bool = True) -> GridError:
    """The error of the port for a creation whose operation has failed."""
    if shortage := _shortage(failure, action, offer, is_one_region):
        return shortage
    if any(IMPOSSIBLE.search(code) for code in failure.codes):
        return Refused(f"{action}: {failure.message}")
    return NoCapacity(f"{action}: {failure.message}")


def _shortage(failure: ApiFailure, action: str, offer: WorkerOffer, is_one_region: bool) -> NoCapacity | None:
    """No machine available, or a limit of the project reached, with the scope of the lack."""
    if failure.codes & STOCKOUT:
        return NoCapacity(f"{action}: {failure.message}")
    if not failure.codes & QUOTA:
        return None
    words = f"{action}: {failure.message}"
    if failure.metric.endswith("_ALL_REGIONS"):
        return NoCapacity(words, f"kind:{offer.worker_type}")
    # A zone of another region may have room: with several regions only this offer is closed.
    return NoCapacity(words, f"market:{offer.market} kind:{offer.worker_type}" if is_one_region else "")


def one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:MAX_LINE]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


COMPUTE = "https://compute.googleapis.com"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
REQUEST_SECONDS = 15.0
MAX_ANSWER_BYTES = 32 << 20
MAX_PAGES = 200
CONNECTIONS = 8
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Deadline:
    """Common time limit for all calls of one method of the port."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self, action: str) -> float:
        """Seconds that are left; Unreachable where there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise Unreachable(f"{action}: no answer in time")
        return left

    def pause(self, seconds: float, action: str) -> None:
        if self.left(action) <= seconds:
            raise Unreachable(f"{action}, and there is no more time to wait")
        time.sleep(seconds)


class ApiAnswer(Struct, frozen=True):
    body: Mapping[str, Any]
    at: float  # by Google's own clock, in seconds since 1970


class ComputeApi:
    """A connection to Compute Engine in one project, made with the first call; safe in threads."""

    def __init__(self, settings: GcpSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._session: Any = None
        self._credentials: Any = None
        self._compute = (settings.endpoint_url or COMPUTE).rstrip("/")
        self._resource_manager = (settings.endpoint_url or RESOURCE_MANAGER).rstrip("/")
        parts = urlsplit(self._compute)
        if parts.scheme == "http" and not settings.anonymous and parts.hostname not in LOOPBACK:
            raise BadInput("providers.gcp.endpoint_url: credentials are not sent over http, use https")

    def call(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        action: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        project: str = "",
    ) -> ApiAnswer:
        """Call `path` of the project; Google's audit log shows `action`."""
        url = f"{self._compute}/compute/v1/projects/{quote(project or self._settings.project)}{quote(path)}"
        return self._send(method, url, deadline, action, query, body)

    def get(self, path: str, deadline: Deadline, *, action: str, project: str = "") -> ApiAnswer | None:
        """The resource at `path` of the project (by default the config's); None where there is none."""
        try:
            return self.call("GET", path, deadline, action=action, project=project)
        except ApiFailure as failure:
            if failure.status == 404:
                return None
            raise

    def pages(self, path: str, deadline: Deadline, *, action: str, query: Mapping[str, str]) -> Iterator[ApiAnswer]:
        """Every page of a list."""
        token = ""
        for _ in range(MAX_PAGES):
            more = {"pageToken": token} if token else {}
            answer = self.call("GET", path, deadline, action=action, query={**query, **more})
            yield answer
            token = str(answer.body.get("nextPageToken") or "")
            if not token:
                return
        raise Unreachable(f"{action}: the list has no end")

    def granted(self, permissions: list[str], deadline: Deadline, *, action: str) -> list[str]:
        url = f"{self._resource_manager}/v1/projects/{quote(self._settings.project)}:testIamPermissions"
        answer = self._send("POST", url, deadline, action, None, {"permissions": permissions})
        return [str(permission) for permission in answer.body.get("permissions") or ()]

    def source_of_credentials(self) -> str:
        """Where the credentials come from and whose they are, in words."""
        settings = self._settings
        if settings.anonymous:
            return "no credentials (anonymous: true)"
        self._open()
        account = getattr(self._credentials, "service_account_email", None)
        account = account or getattr(self._credentials, "account", "")
        of = f" of {account}" if account and account != "default" else ""
        if settings.credentials_file is None:
            return f"Application Default Credentials{of}"
        path = Path(settings.credentials_file).expanduser()
        others = " (others can read it: chmod 600)" if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) else ""
        return f"the file {settings.credentials_file}{of}{others}"

    def _send(
        self,
        method: str,
        url: str,
        deadline: Deadline,
        action: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> ApiAnswer:
        self._open()
        left = deadline.left(action)
        text = bytearray()
        with (
            _translated(action),
            self._session.request(
                method,
                url,
                params=query,
                data=None if body is None else json.dumps(body, sort_keys=True).encode(),
                headers={"Content-Type": "application/json", "X-Goog-Request-Reason": f"distributed-grid {action}"},
                timeout=min(REQUEST_SECONDS, left),
                allow_redirects=False,
                stream=True,
                **({} if self._settings.anonymous else {"max_allowed_time": left}),
            ) as response,
        ):
            for chunk in response.iter_content(1 << 16):
                text += chunk
                deadline.left(action)
                if len(text) > MAX_ANSWER_BYTES:
                    raise Unreachable(f"{action}: the answer is larger than {MAX_ANSWER_BYTES >> 20} MB")
        try:
            answer = json.loads(text or b"{}")
        except ValueError:
            answer = None
        if response.status_code >= 300:
            raise ApiFailure.of(response.status_code, answer)
        if not isinstance(answer, dict):
            raise Unreachable(f"{action}: Google answered with something that is not JSON")
        try:
            seconds = parsedate_to_datetime(response.headers.get("Date") or "").timestamp()
        except ValueError:
            seconds = time.time()
        return ApiAnswer(answer, seconds)

    def _open(self) -> None:
        """Load the library and the credentials, once."""
        with self._lock:
            if self._session is not None:
                return
            try:
                import requests.adapters
                from google.auth.transport.requests import AuthorizedSession, Request
            except ImportError:
                wanted = "google-auth and requests"
                raise BadInput(f"gcp needs the packages {wanted}: pip install 'distributed-grid[gcp]'") from None
            logging.getLogger("google").setLevel(logging.INFO)  # at DEBUG it logs requests, tokens included
            session = for_tokens = requests.Session()
            if not self._settings.anonymous:
                self._credentials = _load_credentials(self._settings)
                # One refresh after a 401: a token that was withdrawn before its time.
                options = {"max_refresh_attempts": 1, "auth_request": Request(for_tokens)}
                session = AuthorizedSession(self._credentials, **options)  # type: ignore[no-untyped-call]
            for opened in {session, for_tokens}:
                opened.trust_env = urlsplit(self._compute).hostname not in LOOPBACK  # no proxy to this machine
                adapter = requests.adapters.HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)
                opened.mount("https://", adapter)
                opened.mount("http://", adapter)
            self._session = session


def _load_credentials(settings: GcpSettings) -> Any:
    """Credentials of the file, or those that Google's own libraries find."""
    import google.auth
    import google.auth.exceptions

    name = settings.credentials_file
    try:
        if name is None:
            return google.auth.default(scopes=SCOPES)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of files from strangers; this one is from the config
            path = str(Path(name).expanduser())
            return google.auth.load_credentials_from_file(path, scopes=SCOPES)[0]  # type: ignore[no-untyped-call]
    except google.auth.exceptions.DefaultCredentialsError:
        where = f"providers.gcp.credentials_file: {name}" if name else "no Application Default Credentials: set"
        hint = "cannot be used as credentials" if name else "credentials_file, or GOOGLE_APPLICATION_CREDENTIALS"
        raise Refused(f"{where} {hint}") from None  # the library's message may quote the file
    except (OSError, ValueError) as failure:
        raise Refused(f"the credentials of gcp cannot be read: {type(failure).__name__}") from None


@contextlib.contextmanager
def _translated(action: str) -> Iterator[None]:
    """Errors of the libraries as errors of the grid."""
    import google.auth.exceptions
    import requests.exceptions

    try:
        yield
    except google.auth.exceptions.RefreshError as failure:
        if failure.retryable:
            raise Unreachable(f"{action}: Google's service of tokens failed") from None
        reason = one_line(str(failure.args[0])) if failure.args else ""
        raise Refused(f"{action}: Google does not accept the credentials: {reason}") from None
    except google.auth.exceptions.TransportError as failure:
        raise Unreachable(f"{action}: Google's service of tokens did not answer: {_cause(failure)}") from None
    except google.auth.exceptions.GoogleAuthError as failure:
        raise Refused(f"{action}: the credentials cannot be used: {type(failure).__name__}") from None
    except (requests.exceptions.RequestException, OSError) as failure:
        raise Unreachable(f"{action}: no answer from Google: {_cause(failure)}") from None


def _cause(failure: BaseException) -> str:
    """The system error that the library has wrapped, several times; never the URL or the body that was sent."""
    error: BaseException | None = failure
    for _ in range(10):
        if error is None:
            break
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return type(failure).__name__
