"""What the files of a checkpoint are called."""

from __future__ import annotations

from typing import Final

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
ADAPTER_NAME: Final = "adapter_model.safetensors"
"""Where peft keeps adapters, beside `ADAPTER_CONFIG_NAME`."""
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
MANIFEST_NAME: Final = "raysharding.manifest.json"
"""Checksums of one save (`manifest.py`); never copied beside the weights of another."""
