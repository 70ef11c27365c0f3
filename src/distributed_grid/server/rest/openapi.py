"""OpenAPI document of REST, from the routes, request types and answer types of its operations."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from distributed_grid import __version__
from distributed_grid.api.answers.common import ErrorAnswer
from distributed_grid.server.endpoints import Route

ABOUT = "Lends what is idle on your machines, for a while. Field names, once shipped, do not change."
JSON = "application/json"
BEARER = {"type": "http", "scheme": "bearer", "description": "A token: `grid daemon token create`, or the owner's own."}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string"},
    "description": "A request with the same key and body takes effect once.",
}
REFERENCE = "#/components/schemas/{name}"
Schema = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]


class Operation(Struct, frozen=True, kw_only=True):
    """An operation of REST, as it is served and described."""

    route: Route
    id: str
    description: str
    serve: Handler
    request: type[Struct] | None = None  # its fields are the parameters and the body
    answer: Any = None  # type of the answer in JSON
    content: Mapping[str, Schema] = {}  # schemas of another answer, by media type
    needs_token: bool = True

    @property
    def takes_id(self) -> bool:
        fields = self.request.__struct_fields__ if self.request is not None else ()
        return self.route.method == "POST" and self.route.id_field in fields


def openapi_document(operations: Sequence[Operation]) -> Schema:
    """The document of these operations, in version 3.1."""
    answers = {ErrorAnswer: None}
    for operation in operations:
        answers |= dict.fromkeys(_alternatives(operation.answer))
    schemas, components = msgspec.json.schema_components(answers, ref_template=REFERENCE)
    for component in components.values():  # an answer has its fields with a default, too
        fields: Schema = component.get("properties", {})
        constant = [name for name, schema in fields.items() if "default" in schema]
        component["required"] = [*component.get("required", ()), *constant]
        for name in constant:
            del fields[name]["default"]
    schema_of = dict(zip(answers, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for operation in operations:
        content = {media_type: {"schema": schema} for media_type, schema in operation.content.items()}
        if alternatives := [schema_of[answer] for answer in _alternatives(operation.answer)]:
            content[JSON] = {"schema": alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}}
        failure = {"schema": schema_of[ErrorAnswer]}
        description: Schema = {
            "tags": [operation.route.tag],
            "summary": operation.id.replace("_", " ").capitalize(),
            "description": inspect.cleandoc(operation.description),
            "operationId": operation.id,
            **_input(operation),
            "responses": {
                "200": {"description": "The answer.", "content": content},
                "default": {"description": "The reason of a failure.", "content": {JSON: failure}},
            },
        }
        if operation.needs_token:
            description["security"] = [{"HTTPBearer": []}]
        paths.setdefault(operation.route.path, {})[operation.route.method.lower()] = description
    return {
        "openapi": "3.1.0",
        "info": {"title": "grid", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"HTTPBearer": BEARER}},
    }


def _alternatives(answer: Any) -> tuple[Any, ...]:
    """The types of a union; msgspec makes no schema of several untagged structs."""
    if answer is None:
        return ()
    is_union = typing.get_origin(answer) in (typing.Union, types.UnionType)
    return typing.get_args(answer) if is_union else (answer,)


def _input(operation: Operation) -> Schema:
    """The parameters and the body of an operation."""
    if operation.request is None:
        return {}
    _, parts = msgspec.json.schema_components([operation.request], ref_template=REFERENCE)
    schema = parts[operation.request.__name__]
    route, fields = operation.route, operation.route.open_fields(operation.request)
    parameters = [
        _parameter(name, "path", {"minLength": 1, **schema["properties"][field]}, is_required=True)
        for name, field in route.path_fields.items()
    ]
    if route.method != "POST":
        required = schema.get("required", ())
        parameters += [
            _parameter(name, "query", schema["properties"][field], is_required=field in required)
            for name, field in fields.items()
        ]
        return {"parameters": parameters} if parameters else {}
    if operation.takes_id:
        parameters.append(IDEMPOTENCY_KEY)
    description: Schema = {"parameters": parameters} if parameters else {}
    if fields:
        body = {
            **schema,
            "properties": {name: schema["properties"][field] for name, field in fields.items()},
            "required": [name for name in schema.get("required", ()) if name in fields and name != route.id_field],
            "additionalProperties": False,
        }
        description["requestBody"] = {"required": bool(body["required"]), "content": {JSON: {"schema": body}}}
    return description


def _parameter(name: str, place: str, schema: Schema, *, is_required: bool) -> Schema:
    """A parameter of the path or the query, which has no null; one of the path has no default."""
    schema = {key: value for key, value in schema.items() if key != "default" or not (is_required or value is None)}
    if "enum" in schema:
        schema["enum"] = [value for value in schema["enum"] if value is not None]
    if "anyOf" in schema:
        (value,) = (part for part in schema.pop("anyOf") if part != {"type": "null"})
        schema |= value
    parameter: Schema = {"name": name, "in": place, "required": is_required, "schema": schema}
    if text := schema.pop("description", ""):
        parameter["description"] = text
    return parameter
