"""Checkpoint files: validated headers and index, reads of byte ranges, and writes of standard files."""

from raysharding.checkpoint.format import (
    Checkpoint,
    CheckpointFile,
    FileReader,
    TensorInfo,
    identify,
    identify_files,
    locate,
    open_checkpoint,
    open_config,
)
from raysharding.checkpoint.torch_formats import DcpReader, read_state_dict
from raysharding.checkpoint.writing import (
    Manifest,
    SaveRecord,
    check_manifest,
    mismatches,
    read_manifest,
    read_save_record,
)

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "DcpReader",
    "FileReader",
    "Manifest",
    "SaveRecord",
    "TensorInfo",
    "check_manifest",
    "identify",
    "identify_files",
    "locate",
    "mismatches",
    "open_checkpoint",
    "open_config",
    "read_manifest",
    "read_save_record",
    "read_state_dict",
]
