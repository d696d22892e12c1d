"""Devices that are not there are refused with what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from raysharding.distributed.comm import check_device_type, set_current_device


def test_a_device_type_without_collectives_is_refused_with_the_known_ones() -> None:
    known = r"device='tpu': use one of 'cpu', 'cuda', .*, for which torch has collectives here"
    with pytest.raises(ValueError, match=known):
        check_device_type("tpu")


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    count = torch.cuda.device_count()
    said = f"cuda:{count} is not there for torch {torch.__version__}, which sees {count} devices of type cuda"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        set_current_device(torch.device("cuda", count))


def test_segments_grow_unless_the_user_has_set_the_allocator() -> None:
    """torch reads the variable at the allocator's first use, which is after its import."""
    code = (
        "import os, torch; from raysharding.distributed.comm import use_expandable_segments\n"
        "before = dict(os.environ); use_expandable_segments(torch.device('cpu')); assert os.environ == before\n"
        "use_expandable_segments(torch.device('cuda:0')); print(torch._C._accelerator_getAllocatorSettings())"
    )
    kept = {name: value for name, value in os.environ.items() if "ALLOC" not in name}
    for variables, expected in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, ""),
    ):
        command, environment = [sys.executable, "-c", code], kept | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == expected, done.stderr
