"""Rows: their sources, order and distribution over ranks, and the files of `predict`. No collectives, no Ray.

The batch of a step depends on data, batch size and seed, and not on the number of ranks.
"""

from raysharding.data.arrow_rows import (
    as_table,
    cast_table,
    check_whole,
    common_schema,
    has_unknown_type,
    in_order,
    join_tables,
    kind_of,
    mixed_types,
    same_columns,
    schema_as_text,
    schema_from_text,
    unify_schemas,
)
from raysharding.data.batches import (
    PartBatch,
    StepBatch,
    check_whole_items,
    epoch_batches,
    num_forwards,
    part_batches,
)
from raysharding.data.collate import KnownColumns, rank_batch
from raysharding.data.files import DataPath, RowFiles, hub_name, is_path, list_all_files, list_files
from raysharding.data.fingerprint import as_json, fingerprint, rows_fingerprint
from raysharding.data.order import Order, Position
from raysharding.data.parquet import ParquetFiles
from raysharding.data.part_files import Part, PartFiles, PartTable, PartWriter, cut_parts
from raysharding.data.prefetch import Prefetch
from raysharding.data.source import (
    BlockSource,
    Reader,
    Rows,
    SequenceRows,
    Stream,
    TableReader,
    key_types,
    plain,
    rows_of,
)
from raysharding.data.text_files import TEXT_SUFFIXES, TextFiles
