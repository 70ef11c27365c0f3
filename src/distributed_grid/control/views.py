"""Answers without a type of their own."""

from __future__ import annotations

from typing import Any

View = dict[str, Any]
