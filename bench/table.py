"""Table of results, one line a measurement: what, how much, the bar, and the ratio to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A measured figure and its bar (0: none); `lower_is_better` says which side of the bar is good."""

    what: str
    value: float
    bar: float
    unit: str
    lower_is_better: bool = False

    @property
    def ratio(self) -> float:
        """How many times better than the bar; below 1 the bar is missed."""
        if not self.value or not self.bar:
            return float("inf")
        return self.bar / self.value if self.lower_is_better else self.value / self.bar


def render(lines: list[Line]) -> str:
    """The table, with a verdict on each line."""
    rows = [("measured", "value", "bar", "times the bar", "")]
    for line in lines:
        sign = "≤" if line.lower_is_better else "≥"
        value = f"{line.value:,.2f} {line.unit}" if line.value < 100 else f"{line.value:,.0f} {line.unit}"
        if not line.bar:
            rows.append((line.what, value, "none", "", ""))
            continue
        verdict = "met" if line.ratio >= 1 else "MISSED"
        rows.append((line.what, value, f"{sign} {line.bar:,g} {line.unit}", f"{line.ratio:.1f}", verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
