"""Calls of Google's Compute Engine API: JSON over HTTPS, as Google's own documentation of its REST methods has them.

Google's library for it takes seconds to load and stalls everything else meanwhile (docs/adr/0039); only the part that
knows credentials is used. A call that fails raises `ApiFailure` with what Google said; one that was not answered raises
`Unreachable`. Times are Google's: the age of a machine does not depend on the clock of this one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from msgspec import Struct

from distributed_grid.adapters.clouds.gcp_errors import ApiFailure, one_line
from distributed_grid.config.providers import GcpSettings
from distributed_grid.errors import BadInput, Refused, Unreachable

COMPUTE = "https://compute.googleapis.com"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
REQUEST_SECONDS = 15.0
MAX_ANSWER_BYTES = 32 << 20
MAX_PAGES = 200
CONNECTIONS = 8
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Deadline:
    """By when the calls of one method of the port are over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self, what: str) -> float:
        """Seconds that are left; Unreachable where there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise Unreachable(f"{what}: no answer in time")
        return left

    def pause(self, seconds: float, what: str) -> None:
        """Wait before the next call; Unreachable where it would be over by then."""
        if self.left(what) <= seconds:
            raise Unreachable(f"{what}, and there is no more time to wait")
        time.sleep(seconds)


class ApiAnswer(Struct, frozen=True):
    """What Google answered, and when, by its own clock (seconds since 1970)."""

    body: Mapping[str, Any]
    at: float


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
        why: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        project: str = "",
    ) -> ApiAnswer:
        """Call `path` of the project. `why` is in Google's audit log: what the grid did it for."""
        url = f"{self._compute}/compute/v1/projects/{quote(project or self._settings.project)}{quote(path)}"
        return self._send(method, url, deadline, why, query, body)

    def get(self, path: str, deadline: Deadline, *, why: str, project: str = "") -> ApiAnswer | None:
        """What is at `path` of the project, the config's unless it is named; None where nothing is."""
        try:
            return self.call("GET", path, deadline, why=why, project=project)
        except ApiFailure as failure:
            if failure.status == 404:
                return None
            raise

    def pages(self, path: str, deadline: Deadline, *, why: str, query: Mapping[str, str]) -> Iterator[ApiAnswer]:
        """Every page of a list."""
        token = ""
        for _ in range(MAX_PAGES):
            more = {"pageToken": token} if token else {}
            answer = self.call("GET", path, deadline, why=why, query={**query, **more})
            yield answer
            token = str(answer.body.get("nextPageToken") or "")
            if not token:
                return
        raise Unreachable(f"{why}: the list has no end")

    def granted(self, permissions: list[str], deadline: Deadline, *, why: str) -> list[str]:
        """Those of the permissions that the credentials have in the project."""
        url = f"{self._resource_manager}/v1/projects/{quote(self._settings.project)}:testIamPermissions"
        answer = self._send("POST", url, deadline, why, None, {"permissions": permissions})
        return [str(one) for one in answer.body.get("permissions") or ()]

    def source_of_credentials(self) -> str:
        """Where the credentials come from and whose they are, in words."""
        settings = self._settings
        if settings.anonymous:
            return "no credentials (anonymous: true)"
        self._open()
        who = getattr(self._credentials, "service_account_email", None) or getattr(self._credentials, "account", "")
        of = f" of {who}" if who and who != "default" else ""
        if settings.credentials_file is None:
            return f"Application Default Credentials{of}"
        path = Path(settings.credentials_file).expanduser()
        others = " (others can read it: chmod 600)" if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) else ""
        return f"the file {settings.credentials_file}{of}{others}"

    # ------------------------------------------------------------------ sending

    def _send(
        self,
        method: str,
        url: str,
        deadline: Deadline,
        why: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> ApiAnswer:
        self._open()
        data = None if body is None else json.dumps(body, sort_keys=True).encode()
        with _translated(why):
            status, found, at = self._exchange(method, url, deadline, why, query, data)
            if status == 401 and not self._settings.anonymous:
                with self._lock:  # a key that was withdrawn before its time: a new one, once
                    self._credentials.token = None
                status, found, at = self._exchange(method, url, deadline, why, query, data)
        if status >= 300:
            raise ApiFailure.of(status, found)
        if not isinstance(found, dict):
            raise Unreachable(f"{why}: Google answered with something that is not JSON")
        return ApiAnswer(found, at)

    def _exchange(
        self, method: str, url: str, deadline: Deadline, why: str, query: Mapping[str, str] | None, data: bytes | None
    ) -> tuple[int, Any, float]:
        headers = {"Content-Type": "application/json", "X-Goog-Request-Reason": f"distributed-grid {why}"}
        self._authorize(method, url, headers, deadline.left(why))
        with self._session.request(
            method,
            url,
            params=query,
            data=data,
            headers=headers,
            timeout=min(REQUEST_SECONDS, deadline.left(why)),
            allow_redirects=False,
            stream=True,
        ) as response:
            text = bytearray()
            for chunk in response.iter_content(1 << 16):
                text += chunk
                deadline.left(why)
                if len(text) > MAX_ANSWER_BYTES:
                    raise Unreachable(f"{why}: the answer is larger than {MAX_ANSWER_BYTES >> 20} MB")
            return response.status_code, _parsed(bytes(text)), _date_of(response.headers.get("Date"))

    def _authorize(self, method: str, url: str, headers: dict[str, str], seconds: float) -> None:
        if self._settings.anonymous:
            return
        from google.auth.transport.requests import Request

        request = Request(self._session)

        def bounded(*arguments: Any, **options: Any) -> Any:
            return request(*arguments, **{**options, "timeout": min(REQUEST_SECONDS, seconds)})

        with self._lock:
            self._credentials.before_request(bounded, method, url, headers)

    # ------------------------------------------------------------------ opening

    def _open(self) -> None:
        """Load the library and the credentials, once."""
        with self._lock:
            if self._session is not None:
                return
            try:
                import google.auth  # noqa: F401
                import requests.adapters
            except ImportError:
                wanted = "google-auth and requests"
                raise BadInput(f"gcp needs the packages {wanted}: pip install 'distributed-grid[gcp]'") from None
            logging.getLogger("google").setLevel(logging.INFO)  # at DEBUG it logs what it sends, tokens included
            if not self._settings.anonymous:
                self._credentials = _load_credentials(self._settings)
            session = requests.Session()
            session.trust_env = urlsplit(self._compute).hostname not in LOOPBACK  # no proxy on the way to this machine
            adapter = requests.adapters.HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)
            session.mount("https://", adapter)
            session.mount("http://", adapter)
            self._session = session


def _load_credentials(settings: GcpSettings) -> Any:
    """The credentials of the file, or those that Google's own libraries would find."""
    import google.auth
    import google.auth.exceptions

    name = settings.credentials_file
    try:
        if name is None:
            return google.auth.default(scopes=SCOPES)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks whether the file is from a stranger: it is from the config
            path = str(Path(name).expanduser())
            return google.auth.load_credentials_from_file(path, scopes=SCOPES)[0]  # type: ignore[no-untyped-call]
    except google.auth.exceptions.DefaultCredentialsError:
        where = f"providers.gcp.credentials_file: {name}" if name else "no Application Default Credentials: set"
        hint = "cannot be used as credentials" if name else "credentials_file, or GOOGLE_APPLICATION_CREDENTIALS"
        raise Refused(f"{where} {hint}") from None  # what the library says may quote the file
    except (OSError, ValueError) as failure:
        raise Refused(f"the credentials of gcp cannot be read: {type(failure).__name__}") from None


@contextlib.contextmanager
def _translated(why: str) -> Iterator[None]:
    """Errors of the libraries as errors of the grid."""
    import google.auth.exceptions
    import requests.exceptions

    try:
        yield
    except google.auth.exceptions.RefreshError as failure:
        _raise_refresh(failure, why)
    except google.auth.exceptions.TransportError as failure:
        raise Unreachable(f"{why}: Google's service of tokens did not answer: {_cause(failure)}") from None
    except google.auth.exceptions.GoogleAuthError as failure:
        raise Refused(f"{why}: the credentials cannot be used: {type(failure).__name__}") from None
    except (requests.exceptions.RequestException, OSError) as failure:
        raise Unreachable(f"{why}: no answer from Google: {_cause(failure)}") from None


def _raise_refresh(failure: Any, why: str) -> NoReturn:
    if failure.retryable:
        raise Unreachable(f"{why}: Google's service of tokens failed") from None
    said = one_line(str(failure.args[0])) if failure.args else ""
    raise Refused(f"{why}: Google does not accept the credentials: {said}") from None


def _cause(failure: BaseException) -> str:
    """The error of the system that the library has wrapped, several times; never the URL or what was sent."""
    found: BaseException | None = failure
    for _ in range(10):
        if found is None:
            break
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return type(failure).__name__


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text or b"{}")
    except ValueError:
        return None


def _date_of(header: str | None) -> float:
    """The time of an answer; this machine's where it does not say."""
    try:
        return parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return time.time()
