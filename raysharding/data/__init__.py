"""Rows to train on: where they are, in which order they come, and which rank takes which. No collectives, no Ray.

What a step is fed depends on data, batch size and seed alone, never on the number of ranks: `order.py` says how.
"""

from raysharding.data.arrow_rows import ArrowRows
from raysharding.data.batches import StepBatch, epoch_batches
from raysharding.data.collate import Collate, Collator, default_collate
from raysharding.data.column_kinds import check_whole, kind_of
from raysharding.data.parquet import ParquetFiles, ParquetPath
from raysharding.data.position import Position
from raysharding.data.prefetch import Prefetch
from raysharding.data.source import BlockSource, Reader, Rows, SequenceRows, Stream, rows_of

__all__ = [
    "ArrowRows",
    "BlockSource",
    "Collate",
    "Collator",
    "ParquetFiles",
    "ParquetPath",
    "Position",
    "Prefetch",
    "Reader",
    "Rows",
    "SequenceRows",
    "StepBatch",
    "Stream",
    "check_whole",
    "default_collate",
    "epoch_batches",
    "kind_of",
    "rows_of",
]
