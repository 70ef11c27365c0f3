"""`ResourceBoostPersistence` under the import path that the boost guide uses."""

from distributed_grid.control.boost_file import ResourceBoostPersistence, StoredBoost

__all__ = ["ResourceBoostPersistence", "StoredBoost"]
