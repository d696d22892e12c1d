"""Devices that are not there are refused with what there is."""

from __future__ import annotations

import re

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
