"""Deliveries as rows."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.deliveries import DeliveredFiles, Delivery, DeliveryEnd, FetchOrder
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row

DELIVERY = Delivery(
    job="u1", job_id="train", user="ana", node="gpu1", order=FetchOrder(("out/**",), "/data/ana"), began_at_ms=5
)


def test_a_delivery_is_alive_until_it_has_an_end() -> None:
    ledger = Ledger([DELIVERY])
    assert ledger.deliveries == {"u1": DELIVERY}
    assert not ledger.is_empty
    ledger.apply([replace(DELIVERY, end=DeliveryEnd.FAILED)])
    assert ledger.is_empty
    ledger.check()


def test_a_stored_delivery_is_read_again() -> None:
    files = DeliveredFiles(
        directory="/data/ana", files=2, bytes=7, beside=(("a", "a.from-train"),), protected=(".git/config",)
    )
    ended = replace(DELIVERY, delivered=files, end=DeliveryEnd.DELIVERED, ended_at_ms=9)
    assert decode_row(Delivery.kind, encode_row(ended)) == ended
