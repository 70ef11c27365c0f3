"""The queue of waiting requests: order, fair share, quotas, backfill, start estimates."""
