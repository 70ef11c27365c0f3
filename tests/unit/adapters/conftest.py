"""Small real disks to fill."""

from tests.support.small_disks import mount, small_disk

__all__ = ["mount", "small_disk"]
