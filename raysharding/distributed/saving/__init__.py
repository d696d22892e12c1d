"""Saving of module, optimizer and run, and loading of what a save holds beside the module."""

from raysharding.distributed.saving.async_save import AsyncSaver, BackgroundSave
from raysharding.distributed.saving.merge_dcp import merge_checkpoint, merge_fsdp_weights, skipped_line
from raysharding.distributed.saving.optimizer_state import OptimizerLoad, has_optimizer_state, load_optimizer_state
from raysharding.distributed.saving.save import Destination, SaveReport, begin_save, model_contents, save_checkpoint
from raysharding.distributed.saving.training_state import load_training, position_of, random_state, restore_random_state
