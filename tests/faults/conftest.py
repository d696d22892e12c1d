"""A checkpoint of several buckets for the model of `trap`, and a check that a fault's group left no port behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.faults.trap import plain_model


@pytest.fixture(scope="session")
def many_buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 4 KiB and their biases: with `trap.BUCKET_BYTES`, more than eight buckets."""
    path = tmp_path_factory.mktemp("many-buckets") / "model.safetensors"
    save_file(plain_model().state_dict(), path)
    return path
