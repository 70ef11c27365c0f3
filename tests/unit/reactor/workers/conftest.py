"""Providers with a queue, closed when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.reactor.workers.queue_model import QueueModel


@pytest.fixture
def make_queue() -> Iterator[Callable[[float], QueueModel]]:
    models: list[QueueModel] = []

    def made(wait_seconds: float) -> QueueModel:
        models.append(QueueModel(wait_seconds))
        return models[-1]

    yield made
    for model in models:
        model.stand_in.close()


@pytest.fixture
def queue(make_queue: Callable[[float], QueueModel]) -> QueueModel:
    """A queue of three hours; a worker has two cores for an hour."""
    return make_queue(3 * 3600)
