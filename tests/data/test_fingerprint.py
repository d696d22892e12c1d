"""Fingerprints are equal in every process for what computes the same, and differ where the result would."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from raysharding.data import fingerprint, rows_fingerprint, rows_of

PROGRAM = """
import sys
from functools import partial
import torch
from raysharding.data import fingerprint

SCALE = {scale}

def helper(x, known=frozenset(["a", "b", "c"])):
    return fn if x in {{"a", "b", "c", {const!r}}} else SCALE

def fn(outputs, batch, {default}):
    '''Return columns.'''
    helper(batch)
    return {{"value": [one {op} 1 for one in outputs]}}

class Call:
    def __init__(self):
        self.k = {k}
    def __call__(self, x):
        return x

closed = [fn, {{"b": torch.arange(3.0)}}, 2.5]
print(fingerprint([fn, partial(fn, 1, k=2), Call(), lambda: closed]))
"""
FIRST: dict[str, Any] = {"scale": 1, "const": "d", "default": "k=1", "op": "+", "k": 3}


def run(seed: str, **changes: Any) -> str:
    command = [sys.executable, "-c", PROGRAM.format(**FIRST | changes)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_functions_count_by_what_decides_their_result() -> None:
    first = run("1")
    assert run("2") == first
    for name, value in {"scale": 2, "const": "e", "default": "k=2", "op": "-", "k": 4}.items():
        assert run("1", **{name: value}) != first, name


def test_values_count_and_their_places() -> None:
    def rows() -> list[dict[str, Any]]:
        return [
            {"id": index, "x": torch.full((2,), float(index)), "at": datetime.date(2026, 1, 1)} for index in range(9)
        ]

    first = rows_fingerprint(source(rows()))
    assert rows_fingerprint(source(rows())) == first
    swapped = rows()
    swapped[3], swapped[4] = swapped[4], swapped[3]
    later = rows()
    later[5]["at"] = datetime.date(2026, 1, 2)
    for other in (swapped, later, rows()[:-1]):
        assert rows_fingerprint(source(other)) != first
    columns: dict[str, Any] = {"x": np.arange(6).reshape(3, 2), "y": torch.ones(3, dtype=torch.bfloat16)}
    found = {
        rows_fingerprint(source(columns | {"x": x})) for x in (columns["x"], columns["x"].copy(), columns["x"][::-1])
    }
    assert len(found) == 2


def test_a_datasets_rows_are_sampled_over_its_length() -> None:
    numbers = datasets.Dataset.from_dict({"x": list(range(1000))})
    first = rows_fingerprint(source(numbers))
    assert rows_fingerprint(source(datasets.Dataset.from_dict({"x": list(range(1000))}))) == first
    assert rows_fingerprint(source(numbers.select(range(999, -1, -1)))) != first
    assert rows_fingerprint(source(numbers.shuffle(seed=1))) != first


def source(data: Any) -> Any:
    return rows_of(data)


def test_objects_count_by_their_repr_or_type() -> None:
    assert fingerprint([object()]) == fingerprint([object()])
    assert fingerprint([Path("a")]) != fingerprint([Path("b")])
    assert fingerprint([partial(print, 1)]) != fingerprint([partial(print, 2)])
