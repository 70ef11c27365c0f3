"""The words that the control plane and its Ray child both use."""

AWAY = "away: "
"""What a problem begins with that is no refusal: nobody knows what became of it."""
