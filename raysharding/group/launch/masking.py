"""Masks secrets in text that leaves the machine: tokens, keys and passwords in URIs, settings, headers and logs.

A mask takes rather too much than too little: `pad_token='<pad>'` is masked, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"
_MIN_CHARS = 6
"""Shorter values of the environment are not masked wherever they stand: they would be found inside other words."""
_SECRET_PARTS = {
    "token",
    "tokens",
    "key",
    "keys",
    "apikey",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credentials",
}
_NAMED = (
    r"(?:[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|signature|api_?key|[_-]key(?:[_-]?id)?)|auth|pwd)"
)
_PATTERNS = (
    # A key in several lines.
    (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", MASK),
    # scheme://user:password@host; a password may hold what should be percent-encoded, but scheme://host:80/a@b has none
    (r"(?i)\b([a-z][a-z0-9+.-]*://)(?:[^\s/'\"]+|[^\s/@:'\"]+:(?!\d+/)[^\s'\"]*)@", rf"\1{MASK}@"),
    # ?name=value&name=value of a URI, but for what says where a store is
    (r"(?i)([?&;](?!(?:region|scheme|endpoint_override|revision)=)[\w.%~-]+=)[^\s&#'\"<>]+", rf"\1{MASK}"),
    # Authorization: Bearer value
    (r"(?i)\b(authorization\b['\"]?\s*[:=]\s*['\"]?)[^\r\n'\",}]+", rf"\1{MASK}"),
    (r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", rf"\1 {MASK}"),
    # name=value, name: value, "name": "value", --name value
    (rf"(?i)\b({_NAMED}\\?['\"]?\s*(?:=|:(?!//))\s*)(\\?['\"])(?:(?!\2)(?:\\.|.))*\2", rf"\1\2{MASK}\2"),
    (rf"(?i)\b({_NAMED}\\?['\"]?\s*(?:=|:(?!//))\s*)[^\s'\",;)}}\]]+", rf"\1{MASK}"),
    (rf"(?i)(--{_NAMED}\s+)\S+", rf"\1{MASK}"),
    # Forms that well-known services give to their tokens.
    (r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|ya29\.|AIza)[\w.-]{10,}", MASK),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", MASK),
    (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", MASK),
)


def is_secret_name(name: str) -> bool:
    """Return True if a variable of this name holds a secret: `HF_TOKEN` does, `TOKENIZERS_PARALLELISM` does not."""
    return not _SECRET_PARTS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


class Masker:
    """Masks the values of secret variables wherever they stand, and what has the form of a secret."""

    def __init__(self, environments: Iterable[Mapping[str, Any]]) -> None:
        """Collect the secrets.

        Args:
            environments: Name → value, of this process and of runtime environments.
        """
        values = {
            str(value)
            for environment in environments
            for name, value in environment.items()
            if is_secret_name(name) and len(str(value)) >= _MIN_CHARS
        }
        # As they stand in JSON, in a `repr` and in a URI.
        forms = {
            form for value in values for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, ""))
        }
        self._literals = sorted(forms, key=len, reverse=True)  # the longest first: one may hold another

    def __call__(self, text: str) -> str:
        """Return the text with every secret replaced by `***`."""
        for literal in self._literals:
            text = text.replace(literal, MASK)
        for pattern, replacement in _PATTERNS:
            text = re.sub(pattern, replacement, text)
        return text

    def data(self, value: Any) -> Any:
        """Return data for JSON with every text masked; masks in the JSON itself could break its syntax."""
        if isinstance(value, Mapping):
            return {key: MASK if is_secret_name(str(key)) else self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return self(value) if isinstance(value, str) else value
