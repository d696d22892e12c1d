"""What a group is made of: a checkpoint, or LoRA adapters and the checkpoint that they name as their base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.errors import CheckpointError
from raysharding.group.locate import anchored, open_here, open_on_a_node
from raysharding.group.spec import GroupSpec
from raysharding.models import Adapted


@dataclass(frozen=True)
class Opened:
    """What a group is made of."""

    model: Any
    """What the ranks build: as the user gave it, or an `Adapted`."""
    base: Checkpoint
    """The checkpoint that it is built for."""
    adapters: Checkpoint | None
    """What is loaded after it; `None` where the base is all."""

    @property
    def num_bytes(self) -> int:
        """Bytes to load."""
        return self.base.num_bytes + (0 if self.adapters is None else self.adapters.num_bytes)


def opened_here(spec: GroupSpec) -> Opened | None:
    """Open it in this process; `None` where this machine does not see all of it.

    Raises:
        CheckpointError: It is not valid, or adapters name no base that can be opened.
        ValueError: The adapters in the files are others than `peft_config` says.
    """
    return _opened(spec, open_here)


def opened_on_a_node(spec: GroupSpec, start_s: float) -> Opened:
    """Open it on the first node of the cluster that sees its path; as `opened_here`.

    Args:
        spec: What was asked for.
        start_s: Deadline for the nodes' answers.
    """
    opened = _opened(spec, lambda path: open_here(path) or open_on_a_node(path, start_s))
    assert opened is not None, "what no node sees is an error"
    return opened


def opened_without_cluster(spec: GroupSpec) -> Opened:
    """Open it in this process, which is the only one that could; as `opened_here`."""
    opened = _opened(spec, open_checkpoint)
    assert opened is not None, "what is not seen is an error"
    return opened


def _opened(spec: GroupSpec, open_one: Callable[[str], Checkpoint | None]) -> Opened | None:
    given = open_one(spec.checkpoint)
    if given is None:
        return None
    if given.adapter is None:
        model = spec.model
        if isinstance(model, Adapted):
            model = replace(model, base=anchored(spec.checkpoint))
        return Opened(model, given, None)
    adapted = Adapted.of_files(spec.model, given)
    base = adapted.base or given.adapter.get("base_model_name_or_path")
    how = "give the base's path and peft_config=LoraConfig.from_pretrained(adapters), then group.load(adapters)"
    if not isinstance(base, str) or not base or "\0" in base:
        what = f"adapter_config.json names no base model (base_model_name_or_path={base!r}): {how}"
        raise CheckpointError(what, path=given.path)
    try:
        found = open_one(base)
    except CheckpointError as error:
        error.add_note(f"raysharding: {given.path} names this as the base model; if it is elsewhere now, {how}")
        raise
    if found is None:
        return None
    if found.adapter is not None:
        raise CheckpointError(f"names {base} as its base model, which holds adapters, too: {how}", path=given.path)
    return Opened(replace(adapted, base=anchored(base)), found, given)
