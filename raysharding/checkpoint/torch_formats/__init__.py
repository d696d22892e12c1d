"""torch's own files: state dicts in .bin, checkpoints of torch.distributed.checkpoint."""

from raysharding.checkpoint.torch_formats.dcp_metadata import METADATA_NAME, DcpMetadata, Path
from raysharding.checkpoint.torch_formats.dcp_reader import PIECE_BYTES, DcpReader
from raysharding.checkpoint.torch_formats.state_dict_file import read_state_dict
