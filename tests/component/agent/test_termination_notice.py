"""Notices of clouds, read over real HTTP from a stand-in of the metadata services; also from ones that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from distributed_grid.agent.machine_end import (
    Ec2Notices,
    GceNotices,
    MetadataClient,
    MetadataFailed,
    NoticeSource,
    notice_source,
)
from distributed_grid.errors import BadInput
from distributed_grid.wire import AnnouncedEnd
from tests.support.clouds.metadata import (
    MAINTENANCE,
    PREEMPTED,
    REBALANCE,
    SPOT_ACTION,
    MetadataStandIn,
    metadata_service,
)

SOURCES = ("aws", "gcp")


@pytest.fixture
def service() -> Iterator[MetadataStandIn]:
    with metadata_service() as found:
        yield found


def source_of(name: str, service: MetadataStandIn) -> NoticeSource:
    """The source of a cloud, with little patience."""
    client = MetadataClient(service.url, seconds=0.4)
    return {"aws": Ec2Notices, "gcp": GceNotices}[name](client)


def test_without_a_notice_ec2_says_nothing_and_one_token_serves_many_reads(service: MetadataStandIn) -> None:
    source = source_of("aws", service)
    assert [source.read() for _ in range(3)] == [None] * 3
    assert service.requests.count("PUT /latest/api/token") == 1


def test_a_spot_notice_says_what_happens_and_in_how_long(service: MetadataStandIn) -> None:
    source = source_of("aws", service)
    assert source.read() is None
    service.interrupt(100, "stop")
    said = source.read()
    assert said is not None
    assert said.why == "EC2 spot notice (stop)"
    assert said.ends_in_ms is not None
    assert 90_000 < said.ends_in_ms <= 101_000
    service.expire_tokens()
    service.interrupted = None
    assert source.read() is not None, "a token that has run out is renewed"


def test_a_recommendation_to_move_away_has_no_time(service: MetadataStandIn) -> None:
    service.say(REBALANCE, json.dumps({"noticeTime": "2030-01-01T00:00:00Z"}))
    said = source_of("aws", service).read()
    assert said == AnnouncedEnd("EC2 recommends to move away from this spot instance")


@pytest.mark.parametrize(
    ("time", "least", "most"),
    [
        ("1970-01-01T00:00:00Z", 0, 0),
        ("9999-12-31T23:59:59Z", 120_000, 120_000),  # more than EC2 ever gives
    ],
)
def test_a_time_that_cannot_be_is_bounded(service: MetadataStandIn, time: str, least: int, most: int) -> None:
    service.say(SPOT_ACTION, json.dumps({"action": "terminate" * 1000, "time": time}))
    said = source_of("aws", service).read()
    assert said is not None
    assert said.ends_in_ms is not None
    assert least <= said.ends_in_ms <= most
    assert len(said.why) < 100


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "{}", '{"action": "stop"}', '{"action": 1, "time": 5}', "[" * 10_000, '{"time": "x"}']
)
def test_a_spot_notice_that_makes_no_sense_says_nothing(service: MetadataStandIn, text: str) -> None:
    service.say(SPOT_ACTION, text)
    with pytest.raises(MetadataFailed):
        source_of("aws", service).read()


def test_preemption_by_compute_engine_counts_from_when_it_was_first_read(service: MetadataStandIn) -> None:
    times = iter([0.0, 0.0, 10.0, 40.0])
    source = GceNotices(MetadataClient(service.url), lambda: next(times))
    assert source.read() is None
    service.say(PREEMPTED, "TRUE")
    ends = [source.read() for _ in range(2)]
    assert ends[0] == AnnouncedEnd("Compute Engine preempts this machine", 25_000)
    assert ends[1] is not None
    assert ends[1].ends_in_ms == 0


def test_maintenance_of_compute_engine_may_be_called_off(service: MetadataStandIn) -> None:
    source = source_of("gcp", service)
    service.say(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert source.read() is None, "it goes on elsewhere by itself"
    service.say(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    said = source.read()
    assert said is not None
    assert said.why == "Compute Engine stops this machine for maintenance"
    service.say(MAINTENANCE, "NONE")
    assert source.read() is None


@pytest.mark.parametrize("mood", ["slow", "silent", "huge", "redirect", "broken", "refuse"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_service_that_misbehaves_says_nothing_and_is_read_again(
    service: MetadataStandIn, name: str, mood: str
) -> None:
    source = source_of(name, service)
    service.mood = mood
    with pytest.raises(MetadataFailed):
        source.read()
    assert "GET /elsewhere" not in service.requests, "redirects are not followed"
    service.mood = ""
    assert source.read() is None


@pytest.mark.parametrize("name", SOURCES)
def test_nobody_there_says_nothing(name: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        source = notice_source({"GRID_NOTICE_SOURCE": name, "GRID_METADATA_URL": url})
        assert source is not None
        with pytest.raises(MetadataFailed):
            source.read()


def test_a_proxy_of_the_environment_is_not_asked(service: MetadataStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert source_of("gcp", service).read() is None


def test_the_environment_names_the_source() -> None:
    assert notice_source({}) is None
    assert isinstance(notice_source({"GRID_NOTICE_SOURCE": "gcp"}), GceNotices)
    with pytest.raises(BadInput, match=r"GRID_NOTICE_SOURCE is 'azure': expected aws or gcp"):
        notice_source({"GRID_NOTICE_SOURCE": "azure"})
    for url in ("https://x", "ftp://x", "nothing", "http://x:99999999"):
        with pytest.raises(BadInput, match="GRID_METADATA_URL"):
            notice_source({"GRID_NOTICE_SOURCE": "aws", "GRID_METADATA_URL": url})
