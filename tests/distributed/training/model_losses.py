"""Every transformers class with a loss of its own, on two ranks against one process; the page about it.

    python -m tests.distributed.training.model_losses --out docs/pages/model-losses.md [--classes REGEX ...]

Each class gets a tiny random model, sharded over two ranks, and seven rows whose labels count unevenly. In eval mode,
so that the only difference from one process is how the rows are divided.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import os
import re
import shlex
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raysharding.batch import PerRank, RankBatch, Split, deal
from raysharding.config import Sharding
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.losses import find_loss, loss_of_batch
from raysharding.distributed.training.step import Accumulation
from raysharding.errors import UnreadableLossError
from tests.distributed.training.test_training import full
from tests.models.tiny import tiny_models
from tests.models.tiny_batches import NUM_ROWS, Batch, tiny_batches
from tests.spawn import RanksFailedError, run_ranks

TOLERANCE = 1e-5
"""Of the loss, relative; the gradients' is 10 times that."""
PHASE_S = 60.0
"""For making a model and its batch, and for each comparison."""
NUM_TRIES = 12
NUM_CLASSES = 150
"""Classes that one pair of processes examines: their modules stay imported."""
_LABELS = {"labels", "start_positions", "return_loss", "mask_labels", "sampled_negative_indices"}
_OWN = re.compile(r"(aux|z)_loss\W*$")


class Found(NamedTuple):
    """What is known of a case: a class, or a variant of it."""

    case: str
    result: str
    told: str
    """The terms of its loss, or why it has none."""


# On a rank.


def cut(batch: Batch, rank: int) -> RankBatch:
    """Return one rank's part: four rows, or three."""

    def marked(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and len(value) == NUM_ROWS:
            return Split(value)
        if isinstance(value, torch.Tensor | list):
            middle = len(value) // NUM_ROWS * ((NUM_ROWS + 1) // 2)
            return PerRank([value[:middle], value[middle:]])
        return value

    return deal((), {key: marked(value) for key, value in batch.items()}, 2)[rank]


def own_loss(model: Any, batch: Batch, seed: int = 0) -> torch.Tensor:
    """Return a model's own loss."""
    torch.manual_seed(seed)
    loss = find_loss(model(**batch))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad or not loss.isfinite():
        raise ValueError("no loss, or one without a gradient")
    return loss.reshape(())


def prepared(name: str) -> tuple[Any, Batch]:
    """Return a model and a batch that gives it a loss, on all rows and on each rank's; the same on every rank.

    Raises:
        RuntimeError: Why there is none.
    """
    problem = ""
    for model in tiny_models(name):
        twin = copy.deepcopy(model)  # some keep what they computed
        for batch in islice(tiny_batches(model), NUM_TRIES):
            try:
                loss, other, *_ = [
                    float(own_loss(twin, inputs, seed).detach())
                    for inputs, seed in ((batch, 0), (batch, 1), (cut(batch, 0).kwargs, 0), (cut(batch, 1).kwargs, 0))
                ]
            except Exception as error:
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            if not math.isclose(loss, other, rel_tol=TOLERANCE):
                raise RuntimeError("random in eval mode, too")
            return model, batch
    raise RuntimeError(problem)


def compare(model: Any, batch: Batch, backend: str | None = None) -> tuple[str, str]:
    """Return result and terms of the loss of a model over the ranks, or why it is refused; collective.

    Args:
        model: It stays as it is.
        batch: All rows.
        backend: Compile the model whole, with this backend of `torch.compile`.
    """
    twin, part = copy.deepcopy(model), cut(batch, dist.get_rank())
    module: Any = shard_module(copy.deepcopy(model), init_mesh("cpu"), Sharding())
    if backend is not None:
        module.compile(backend=backend)
    torch.manual_seed(0)
    try:
        loss = loss_of_batch(module, part)
    except UnreadableLossError as error:
        return "refused", str(error).split("from this rank's: ")[-1].split("; let loss=")[0]
    have = [Accumulation().add(loss)]
    loss.backward(Accumulation().scales(loss))
    own = own_loss(twin, batch)
    own.backward()
    want = float(own.detach())
    away = _distance(module, twin)
    torch.manual_seed(0)
    have.append(Accumulation().add(loss_of_batch(module, part, with_backward=False)))
    told = " + ".join(re.sub(r"\W", "", name) for name in loss.names)
    if any(_OWN.search(name) for name in loss.names):
        return _own_terms(model, batch, loss), told
    if away > 10 * TOLERANCE or not all(math.isclose(one, want, rel_tol=TOLERANCE, abs_tol=1e-6) for one in have):
        return "differs", f"{told}: losses {have}, not {want:.6f}; gradient off by {away:.2g}"
    return ("by the count", told) if loss.names == ("labels",) else ("read", told)


def _distance(module: Any, twin: Any) -> float:
    """Return how far the gradients are from those of one process, relative to these."""
    away, size, wanted = 0.0, 0.0, dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        have, want = (torch.zeros(()) if one.grad is None else full(one.grad) for one in (parameter, wanted[name]))
        away, size = away + float((have - want).square().sum()), size + float(want.square().sum())
    return math.sqrt(away / max(size, 1e-16))


def _own_terms(model: Any, batch: Batch, loss: Any) -> str:
    """Compare the rest of a loss with that of the same model that adds no terms of its own."""
    number = len(loss.names)
    _, _, sums, _, factors, _ = loss.numbers.result().split([1, number, number, number, number, 1])
    means = factors * sums / torch.where(loss.is_sum, 1.0, loss.counts)
    have = sum(float(mean) for mean, name in zip(means, loss.names, strict=True) if not _OWN.search(name))
    plain = copy.deepcopy(model)
    _add_router_loss(plain, False)
    return "own term" if math.isclose(have, float(own_loss(plain, batch)), rel_tol=TOLERANCE) else "differs"


def _add_router_loss(model: Any, adds: bool) -> None:
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "output_router_logits"):
            module.config.output_router_logits = adds


def _variants(name: str, model: Any, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Yield a class's cases; the model's configuration is that of each."""
    yield name, batch
    if name.endswith("ForSequenceClassification"):
        labels = torch.eye(model.config.num_labels)[torch.arange(NUM_ROWS) % 2]
        for kind in ("multi_label_classification", "regression"):
            model.config.problem_type = kind
            yield f"{name} ({kind.split('_c')[0]})", {**batch, "labels": labels}
    else:
        _add_router_loss(model, True)
        yield f"{name} + output_router_logits", batch


def examine(name: str) -> Iterator[Found]:
    """Yield what is known of a class's cases, "fails" before each: the last that is told of a case holds."""
    import transformers

    yield Found(name, "not made", f"takes more than {PHASE_S:.0f} s")
    taken = set(inspect.signature(getattr(transformers, name).forward).parameters)
    if not taken & _LABELS:
        yield Found(name, "no loss", "")
        return
    try:
        model, batch = prepared(name)
    except Exception as error:
        yield Found(name, "not made", str(error))
        return
    seen: set[float | None] = {None}
    for case, inputs in _variants(name, model, batch):
        loss = None
        with suppress(Exception):  # the class may have no such variant, or the same loss
            loss = float(own_loss(copy.deepcopy(model), inputs).detach())
        if loss not in seen:
            seen.add(loss)
            yield Found(case, "fails", f"a rank takes more than {PHASE_S:.0f} s, or dies")
            yield Found(case, *compare(model, inputs))


def work(names: Sequence[str], path: str, examine: Callable[[str], Iterator[Found]]) -> None:
    """Examine classes on this rank; rank 0 appends what it finds to a file, a line each."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name in names:
        timer = threading.Timer(PHASE_S, os._exit, (3,))
        timer.start()
        for found in examine(name):
            timer.cancel()
            if dist.get_rank() == 0:
                with Path(path).open("a") as lines:
                    lines.write(json.dumps(found) + "\n")
            timer = threading.Timer(PHASE_S, os._exit, (3,))
            timer.start()
        timer.cancel()


# In the command.


def class_names() -> list[str]:
    """Return the names of transformers' models; which of them have a loss is seen when they are imported."""
    import transformers

    pattern = re.compile(r"(?!Auto|TF|Flax)\w*(For[A-Z]\w+|(?<!PreTrained)Model|DoubleHeads\w*)$")
    return [name for name in dir(transformers) if pattern.match(name)]


def examine_all(names: Sequence[str], examine: Callable[[str], Iterator[Found]] = examine) -> list[Found]:
    """Run the classes on two ranks. A class that kills a rank, or hangs, is passed over."""
    with tempfile.TemporaryDirectory() as folder:
        path, left, found = Path(folder, "found.jsonl"), list(names), dict[str, Found]()
        while left:
            problem, before = "", len(found)
            try:
                run_ranks(2, work, left[:NUM_CLASSES], str(path), examine, timeout_s=2 * PHASE_S * NUM_CLASSES)
            except RanksFailedError as error:
                problem = str(error)
            lines = path.read_text().splitlines() if path.exists() else []
            found |= {one.case: one for one in (Found(*json.loads(line)) for line in lines)}
            if problem and len(found) == before:
                raise RuntimeError(problem)
            last = list(found.values())[-1]
            if problem and last.result == "fails":
                errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .*$", problem, re.MULTILINE)
                found[last.case] = last._replace(told=errors[0] if errors else last.told)
            path.unlink()
            done = {case.split(" ")[0] for case in found}
            left = [name for name in left if name not in done]
        return [one for one in found.values() if one.result != "no loss"]


# The page.

_RESULTS: Mapping[str, str] = {
    "read": "torch says what each mean divides by: one process's loss and gradient at any number of ranks",
    "own term": "the rest is one process's; a term of the experts is each rank's own, averaged by tokens, counted once",
    "by the count": "not read; the labels are counted for `num_items_in_batch`: one process's loss and gradient",
    "refused": "`UnreadableLossError` in the first step: call the model without labels, and pass a `loss=`",
    "differs": "another loss or gradient than one process's, without a word",
    "fails": "another error, or no end in time",
    "not made": "no tiny model, or no batch for it, could be made",
}


def _task(case: str) -> str:
    """Return the end of a class's name, and its variant."""
    ended = re.search(r"(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model)( .*)?$", case)
    return ended[0] if ended else case


def _loss(one: Found) -> str:
    """Return the terms of a loss, or why it is refused or wrong, for the table."""
    if one.result in ("read", "own term", "by the count"):
        terms = Counter(one.told.split(" + "))
        return " + ".join(term if number == 1 else f"{number} × {term}" for term, number in terms.items())
    told = (
        re.sub(r"\d[\d., ()]*\d|\d+", "N", one.told.replace("Backward0", "")) if one.result == "refused" else one.told
    )
    return "" if one.result == "not made" else _escaped(told)


def _escaped(text: str) -> str:
    return " ".join(re.sub(r"([|<`*_\[\]\\])", r"\\\1", text).split())


def page(found: Sequence[Found], seconds: float, command: str) -> str:
    import transformers

    counts = Counter(one.result for one in found)
    groups = defaultdict[tuple[str, str], list[str]](list)
    for one in found:
        groups[one.result, _loss(one)].append(one.case)
    reasons = [f"- {one.case}: {_escaped(one.told)[:120]}" for one in found if one.result == "not made"]
    order = sorted(groups, key=lambda key: (list(_RESULTS).index(key[0]), -len(groups[key]), key))
    text = [
        f"""# Losses of transformers' models

Which losses of transformers' own classes are [read](losses.md#a-models-own-loss). Made, not written, by

<!-- not run: it takes minutes; tests/distributed/training/test_model_losses.py runs a part of it -->
```bash
{command}
```

with torch {torch.__version__.split("+")[0]} and transformers {transformers.__version__}, in
{math.ceil(seconds / 60)} minutes on two cores. Each class gets a tiny random model, sharded over two ranks, and
{NUM_ROWS} rows whose labels count unevenly. The ranks take four rows and three; their loss and gradient are
compared with one process's on all rows, to {TOLERANCE:g} and {10 * TOLERANCE:g}, in eval mode. Classes whose labels may
be of several kinds are listed for each.

| Result | Cases | What it means |
|---|---|---|"""
    ]
    text += [f"| {result} | {counts[result]} | {told} |" for result, told in _RESULTS.items() if counts[result]]
    text += ["", "| Result | Loss | Cases | Tasks |", "|---|---|---|---|"]
    for key in order:
        tasks = Counter(map(_task, groups[key])).most_common()
        shown = [task if number == 1 else f"{number} {task}" for task, number in tasks[:6]]
        shown += [f"{len(tasks) - 6} more tasks"] if len(tasks) > 6 else []
        text.append(f"| {key[0]} | {key[1]} | {len(groups[key])} | {', '.join(shown)} |")
    for key in order:
        heading = f"{key[0]}: {key[1]}" if key[1] else key[0]
        names = reasons if key[0] == "not made" else [", ".join(groups[key])]
        text += ["", "<details>", f"<summary>{heading} ({len(groups[key])})</summary>", "", *names, "", "</details>"]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="*", default=[".*"], help="regular expressions of names; default: all")
    parser.add_argument("--out", type=Path, help="page to write; default: what was found is printed")
    options = parser.parse_args()
    names = [name for name in class_names() if any(re.fullmatch(one, name) for one in options.classes)]
    started = time.monotonic()
    found = examine_all(names)
    if options.out:
        command = shlex.join(["python", "-m", "tests.distributed.training.model_losses", *sys.argv[1:]])
        options.out.write_text(page(found, time.monotonic() - started, command))
    for one in found:
        if not options.out or one.result in ("differs", "fails"):
            print(*one, sep=": ")
    print(dict(Counter(one.result for one in found)), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
