"""torch's own files: state dicts in .bin, checkpoints of torch.distributed.checkpoint."""

from raysharding.checkpoint.torch_formats.dcp_metadata import METADATA_NAME as METADATA_NAME
from raysharding.checkpoint.torch_formats.dcp_metadata import DcpMetadata as DcpMetadata
from raysharding.checkpoint.torch_formats.dcp_reader import PIECE_BYTES as PIECE_BYTES
from raysharding.checkpoint.torch_formats.dcp_reader import DcpReader as DcpReader
from raysharding.checkpoint.torch_formats.state_dict_file import read_state_dict as read_state_dict
