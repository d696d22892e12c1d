"""The format of a checkpoint: file names, headers, the index, checksums, tensors by name."""

from raysharding.checkpoint.format.checkpoint import (
    Checkpoint,
    CheckpointFile,
    identify,
    identify_files,
    open_checkpoint,
    open_config,
)
from raysharding.checkpoint.format.checksum import ALGORITHM, Checksums
from raysharding.checkpoint.format.header import (
    MAX_DIMS,
    MAX_HEADER_BYTES,
    header_sha256,
    is_text,
    parse_object,
)
from raysharding.checkpoint.format.index import MAX_JSON_BYTES, read_beside, read_json
from raysharding.checkpoint.format.locate import locate, seen_here
from raysharding.checkpoint.format.names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    EXTRA_STATE_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    OPTIMIZER_FOLDER,
    OPTIMIZER_NAME,
    SAVE_RECORD_NAME,
    SINGLE_NAME,
    TRAINING_FOLDER,
    TRAINING_NAME,
)
from raysharding.checkpoint.format.reader import FileReader
from raysharding.checkpoint.format.sidecars import Sidecars, is_sidecar_name, list_sidecar_files, read_sidecar
from raysharding.checkpoint.format.staging import (
    is_abandoned,
    lock,
    make_staging,
    new_token,
    renamed_staging,
    staged_name,
    staging_name,
    staging_path,
    unlock,
)
from raysharding.checkpoint.format.tensor_info import NAME_OF_DTYPE, TensorInfo
