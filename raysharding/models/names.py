"""`clean_name`: FQNs as they were before parts of a model were wrapped."""

from __future__ import annotations

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which FSDP1, activation checkpointing and torch.compile keep what they wrap."""


def clean_name(name: str) -> str:
    """The FQN that a name had before anything was wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
