"""Replay of traces under candidate policies, with statistics and a chart."""
