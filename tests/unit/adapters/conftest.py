"""Small real disks to fill."""

from tests.support.disk_fixtures import mount, small_disk

__all__ = ["mount", "small_disk"]
