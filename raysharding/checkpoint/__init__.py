"""What is in the files: headers and index to validated `TensorInfo`s, byte reads, and standard files written back."""

from raysharding.checkpoint.checkpoint import Checkpoint, CheckpointFile, identify, identify_files, open_checkpoint
from raysharding.checkpoint.checksum import Checksums
from raysharding.checkpoint.commit import (
    StagedDirectory,
    check_destination,
    commit_files,
    commit_staging,
    create_staging,
    make_directory,
    remove_staging,
)
from raysharding.checkpoint.dcp import DcpReader
from raysharding.checkpoint.dcp_metadata import DcpMetadata, DcpTensor, DcpValue, read_dcp_metadata
from raysharding.checkpoint.file_plan import (
    file_names,
    file_order,
    make_folder,
    plan_files,
    write_file,
    write_index,
)
from raysharding.checkpoint.manifest import Manifest, check_manifest, mismatches, read_manifest, write_manifest
from raysharding.checkpoint.mounts import file_system_type
from raysharding.checkpoint.names import ADAPTER_NAME, INDEX_NAME, MANIFEST_NAME, SINGLE_NAME
from raysharding.checkpoint.object_commit import is_left_over
from raysharding.checkpoint.reader import FileReader
from raysharding.checkpoint.retention import (
    check_numbered,
    is_checkpoint,
    newest_after,
    remove_left_overs,
    remove_older,
    remove_unfinished,
)
from raysharding.checkpoint.save_record import SaveRecord, read_save_record
from raysharding.checkpoint.staging import new_token, staging_path
from raysharding.checkpoint.state_dict_file import read_state_dict
from raysharding.checkpoint.tensor_info import TensorInfo
from raysharding.checkpoint.torch_file import TorchFileWriter
from raysharding.checkpoint.writer import FileWriter

__all__ = [
    "ADAPTER_NAME",
    "INDEX_NAME",
    "MANIFEST_NAME",
    "SINGLE_NAME",
    "Checkpoint",
    "CheckpointFile",
    "Checksums",
    "DcpMetadata",
    "DcpReader",
    "DcpTensor",
    "DcpValue",
    "FileReader",
    "FileWriter",
    "Manifest",
    "SaveRecord",
    "StagedDirectory",
    "TensorInfo",
    "TorchFileWriter",
    "check_destination",
    "check_manifest",
    "check_numbered",
    "commit_files",
    "commit_staging",
    "create_staging",
    "file_names",
    "file_order",
    "file_system_type",
    "identify",
    "identify_files",
    "is_checkpoint",
    "is_left_over",
    "make_directory",
    "make_folder",
    "mismatches",
    "new_token",
    "newest_after",
    "open_checkpoint",
    "plan_files",
    "read_dcp_metadata",
    "read_manifest",
    "read_save_record",
    "read_state_dict",
    "remove_left_overs",
    "remove_older",
    "remove_staging",
    "remove_unfinished",
    "staging_path",
    "write_file",
    "write_index",
    "write_manifest",
]
