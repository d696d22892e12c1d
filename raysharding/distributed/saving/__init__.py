"""Saving of module, optimizer and run."""

from raysharding.distributed.saving.async_save import AsyncSaver as AsyncSaver
from raysharding.distributed.saving.async_save import BackgroundSave as BackgroundSave
from raysharding.distributed.saving.merge_dcp import merge_checkpoint as merge_checkpoint
from raysharding.distributed.saving.merge_dcp import merge_fsdp_weights as merge_fsdp_weights
from raysharding.distributed.saving.merge_dcp import skipped_line as skipped_line
from raysharding.distributed.saving.optimizer_files import OptimizerLoad as OptimizerLoad
from raysharding.distributed.saving.optimizer_files import has_optimizer_state as has_optimizer_state
from raysharding.distributed.saving.optimizer_files import load_optimizer_state as load_optimizer_state
from raysharding.distributed.saving.save import Destination as Destination
from raysharding.distributed.saving.save import SaveReport as SaveReport
from raysharding.distributed.saving.save import begin_save as begin_save
from raysharding.distributed.saving.save import save_checkpoint as save_checkpoint
from raysharding.distributed.saving.training_state import load_training as load_training
from raysharding.distributed.saving.training_state import random_state as random_state
from raysharding.distributed.saving.training_state import restore_random_state as restore_random_state
from raysharding.distributed.saving.training_state import run_of as run_of
