"""Answers of the control plane as its clients read them."""

from __future__ import annotations

import json
from typing import Any

from distributed_grid.client.conversation import decode_answer


def records(fields: object) -> Any:
    """JSON values whose objects have their fields as attributes, too."""
    return decode_answer(json.dumps(fields))
