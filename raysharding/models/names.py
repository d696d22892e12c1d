"""`clean_name`: FQNs without the names that wrappers add."""

from __future__ import annotations

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which FSDP1, activation checkpointing and torch.compile hold the wrapped module."""


def clean_name(name: str) -> str:
    """Return the FQN that a parameter or module had before modules were wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
