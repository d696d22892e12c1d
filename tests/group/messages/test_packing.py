"""Values between driver and ranks: exact, compact, and refused with the part at fault named."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raysharding.group.messages import AsValue, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in [(3, 4), (), (0, 5), (2, 1, 3)]]
    tensors.append(torch.randn(4, 6).to(dtype).t())
    for tensor in tensors:
        back = pack(tensor, "x").unpack()
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_a_row_slice_weighs_its_rows_not_its_storage() -> None:
    whole = torch.zeros(1000, 1000)
    assert pack(whole[3:4], "x").num_bytes < 5000


def test_the_receiver_may_write_and_the_sender_may_go_on() -> None:
    tensor, array = torch.zeros(4), np.zeros(4)
    packed = pack({"t": tensor, "a": array}, "x").snapshot()
    tensor.fill_(7)
    array.fill(7)
    back = packed.unpack()
    back["t"].add_(1)
    back["a"] += 1
    assert back["t"].tolist() == [1.0] * 4
    assert back["a"].tolist() == [1.0] * 4


def test_shared_objects_stay_shared_and_parameters_stay_parameters() -> None:
    tensor = torch.ones(2, requires_grad=True)
    first, second, parameter = pack([tensor, tensor, torch.nn.Parameter(torch.ones(3))], "x").unpack()
    assert first is second
    assert first.requires_grad
    assert isinstance(parameter, torch.nn.Parameter)


def test_as_value_unpickles_as_the_value() -> None:
    value = pickle.loads(pickle.dumps(AsValue(pack({"a": torch.arange(3)}, "x"))))
    assert value["a"].tolist() == [0, 1, 2]


def test_what_cannot_travel_is_named() -> None:
    value: dict[str, Any] = {"fine": 1, "bad": [torch.ones(1), threading.Lock()]}
    with pytest.raises(TypeError, match=r"the result of call cannot be pickled at \['bad'\]\[1\] \(type lock\)"):
        pack(value, "the result of call")
