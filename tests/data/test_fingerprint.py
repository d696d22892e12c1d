"""Fingerprints are equal in every process for what computes the same, and differ where the result would."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
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

LABELS = {labels}
mean = {unrelated}

def inner(x):
    return x + {inner}

def fn(outputs, batch, {default}):
    '''Return columns.'''
    helper(batch)
    late = lambda one: inner(one) + len(LABELS)
    return {{"value": [one {op} inner(SCALE) for one in outputs.mean(late)]}}

def unset():
    return never
    never = 1

class Call:
    def __init__(self):
        self.k = {k}
    def __call__(self, x):
        return x

closed = [fn, {{"b": torch.arange(3.0)}}, 2.5, Call()]
linear = torch.nn.Linear(2, 2, bias=False)
torch.nn.init.constant_(linear.weight, {weight})
print(fingerprint([fn, partial(fn, 1, k=2), Call(), Call().__call__, lambda: (closed, linear), torch.{builtin}, unset]))
"""
FIRST: dict[str, Any] = {"scale": 1, "const": "d", "default": "k=1", "op": "+", "k": 3}
FIRST |= {"labels": ["a"], "inner": 1, "weight": 0.5, "builtin": "relu", "unrelated": 1.0}


EACH = "import json, sys; [exec(one, {'__name__': 'program'}) for one in json.load(sys.stdin)]"


def run(seed: str, *changes: dict[str, Any]) -> list[str]:
    """Return the fingerprint of the program with each of these changes, all found in one process."""
    programs = json.dumps([PROGRAM.format(**FIRST | change) for change in changes])
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", EACH], env=environment, input=programs, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_functions_count_by_what_decides_their_result() -> None:
    others: dict[str, Any] = {"scale": 2, "const": "e", "default": "k=2", "op": "-", "k": 4}
    others |= {"labels": ["b"], "inner": 2, "weight": 1.0, "builtin": "sigmoid"}
    first, unrelated, *changed = run("1", {}, {"unrelated": 2.0}, *({name: one} for name, one in others.items()))
    assert run("2", {}) == [first]
    assert unrelated == first, "an attribute is no global of its name"
    assert {name: one for name, one in zip(others, changed, strict=True) if one == first} == {}


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
    images = [PIL.Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    assert fingerprint(images) != fingerprint(images[::-1])
    assert fingerprint([torch.eye(2).to_sparse()]) == fingerprint([torch.eye(2).to_sparse()])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([Path("a")]) != fingerprint([Path("b")])
    assert fingerprint([partial(print, 1)]) != fingerprint([partial(print, 2)])
