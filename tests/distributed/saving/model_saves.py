"""Saves of every transformers class beside transformers' own, from two ranks without Ray.

    python -m tests.distributed.saving.model_saves [--dtype bfloat16] [--classes REGEX ...]

A tiny random model of each class is loaded by two ranks and saved. Parameters and buffers must be those of
`from_pretrained`, names and values of the save those of `save_pretrained`, and `AutoModel` must open the save without
a missing key that it does not miss in transformers' own. Chinese-CLIP's text models, Funnel's and Youtu's differ:
`from_pretrained` zeroes the row of their padding id, which their files have. All 1,653 classes took 47 minutes on two
cores; `--classes ".*Model"` goes over the base classes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from raysharding.checkpoint import open_checkpoint
from raysharding.config import Loading
from raysharding.distributed import init_mesh, load_checkpoint, save_checkpoint, shard_module
from raysharding.distributed.comm import from_rank_0
from raysharding.models import build_module
from tests.distributed.training.model_losses import PHASE_S, Found, class_names, examine_all
from tests.distributed.training.test_training import full
from tests.models.tiny import tiny_models

EQUAL = "equal"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_TOLD = 3


def examine(name: str, folder: str, dtype: str) -> Iterator[Found]:
    """Yield what is known of a class, "fails" first: the last that is told holds; collective."""
    yield Found(name, "fails", f"a rank takes more than {PHASE_S:.0f} s, or dies")
    own = Path(folder, name)
    try:
        from_rank_0(partial(_make, name, own))
    except Exception as error:
        yield Found(name, "not made", _said(error))
        return
    try:
        yield Found(name, *compare(name, own, _DTYPES[dtype]))
    except Exception as error:
        yield Found(name, "refused", _said(error))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(own)


def compare(name: str, own: Path, dtype: torch.dtype) -> tuple[str, str]:
    """Load and save a class's model; return the result, and what differs; collective."""
    opened = open_checkpoint(own / "base")
    module = shard_module(build_module(None, opened, dtype), init_mesh("cpu"))
    load_checkpoint(module, opened, loading=Loading(dtype=dtype))
    have = {key: full(tensor) for key, tensor in sorted(_tensors(module).items())}
    save_checkpoint(module, own / "ours")
    found = from_rank_0(partial(_differences, name, own, dtype, have))
    return (found[0], found[1])


def _make(name: str, own: Path) -> None:
    model = next(iter(tiny_models(name)))
    model.save_pretrained(own / "base")


def _differences(name: str, own: Path, dtype: torch.dtype, have: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the result and what differs, on rank 0."""
    import transformers

    kind = getattr(transformers, name)
    reference, info = kind.from_pretrained(own / "base", output_loading_info=True, dtype=dtype)
    drawn = set(info["missing_keys"])
    want = {key: tensor.detach() for key, tensor in _tensors(reference).items()}
    if told := _differing({key: one for key, one in have.items() if key not in drawn}, want, drawn):
        return ["loads differ", told]
    reference.save_pretrained(own / "theirs")
    ours, theirs = (
        {key: one for path in sorted((own / at).glob("*.safetensors")) for key, one in load_file(path).items()}
        for at in ("ours", "theirs")
    )
    if ours.keys() != theirs.keys():
        return ["names differ", f"{_some(ours.keys() - theirs.keys())} for {_some(theirs.keys() - ours.keys())}"]
    if not drawn and (told := _differing(ours, theirs, drawn)):
        return ["saves differ", told]
    again, info = kind.from_pretrained(own / "ours", output_loading_info=True, dtype=dtype)
    reopened = {key: tensor.detach() for key, tensor in _tensors(again).items()}
    if info["missing_keys"] - drawn or (not drawn and (told := _differing(reopened, want, drawn))):
        return ["opens differently", f"without {_some(info['missing_keys'] - drawn)}; {told}"]
    missed = _missed_as_base(own / "theirs")
    if missed is not None and (more := (_missed_as_base(own / "ours") or set()) - missed):
        return ["base misses", _some(more)]
    return [EQUAL, ""]


def _missed_as_base(path: Path) -> set[str] | None:
    """Return the keys that `AutoModel` misses in a directory; `None` if there is no such class or no tiny one of it."""
    import transformers

    with suppress(ValueError, AttributeError):
        return set(transformers.AutoModel.from_pretrained(path, output_loading_info=True)[1]["missing_keys"])
    return None


def _tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, also those that no save has, under all their names."""
    names = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {key: tensor for named in names for key, tensor in named}


def _differing(have: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], drawn: set[str]) -> str:
    """Return names that only one has, and of tensors with other values or dtype."""
    told = [f"{key} is only in one" for key in sorted(have.keys() ^ (want.keys() - drawn))]
    for key in sorted(have.keys() & want.keys()):
        one, other = have[key], want[key]
        if one.dtype != other.dtype or one.shape != other.shape:
            told.append(f"{key}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}")
        elif not torch.allclose(one.to(torch.complex128), other.to(torch.complex128), rtol=0, atol=0, equal_nan=True):
            told.append(f"{key}: other values")
    return _some(told)


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_NUM_TOLD]) + (f" and {len(shown) - _NUM_TOLD} more" if len(shown) > _NUM_TOLD else "")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="*", default=[".*"], help="regular expressions of names; default: all")
    parser.add_argument("--dtype", default="float32", choices=_DTYPES, help="load in this dtype")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = [name for name in class_names() if any(re.fullmatch(one, name) for one in options.classes)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = examine_all(names, partial(examine, folder=folder, dtype=options.dtype))
    for one in found:
        if one.result != EQUAL:
            print(*one, sep=": ")
    print(dict(Counter(one.result for one in found)), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
