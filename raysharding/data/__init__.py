"""Training data: sources of rows, their order, and their distribution over ranks. No collectives, no Ray.

The batch of a step depends on data, batch size and seed, and not on the number of ranks; see `order.py`.
"""

from raysharding.data.arrow_rows import ArrowRows as ArrowRows
from raysharding.data.batches import StepBatch as StepBatch
from raysharding.data.batches import epoch_batches as epoch_batches
from raysharding.data.collate import Collate as Collate
from raysharding.data.collate import Collator as Collator
from raysharding.data.collate import default_collate as default_collate
from raysharding.data.column_kinds import check_whole as check_whole
from raysharding.data.column_kinds import kind_of as kind_of
from raysharding.data.parquet import ParquetFiles as ParquetFiles
from raysharding.data.parquet import ParquetPath as ParquetPath
from raysharding.data.position import Position as Position
from raysharding.data.prefetch import Prefetch as Prefetch
from raysharding.data.source import BlockSource as BlockSource
from raysharding.data.source import Reader as Reader
from raysharding.data.source import Rows as Rows
from raysharding.data.source import SequenceRows as SequenceRows
from raysharding.data.source import Stream as Stream
from raysharding.data.source import rows_of as rows_of
