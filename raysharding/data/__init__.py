"""Training data: sources of rows, their order, and their distribution over ranks. No collectives, no Ray.

The batch of a step depends on data, batch size and seed, and not on the number of ranks; see `order.py`.
"""

from raysharding.data.arrow_rows import ArrowRows, TableReader
from raysharding.data.batches import StepBatch, epoch_batches
from raysharding.data.collate import Collate, KnownColumns, default_collate, rank_batch
from raysharding.data.column_kinds import check_whole, kind_of
from raysharding.data.files import DataPath, RowFiles, list_files
from raysharding.data.hub_rows import HubRows, hub_name
from raysharding.data.parquet import ParquetFiles
from raysharding.data.position import Position
from raysharding.data.prefetch import Prefetch
from raysharding.data.source import BlockSource, Reader, Rows, SequenceRows, Stream, rows_of
from raysharding.data.text_files import TEXT_SUFFIXES, TextFiles
