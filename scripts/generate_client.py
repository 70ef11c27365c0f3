"""Write the typed client from the endpoint table: the stub `client/operations.pyi`, and the names in `operations.py`.

scripts/generate_client.py           write both files
scripts/generate_client.py --check   fail where one of them is not current
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import NODEFAULT, Struct, structs

from distributed_grid.client import conversation
from distributed_grid.server.daemon import SERVICES
from distributed_grid.server.endpoints import Kind, ServiceEndpoint, endpoints_of

RUNTIME = Path(conversation.__file__).with_name("operations.py")
STUB = RUNTIME.with_suffix(".pyi")
MARK = "# Generated below this line.\n"
MAX_COLUMNS = 105  # of the names on a line
MAX_PARAMETERS = 5  # of a method; the fields of a longer request are a TypedDict, which both clients share
HEAD = '''\
"""Signatures of the requests: written by `scripts/generate_client.py` from the endpoint table."""
# ruff: noqa: A002

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, Required, TypedDict, Unpack

from distributed_grid.client.conversation import Part, JsonObject
'''
BLOCKING = '''\
class Operations:
    """Every request of the control plane as a method of a blocking client."""

    def call(self, op: str, **arguments: Any) -> JsonObject: ...
    def stream(self, op: str, **arguments: Any) -> Iterator[tuple[bytes, Part]]: ...
'''
ASYNCHRONOUS = '''\
class AsyncOperations:
    """Every request of the control plane as a method of an asyncio client."""

    async def call(self, op: str, **arguments: Any) -> JsonObject: ...
    def stream(self, op: str, **arguments: Any) -> AsyncIterator[tuple[bytes, Part]]: ...
'''
REPLACED = {tuple: Sequence, list: Sequence, dict: Mapping}


def main() -> int:
    endpoints = [one for one in endpoints_of(*SERVICES) if one.on_socket and one.op != "hello"]
    endpoints.sort(key=lambda endpoint: endpoint.op)
    code = RUNTIME.read_text(encoding="utf-8").partition(MARK)[0]
    texts = {RUNTIME: formatted(code + MARK + names(endpoints), RUNTIME), STUB: formatted(stub(endpoints), STUB)}
    outdated = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in outdated:
        if "--check" in sys.argv:
            print(f"{path.name} is not current; type: .venv/bin/python scripts/generate_client.py", file=sys.stderr)
        else:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if outdated and "--check" in sys.argv else 0


def formatted(text: str, path: Path) -> str:
    ruff = str(Path(sys.executable).with_name("ruff"))
    for arguments in (["check", "--quiet", "--fix-only", "--select=I,F401"], ["format"]):
        command = [ruff, *arguments, f"--stdin-filename={path}", "-"]
        text = subprocess.run(command, input=text, text=True, check=True, capture_output=True).stdout
    return text


def names(endpoints: Sequence[ServiceEndpoint]) -> str:
    """The names of the requests that the runtime needs, by the way they are sent."""
    sets = {
        "STREAMS": [endpoint.op for endpoint in endpoints if endpoint.kind is Kind.STREAM],
        "PROGRESS": [endpoint.op for endpoint in endpoints if endpoint.kind is Kind.PROGRESS],
        "KEEPING_CONFIG": [endpoint.op for endpoint in endpoints if endpoint.keeps_config],
        "STARTING": [endpoint.op for endpoint in endpoints if not endpoint.keeps_config],
    }
    lines = "".join(f"{name} = frozenset({{\n{wrapped(ops)}}})\n" for name, ops in sets.items())
    return f"{lines}OPERATIONS = KEEPING_CONFIG | STARTING\n"


def wrapped(ops: Collection[str]) -> str:
    """The names as elements of a set, several on a line."""
    lines = textwrap.wrap(" ".join(f'"{op}",' for op in ops), MAX_COLUMNS)
    return "".join(f"*({line.removesuffix(',') if ' ' in line else line}),\n" for line in lines)


def stub(endpoints: Sequence[ServiceEndpoint]) -> str:
    imports: set[tuple[str, str]] = set()
    long = [endpoint.request for endpoint in endpoints if is_long(endpoint.request)]
    fields = "\n".join(field_class(request, imports) for request in long)
    methods = [method(endpoint, imports, is_async=False) for endpoint in endpoints]
    coroutines = [method(endpoint, imports, is_async=True) for endpoint in endpoints]
    lines = "".join(f"from {module} import {name}\n" for module, name in sorted(imports))
    constants = "OPERATIONS: frozenset[str]\n\ndef keeps_config(op: str) -> bool: ...\n"
    return HEAD + lines + constants + fields + BLOCKING + "".join(methods) + ASYNCHRONOUS + "".join(coroutines)


def is_long(request: type[Struct]) -> bool:
    return len(request.__struct_fields__) > MAX_PARAMETERS


def field_class(request: type[Struct], imports: set[tuple[str, str]]) -> str:
    """The fields of a long request as a TypedDict."""
    lines = [f"class {request.__name__}Fields(TypedDict):\n"]
    for name, type_text, is_required in parameters(request, imports):
        lines.append(f"    {name}: {type_text if is_required else f'NotRequired[{type_text}]'}\n")
    return "".join(lines)


def method(endpoint: ServiceEndpoint, imports: set[tuple[str, str]], *, is_async: bool) -> str:
    """The signature of one request."""
    arguments = ["self"]
    if endpoint.kind is Kind.PROGRESS:
        step = typing.get_args(typing.get_type_hints(endpoint.function)["report"])[0][0]
        arguments.append(f"report: Callable[[{text_of(step, imports)}], object]")
    if is_long(endpoint.request):
        arguments.append(f"**fields: Unpack[{endpoint.request.__name__}Fields]")
    elif fields := list(parameters(endpoint.request, imports)):
        arguments.append("*")
        arguments += (f"{name}: {kind}" + ("" if is_required else " = ...") for name, kind, is_required in fields)
    if endpoint.kind is Kind.STREAM:
        answer = f"{'Async' if is_async else ''}Iterator[tuple[bytes, Part]]"
    else:
        answer = text_of(endpoint.answer, imports)
    define = "async def" if is_async and endpoint.kind is not Kind.STREAM else "def"
    return f"    {define} {endpoint.op}({', '.join(arguments)}) -> {answer}: ...\n"


def parameters(request: type[Struct], imports: set[tuple[str, str]]) -> Iterator[tuple[str, str, bool]]:
    """Name and type of each field of a request, and whether it is required."""
    for field in structs.fields(request):
        is_required = field.default is NODEFAULT and field.default_factory is NODEFAULT
        yield field.encode_name, text_of(field.type, imports, accepts=True), is_required


def text_of(kind: Any, imports: set[tuple[str, str]], *, accepts: bool = False) -> str:
    """A type as source text; one that a method `accepts` is the abstract type of its container."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(text_of(one, imports, accepts=accepts) for one in arguments)
    if origin is not None:
        container = REPLACED.get(origin, origin) if accepts else origin
        inner = [text_of(one, imports, accepts=accepts) for one in arguments if one is not ...]
        return f"{container.__name__}[{', '.join(inner)}]"
    if kind is type(None):
        return "None"
    if kind is Any:
        return "Any"
    if kind.__module__ != "builtins":
        imports.add((kind.__module__, kind.__name__))
    return str(kind.__name__)


if __name__ == "__main__":
    sys.exit(main())
