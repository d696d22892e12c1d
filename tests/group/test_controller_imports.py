"""The controller's process imports no torch: it is ready in a second, and small."""

from __future__ import annotations

import pytest

from tests.test_layering import run_python


@pytest.mark.parametrize("room", ["messages", "cluster", "rank"])
def test_what_the_controller_imports_needs_no_torch(room: str) -> None:
    heavy = ("torch", "transformers", "pyarrow")
    run_python(
        f"import sys, raysharding.group.{room}\n"
        f"found = {{*{heavy!r}}} & {{*sys.modules}}\n"
        "assert not found, sorted(found)"
    )
