"""The switch by which transformers loads models on rank 0 only."""

from __future__ import annotations

import os

_USE_FSDP = "ACCELERATE_USE_FSDP"
_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the switch by which transformers loads models on rank 0 only, as accelerate's function of this name does.

    Each rank calls this before `from_pretrained`. Not collective. Sets `FSDP_CPU_RAM_EFFICIENT_LOADING`, and
    `ACCELERATE_USE_FSDP` if that variable is not set. The effect depends on transformers: accelerate's
    documentation says that only the first rank of a host gets values; transformers 5.23 (seen) reads on every rank what
    the files hold, and leaves only what they lack on meta on the others. `fsdp2_prepare_model` and
    `fsdp2_load_full_state_dict` bring rank 0's values to the others in both cases; `load_checkpoint` needs no such
    switch, and no rank holds the whole model.

    An existing `ACCELERATE_USE_FSDP` is kept, `false` too: transformers then loads on every rank.
    """
    os.environ.setdefault(_USE_FSDP, "True")
    os.environ[_RAM_EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers read checkpoints on every rank again, as accelerate's function of this name does.

    Each rank calls this. Not collective. `ACCELERATE_USE_FSDP` is not changed: it also marks a run with FSDP.
    """
    os.environ[_RAM_EFFICIENT] = "False"
