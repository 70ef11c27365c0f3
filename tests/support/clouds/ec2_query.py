"""EC2's query protocol for its stand-in: forms that are asked, answers in XML, and moto, which knows most of both."""

from __future__ import annotations

import functools
import io
import os
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode
from xml.sax.saxutils import escape

from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS

REGION = "us-west-2"
XML = "{http://ec2.amazonaws.com/doc/2016-11-15}"
Form = dict[str, str]
Answer = tuple[int, bytes]


@functools.cache
def _moto() -> Any:
    """moto's EC2 as a WSGI application, one for the process."""
    os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    from moto.moto_server.werkzeug_app import create_backend_app

    return create_backend_app("ec2")


def ask_moto(form: Form, account: str) -> Answer:
    """What moto answers about an account."""
    body = urlencode({"Version": "2016-11-15", **form}).encode()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/",
        "SERVER_NAME": f"ec2.{REGION}.amazonaws.com",
        "SERVER_PORT": "80",
        "HTTP_HOST": f"ec2.{REGION}.amazonaws.com",
        "HTTP_AUTHORIZATION": f"AWS4-HMAC-SHA256 Credential=key/20260101/{REGION}/ec2/aws4_request",
        "HTTP_X_MOTO_ACCOUNT_ID": account,
        "CONTENT_TYPE": "application/x-www-form-urlencoded; charset=utf-8",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "wsgi.url_scheme": "http",
        "wsgi.errors": io.StringIO(),
    }
    status: list[int] = []
    answer = _moto()(environ, lambda text, headers, *rest: status.append(int(text.split()[0])))
    return status[0], b"".join(answer)


def forget_account(account: str) -> None:
    """Have moto know nothing of an account any more."""
    from moto.ec2.models import ec2_backends

    ec2_backends.pop(account, None)


def error_answer(status: int, code: str, message: str) -> Answer:
    error = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return status, f"<Response><Errors>{error}</Errors><RequestID>r-1</RequestID></Response>".encode()


def result_answer(action: str, inside: str) -> Answer:
    return 200, f'<{action}Response xmlns="{XML[1:-1]}"><requestId>r-1</requestId>{inside}</{action}Response>'.encode()


def request_item(name: str, found: Form) -> str:
    tags = "".join(
        f"<item><key>{escape(key)}</key><value>{escape(found[key])}</value></item>"
        for key in (DOTTED_TAGS.worker, DOTTED_TAGS.grid)
    )
    inside = f"<instanceId>{found['instance']}</instanceId>" if "instance" in found else ""
    return (
        f"<item><spotInstanceRequestId>{name}</spotInstanceRequestId><state>{found['state']}</state>{inside}"
        f"<tagSet>{tags}</tagSet></item>"
    )


def values_prefix(form: Form, name: str) -> str:
    """How the names of a filter's values begin."""
    for key, value in form.items():
        if key.startswith("Filter.") and key.endswith(".Name") and value == name:
            return f"{key[: -len('Name')]}Value."
    return "\0"


def filter_values(form: Form) -> Form:
    """The first value of each filter, by its name."""
    named = {key: value for key, value in form.items() if key.startswith("Filter.") and key.endswith(".Name")}
    return {value: form.get(f"{key[: -len('Name')]}Value.1", "") for key, value in named.items()}


def instance_tags(form: Form) -> Form:
    prefix = "TagSpecification.1.Tag."
    keys = {name: value for name, value in form.items() if name.startswith(prefix) and name.endswith(".Key")}
    return {value: form[f"{name[: -len('Key')]}Value"] for name, value in keys.items()}


def time_text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
