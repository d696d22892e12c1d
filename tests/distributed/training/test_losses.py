"""One process's loss: each form that is read, or refused at the first step, at any number of ranks."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysharding.config import Sharding
from raysharding.data import SequenceRows
from raysharding.data.source import Columns
from raysharding.distributed.comm import any_rank
from raysharding.distributed.comm.device_mesh import init_mesh
from raysharding.distributed.fully_shard.recovery import is_recoverable
from raysharding.distributed.fully_shard.shard import shard_module
from raysharding.distributed.training.data_loader import DataPlan
from raysharding.distributed.training.evaluate import Evaluation, EvaluationPlan
from raysharding.distributed.training.forward import Forwarding
from raysharding.distributed.training.losses.calls import run_recorded
from raysharding.distributed.training.step import train_step
from raysharding.errors import UnreadableLossError
from tests.distributed.training.loss_expressions import composed, evaluated
from tests.distributed.training.loss_forms import NUM_ROWS, READ, REFUSED, Form, Rows, Scores, Tensors, batch, last_rows
from tests.distributed.training.test_training import Pair, each
from tests.distributed.training.training_cases import Case, batch_of
from tests.spawn import device_type, run_ranks

pytestmark = pytest.mark.all_ranks  # most of its modules are not sharded, and have no mesh

TOLERANCE = 1e-6
"""Of a loss, a norm and a parameter; relative where they are above 1."""
KINDS = ("open", "uneven", "sparse")
ORDERS = list(itertools.permutations(KINDS))


def _gradient(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """All gradients in one dim, zeros where there is none."""
    return torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in parameters])


class Averaging(torch.optim.SGD):
    """Averages gradients over the ranks before the update, as FSDP does, and measures them."""

    norm = math.nan

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        whole = _gradient(parameters) / dist.get_world_size()
        dist.all_reduce(whole)
        for parameter, part in zip(parameters, whole.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.norm = whole.double().norm().item()
        super().step(closure)


class FormPair(Pair):
    """For losses of any form. A plain module on every rank takes a third of the time of a sharded one."""

    tolerance = TOLERANCE

    def __init__(self, build: Callable[[], nn.Module] = Scores, lr: float = 0.01, is_sharded: bool = True) -> None:
        super().__init__(build, partial(torch.optim.SGD, lr=lr), is_sharded=is_sharded)
        if not is_sharded:
            self.optimizer = Averaging(self.module.parameters(), lr=lr)

    def agree(self, metrics: dict[str, float], expected: tuple[float, float]) -> None:
        norm = self.optimizer.norm if isinstance(self.optimizer, Averaging) else metrics["grad_norm"]
        assert (metrics["loss"], norm) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)

    def take(self, case: Case, rows: Tensors, **options: Any) -> None:
        """A step of both, after which the parameters are equal."""
        self.step(case, rows, **options)
        self.compare()

    def refuses(self, case: Case, rows: Tensors) -> UnreadableLossError:
        """The first step is refused, on every rank, and names the way out."""
        batch = batch_of(rows, case.dim, case.rows_per_item)
        with pytest.raises(
            UnreadableLossError, match=r"let loss= return \(sum over the rank's rows, count\)"
        ) as caught:
            train_step(self.module, self.optimizer, batch, loss=case.loss)
        return caught.value


def read(name: str, kinds: Sequence[str], num_rows: int, is_sharded: bool) -> None:
    """A step on each batch; without a number of rows, steps in parts."""
    pair, form = FormPair(is_sharded=is_sharded), READ[name]
    if num_rows:
        for kind in kinds:
            pair.step(form.case, last_rows(batch(kind), num_rows))
    else:
        steps_in_parts(pair, form, kinds)
    pair.compare()


def steps_in_parts(pair: FormPair, form: Form, kinds: Sequence[str]) -> None:
    """Steps in two and in three parts, by `train_step` and by hand."""
    for num_parts, kind in zip((2, 3, 3), kinds, strict=True):
        pair.step(form.case, batch(kind), None, num_parts)
    for kind, cuts in zip(kinds, ([0, 4, 7], [0, 3, 4, 7], [0, 1, 7]), strict=True):
        try:
            pair.in_calls(form.case, batch(kind), cuts)
        except ValueError as error:
            if not form.several or "terms with counts of their own" not in str(error):
                raise
            assert all(parameter.grad is None for parameter in pair.module.parameters())
            pair.step(form.case, batch(kind))


Plan = tuple[str, tuple[str, ...], int, bool]
"""Form, batches, rows in each (0 for all of them, in parts), and whether the module is sharded."""


def plans_of(world_size: int, *, is_full: bool) -> list[Plan]:
    """Each form in every order of the batches, on fewer rows than ranks, and in parts.

    In the short run, and by other numbers of ranks than two, in one order.
    """
    plans: list[Plan] = []
    is_whole = is_full and world_size == 2
    for index, name in enumerate(READ):
        some = ORDERS[index % len(ORDERS)]
        plans += [(name, order, NUM_ROWS, is_whole and order == some) for order in (ORDERS if is_whole else [some])]
        plans += [(name, some, num_rows, False) for num_rows in range(1, world_size) if is_full or index % 3 == 0]
        plans += [
            (name, order, 0, False) for order in (ORDERS[::3] if is_whole else [some]) if is_full or index % 3 == 1
        ]
        if not is_full and index % 9 == 0:
            plans += [(name, some, num_rows, True) for num_rows in (NUM_ROWS, 0)]
    return plans


@pytest.mark.timeout(200)
def test_read_forms_equal_one_process() -> None:
    run_ranks(2, each, read, plans_of(2, is_full=False), timeout_s=180)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_read_forms_equal_one_process_by_every_number_of_ranks(world_size: int, half: int) -> None:
    run_ranks(world_size, each, read, plans_of(world_size, is_full=True)[half::2], timeout_s=380)


def refuse(name: str, kind: str, num_rows: int, is_sharded: bool) -> None:
    """A form is refused in the first step of a module; the next one is right."""
    pair = FormPair(is_sharded=is_sharded)
    error = pair.refuses(REFUSED[name].case, last_rows(batch(kind), num_rows))
    assert is_recoverable(error) or not is_sharded
    pair.step(READ["cross_entropy"].case, batch("uneven"))
    pair.compare()


def refusals(kinds: Sequence[tuple[str, int]], sharded: int) -> list[tuple[str, str, int, bool]]:
    """Every form on each kind of batch; one of `sharded` on a sharded module."""
    cases = enumerate(itertools.product(REFUSED, kinds))
    return [(name, *kind, index % sharded == 0) for index, (name, kind) in cases]


@pytest.mark.timeout(200)
def test_other_forms_are_refused_at_the_first_step_whatever_the_batch() -> None:
    run_ranks(2, each, refuse, refusals([("open", 2), ("equal", 4), ("uneven", NUM_ROWS)], 10), timeout_s=180)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_forms_are_refused_by_every_number_of_ranks(world_size: int) -> None:
    kinds = [("open", world_size), ("equal", world_size * 2), ("equal", 1), ("open", NUM_ROWS), ("sparse", NUM_ROWS)]
    if world_size == 1:  # one row in all is one process's
        kinds = [(kind, num_rows) for kind, num_rows in kinds if num_rows > 1]
    run_ranks(world_size, each, refuse, refusals(kinds, 4), timeout_s=380)


class OwnLoss(nn.Module):
    """Computes a loss of its scores itself."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.scores = Scores()
        self.form = form

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        classes: torch.Tensor,
        target: torch.Tensor,
        kept: torch.Tensor,
        signs: torch.Tensor,
        chances: torch.Tensor,
        weights: torch.Tensor,
        word: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        columns = dict(locals())
        scores = self.scores(tokens)
        return {"loss": self.form.of(scores, Rows(columns)), "scores": scores}


def sharded(twin: nn.Module) -> nn.Module:
    return shard_module(copy.deepcopy(twin), init_mesh(device_type(), Sharding()), Sharding())


def own_loss(index: int, name: str) -> None:
    """A model's own loss: of a step, of a forward and of an evaluation in two batches, also with frozen parameters."""
    torch.manual_seed(0)
    twin = OwnLoss(READ[name])
    module = sharded(twin)
    if index % 3 == 0:
        module.requires_grad_(False)
    for kind in ORDERS[index % len(ORDERS)]:
        columns = batch(kind)
        own = batch_of(columns)
        loss = twin(**columns)["loss"]
        found = [Forwarding(module).run(own).value["loss"].item(), evaluated_loss(module, None, columns)]
        if index % 3:
            metrics = train_step(module, torch.optim.SGD(module.parameters(), lr=0.0), own)
            twin.zero_grad()
            loss.backward()
            norm = _gradient(twin.parameters()).double().norm().item()
            assert metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE, abs=TOLERANCE)
            found.append(metrics["loss"])
        assert found == [pytest.approx(loss.item(), rel=TOLERANCE, abs=TOLERANCE)] * len(found)


def evaluated_loss(module: nn.Module, form: Form | None, columns: Tensors) -> float:
    """The loss of an evaluation in batches of four rows."""
    plan = EvaluationPlan(DataPlan(SequenceRows(Columns(columns)), 4), form)
    run = Evaluation(plan, torch.device("cpu"))
    while run.step(module):
        pass
    run.data_loader.close()
    return run.values()["loss"]


def evaluation(index: int, name: str) -> None:
    """A caller's loss, of a trainable or a frozen module."""
    torch.manual_seed(0)
    twin = Scores()
    module = sharded(twin).requires_grad_(index % 2 == 0)
    for kind in KINDS:
        loss = READ[name].case.reference(twin, batch(kind)).item()
        assert evaluated_loss(module, READ[name], batch(kind)) == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)


def evaluations_and_own_losses(stride: int) -> None:
    """Some forms, without those with rows in another dim; a model's loss is a tensor, not a pair."""
    names = [name for name, form in READ.items() if not form.dim]
    each(evaluation, enumerate(names[::stride]))
    each(own_loss, enumerate([name for name in names if not READ[name].is_pairs][::stride]))


def test_evaluations_and_models_own_losses() -> None:
    run_ranks(2, evaluations_and_own_losses, 6)


@pytest.mark.full
@pytest.mark.timeout(370)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_evaluations_and_models_own_losses(world_size: int) -> None:
    run_ranks(world_size, evaluations_and_own_losses, 1, timeout_s=360)


def compare_one(numbers: random.Random, module: nn.Module, twin: nn.Module) -> tuple[str, str, str]:
    """Compose a loss and a batch; return `good` or `mixed`, what came of it, and what to repeat it by."""
    world_size, only_good = dist.get_world_size(), numbers.random() < 0.5
    text = composed(numbers, only_good=only_good)
    kind, num_parts = numbers.choice(("equal", *KINDS)), numbers.choice((1, 1, 1, 2, 3))
    num_rows = numbers.choice((1, world_size, world_size, 2 * world_size, 2 * world_size + 1, NUM_ROWS))
    columns = last_rows(batch(kind, numbers.randrange(5)), min(num_rows, NUM_ROWS))
    columns = {name: value.double() if value.is_floating_point() else value for name, value in columns.items()}
    form = Form(lambda output, rows: evaluated(text, output, vars(rows)))
    case = f"{text}  [{kind}, {num_rows} rows on {world_size}, {num_parts} parts]"
    for one in (module, twin):
        one.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loss = form.case.reference(twin, columns)
            loss.backward()
            own = batch_of(columns)
            for part in own.parts(num_parts):
                form(twin(part.kwargs["tokens"]), **part.kwargs)
            is_computable = True
        except (RuntimeError, ValueError, IndexError):  # of torch: the shapes do not fit
            is_computable = False
        if any_rank(not is_computable):
            return "", "no loss", case
        expected = [loss.item(), *_gradient(twin.parameters()).tolist()]
        optimizer = Averaging(module.parameters(), lr=0.0)
        try:
            metrics = train_step(module, optimizer, own, loss=form, gradient_accumulation_steps=num_parts)
        except ValueError as error:
            return "good" if only_good else "mixed", f"refused: {error}", case
        except Exception as error:
            return "good" if only_good else "mixed", f"{type(error).__name__}: {error}", case
    found = [metrics["loss"], *_gradient(module.parameters()).tolist()]
    if not math.isfinite(math.fsum(expected)):
        return "", "no loss", case
    scale = max(1e-3, *map(abs, expected))
    difference = max(abs(one - other) for one, other in zip(found, expected, strict=True)) / scale
    what = "equal" if difference < 1e-5 else f"differs by {difference:.3g}: {found[0]:.6g} is {expected[0]:.6g}"
    return "good" if only_good else "mixed", what, case


def compare_many(num_cases: int, seed: int) -> list[tuple[str, str, str]]:
    torch.manual_seed(seed)
    module = Scores().double()
    twin, numbers = copy.deepcopy(module), random.Random(seed)
    return [compare_one(numbers, module, twin) for _ in range(num_cases)]


def judge(outcomes: Sequence[Sequence[tuple[str, str, str]]]) -> None:
    """None may differ; what is composed of good forms alone is read."""
    (cases, *others) = outcomes
    for other in others:
        assert [what.split(":")[0] for _, what, _ in cases] == [what.split(":")[0] for _, what, _ in other]
    wrong = [
        f"{what}: {case}" for _, what, case in cases if what != "no loss" and not what.startswith(("equal", "refus"))
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(sorted(wrong, key=len))
    refused = [f"{what}: {case}" for group, what, case in cases if group == "good" and what.startswith("refused")]
    assert not refused, f"{len(refused)} are not read:\n" + "\n".join(sorted(refused, key=len))
    counts = Counter((group, what.split(":")[0]) for group, what, _ in cases)
    print(dict(counts))
    assert counts["good", "equal"] > len(cases) / 4
    assert counts["mixed", "refused"] > len(cases) / 10


def test_losses_composed_at_random() -> None:
    judge(run_ranks(2, compare_many, 150, 0, timeout_s=110))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world_size", "num_cases"), [(1, 300), (2, 1000), (3, 700)])
def test_many_losses_composed_at_random(world_size: int, num_cases: int) -> None:
    judge(run_ranks(world_size, compare_many, num_cases, world_size, timeout_s=280))


class Counting(nn.Module):
    """A model that is not transformers', which counts the activations that are alive at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.num_alive = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for layer in self.layers:
            for function in (layer, partial(torch.mul, other=2), torch.sin):
                x = function(x)
                made.append(ref(x))
        self.num_alive = sum(one() is not None for one in made)
        return x


@pytest.mark.parametrize("with_backward", [True, False])
def test_following_rows_keeps_no_activations(with_backward: bool) -> None:
    model, x = Counting(), torch.rand(3, 4)
    with torch.set_grad_enabled(with_backward):
        model(x)
        num_alive = model.num_alive
        run_recorded(model, (x,), {"target": x}, nn.functional.mse_loss, with_backward=with_backward)
    assert model.num_alive == num_alive == (10 if with_backward else 1)
