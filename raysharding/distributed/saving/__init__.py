"""Module, optimizer and run into files."""

from raysharding.distributed.saving.async_save import AsyncSaver, BackgroundSave
from raysharding.distributed.saving.merge_dcp import merge_checkpoint, merge_fsdp_weights, skipped_line
from raysharding.distributed.saving.optimizer_files import OptimizerLoad, has_optimizer_state, load_optimizer_state
from raysharding.distributed.saving.save import Destination, SaveReport, begin_save, save_checkpoint
from raysharding.distributed.saving.training_state import load_training, random_state, restore_random_state, run_of

__all__ = [
    "AsyncSaver",
    "BackgroundSave",
    "Destination",
    "OptimizerLoad",
    "SaveReport",
    "begin_save",
    "has_optimizer_state",
    "load_optimizer_state",
    "load_training",
    "merge_checkpoint",
    "merge_fsdp_weights",
    "random_state",
    "restore_random_state",
    "run_of",
    "save_checkpoint",
    "skipped_line",
]
