"""What must happen whether or not anybody asks: releasing orphaned claims, emptying, vacuum, gauges."""

from omnara.maintenance.emptying import Emptying
from omnara.maintenance.orphans import OrphanSweep
from omnara.maintenance.upkeep import Upkeep

__all__ = ["Emptying", "OrphanSweep", "Upkeep"]
