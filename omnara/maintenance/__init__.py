"""What must happen whether or not anybody asks: releasing orphaned claims, vacuum, gauges."""

from omnara.maintenance.orphans import OrphanSweep
from omnara.maintenance.upkeep import Upkeep

__all__ = ["OrphanSweep", "Upkeep"]
