"""Data sets: sources, arrays in memory, and partitions over devices."""

from freshet.data.dataset import DataSet, check, from_arrays
from freshet.data.partition import SCHEMES, Skew, label_counts, partition, skew
from freshet.data.sources import CheckRow, DataSetInfo, LocalCopy, available, digest, load, locate, obtain, verify

__all__ = [
    "SCHEMES",
    "CheckRow",
    "DataSet",
    "DataSetInfo",
    "LocalCopy",
    "Skew",
    "available",
    "check",
    "digest",
    "from_arrays",
    "label_counts",
    "load",
    "locate",
    "obtain",
    "partition",
    "skew",
    "verify",
]
