"""Names of the files of a checkpoint."""

from __future__ import annotations

from typing import Final

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
ADAPTER_NAME: Final = "adapter_model.safetensors"
"""peft's file of adapters, beside `ADAPTER_CONFIG_NAME`."""
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
MANIFEST_NAME: Final = "raysharding.manifest.json"
"""Checksums of one save (`writing/manifest.py`); never copied to another save."""
EXTRA_STATE_NAME: Final = "_extra_state"
"""Last part of the state dict keys of `set_extra_state`: torch's `_EXTRA_STATE_KEY_SUFFIX`."""
SAVE_RECORD_NAME: Final = "raysharding.save.json"
"""Record of the save that wrote a directory, and of the small files that it copied there (`writing/save_record.py`)."""
OPTIMIZER_FOLDER: Final = "optimizer"
OPTIMIZER_NAME: Final = "raysharding.optimizer.json"
TRAINING_FOLDER: Final = "training"
TRAINING_NAME: Final = "raysharding.training.json"
