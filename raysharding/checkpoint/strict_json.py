"""JSON as headers and indexes need it: what Python's parser lets pass, such as a key given twice, is refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from raysharding.errors import shown

_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a surrogate pair can only come from an escape; whole ones may, and are looked at once more."""
_MAX_DIGITS: Final = 300
"""Of a whole number that fits a double for certain."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object, strictly.

    Args:
        data: UTF-8 text.

    Raises:
        ValueError: not UTF-8, not JSON, not an object, a key given twice, a NaN or Infinity, a number that no double
            holds, a string that is not Unicode text, or nested too deep. The message says which.
    """
    try:
        # str first: json.loads(bytes) would guess at UTF-16 and UTF-32, which other readers of the format do not.
        text = data.decode("utf-8")
        parsed = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
        if _HALF_PAIR.search(text) and not is_text(json.dumps(parsed, ensure_ascii=False)):
            raise ValueError("holds a string that is not Unicode text")
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"is a JSON {type(parsed).__name__}, not an object")
    return parsed


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8. Half a surrogate pair (JSON can spell one) cannot."""
    return text.isascii() or not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a key given twice: readers differ on which one counts."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"gives the key {shown(key)} twice")
            seen.add(key)
    for key in result:
        if not is_text(key):
            raise ValueError(f"has the key {shown(key)}, which is not Unicode text")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"holds {text}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"holds the number {text[:20]}..., which no double can hold")
    return number


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        _finite(text)
    return int(text)
