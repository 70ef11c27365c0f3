"""Where the checkout is that the tests run in."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
