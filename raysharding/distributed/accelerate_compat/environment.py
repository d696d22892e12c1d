"""Environment variables of accelerate's launcher for FSDP, and the switch that transformers reads."""

from __future__ import annotations

import os
from enum import Enum
from typing import TypeVar

PREFIX = "FSDP_"
"""Prefix of the variables that set fields of the plugin."""

_USE_FSDP = "ACCELERATE_USE_FSDP"
_RAM_EFFICIENT = PREFIX + "CPU_RAM_EFFICIENT_LOADING"
_FLAGS = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True) | dict.fromkeys(
    ("n", "no", "f", "false", "off", "0"), False
)
Member = TypeVar("Member", bound=Enum)


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


def announce_ram_efficient_loading(enabled: bool) -> None:
    """Set the switch of transformers to a plugin's `cpu_ram_efficient_loading`."""
    os.environ[_RAM_EFFICIENT] = str(enabled)


def variable(name: str, default: str | None = None) -> str | None:
    """Return the value of `FSDP_<name>`."""
    return os.environ.get(PREFIX + name, default)


def flag(name: str) -> bool:
    """Return True if `FSDP_<name>` is a true value; False if the variable is not set."""
    return parse_flag(PREFIX + name, os.environ.get(PREFIX + name, "false"))


def parse_flag(where: str, text: str) -> bool:
    """Return a truth value, in any spelling that accelerate takes.

    Raises:
        ValueError: Any other text; `where` names it.
    """
    value = _FLAGS.get(text.lower())
    if value is None:
        raise ValueError(f"{where}={text!r}: not a truth value; use one of {', '.join(_FLAGS)}")
    return value


def whole_number(name: str, default: int) -> int:
    """Return `FSDP_<name>` as an int.

    Raises:
        ValueError: The value is not a whole number.
    """
    text = variable(name)
    try:
        return default if text is None else int(text)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}={text!r}: give a whole number") from error


def parse_member(where: str, value: object, kind: type[Member]) -> Member:
    """Return a member of `kind`, given the member, its name in any case, or its number (an int, or digits as text).

    Args:
        where: Field or variable, for the message.
        value: The value.
        kind: The enum.

    Raises:
        ValueError: The enum has no such member.
    """
    if isinstance(value, kind):
        return value
    public = {member.name.lstrip("_"): member for member in kind}  # torch's ShardingStrategy has a private name
    named = {member.name: member for member in kind} | public
    numbered = {member.value: member for member in kind}
    found: Member | None = None
    if isinstance(value, str):
        found = numbered.get(int(value)) if value.isdecimal() else named.get(value.upper())
    elif isinstance(value, int) and not isinstance(value, bool):
        found = numbered.get(value)
    if found is None:
        raise ValueError(
            f"{where}={value!r}: use one of {', '.join(public)}, in any case, its number, or a {kind.__name__}"
        )
    return found
