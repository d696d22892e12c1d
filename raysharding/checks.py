"""Checks of arguments that several rooms take."""

from __future__ import annotations

from typing import Any


def check_int(name: str, value: Any, *, least: int = 1) -> None:
    """Raise if a value is not an integer of at least `least`.

    Args:
        name: Name of the argument, for the error.
        value: The value; a bool is no integer.
        least: Smallest valid value.

    Raises:
        ValueError: The value is no integer, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, {least} or more")
