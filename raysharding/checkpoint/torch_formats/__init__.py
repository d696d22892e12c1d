"""torch's own files: state dicts in .bin, checkpoints of torch.distributed.checkpoint."""

from raysharding.checkpoint.torch_formats.dcp_metadata import (
    METADATA_NAME,
    DcpMetadata,
    DcpTensor,
    DcpValue,
    read_dcp_metadata,
)
from raysharding.checkpoint.torch_formats.dcp_reader import DcpReader
from raysharding.checkpoint.torch_formats.state_dict_file import read_state_dict
from raysharding.checkpoint.torch_formats.torch_writer import TorchFileWriter

__all__ = [
    "METADATA_NAME",
    "DcpMetadata",
    "DcpReader",
    "DcpTensor",
    "DcpValue",
    "TorchFileWriter",
    "read_dcp_metadata",
    "read_state_dict",
]
