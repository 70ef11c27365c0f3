"""Credentials are taken out of errors, answers and log lines, and nothing else of them changes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerInstance, WorkerOffer
from distributed_grid.server.daemon import TEXT_FORMAT, JsonFormatter
from distributed_grid.server.workers.provider_calls import ProviderCalls
from distributed_grid.server.workers.provider_registry import CredentialMask, MaskedLog
from tests.support.scripted_provider import ScriptedProvider

SECRET = 'top"secret'
MASK = CredentialMask([SECRET, "top"])


class StubbornError(Throttled):
    """An error of another package that says the same whatever its arguments are."""

    def __str__(self) -> str:
        return f"slow down, {SECRET}"


@pytest.mark.parametrize("kind", [Throttled, Unreachable, Refused, NoCapacity])
def test_an_error_keeps_its_class_and_loses_what_led_to_it(kind: type[GridError]) -> None:
    async def scenario() -> GridError:
        provider = ScriptedProvider({"state_file": Path("unused")})
        calls = ProviderCalls(provider, seconds=10, mask=MASK)

        def fail() -> None:
            try:
                raise ValueError(SECRET)
            except ValueError as failure:
                raise kind(f"no, {SECRET}") from failure

        with pytest.raises(kind) as found:
            await calls.call("fail", fail)
        return found.value

    found = asyncio.run(scenario())
    assert (type(found), str(found)) == (kind, "no, ***")
    assert found.__cause__ is None
    assert found.__suppress_context__
    assert SECRET not in repr(found)


def test_reasons_and_scopes_are_masked_too() -> None:
    refused = MASK.error(Refused("no", [f"because of {SECRET}"]))
    assert isinstance(refused, Refused)
    assert refused.reasons == ("because of ***",)
    short = MASK.error(NoCapacity("no", f"zone:{SECRET}"))
    assert isinstance(short, NoCapacity)
    assert short.scope == "zone:***"


def test_an_error_that_cannot_be_changed_is_replaced() -> None:
    found = MASK.error(StubbornError())
    assert str(found) == "slow down, ***"
    assert found.retryable


def test_answers_are_masked_where_they_are_text() -> None:
    machine = WorkerInstance("worker-1", "grid-1", "i-1", "running", detail=f"with {SECRET}")
    offer = WorkerOffer("small", "cpu", WorkerResources(1000), unavailable=f"{SECRET} is refused")
    assert MASK.answer([machine])[0].detail == "with ***"
    assert MASK.answer((offer,))[0].unavailable == "*** is refused"
    assert MASK.answer(None) is None


@pytest.mark.parametrize("formatter", [logging.Formatter(TEXT_FORMAT), JsonFormatter()])
def test_log_lines_and_tracebacks_are_masked(formatter: logging.Formatter, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    handler.addFilter(MaskedLog(MASK))
    logger = logging.getLogger(__name__)
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.warning("it has %s, and %d more", SECRET, 2)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logger.exception("it broke")
    logger.warning("nothing %s about it", "secret")
    said = written.getvalue()
    assert "secret" not in said.replace("nothing secret", "")
    assert json.dumps(SECRET)[1:-1] not in said
    assert "it has ***, and 2 more" in said
    assert "ValueError: ***" in said
    assert "Traceback" in said


def test_what_is_too_short_or_not_there_masks_nothing() -> None:
    credentials = "{access_key_id: abc, secret_access_key: long-enough, session_token: '${NOT_SET_ANYWHERE}'}"
    config = ClusterConfig.from_text(f"name: x\nproviders: {{aws: {{region: us-east-1, credentials: {credentials}}}}}")
    mask = CredentialMask.of_providers(config)
    assert mask.text("abc is a word, ${NOT_SET_ANYWHERE} is a name") == "abc is a word, ${NOT_SET_ANYWHERE} is a name"
    assert mask.text("long-enough") == "***"
