"""The controller's process imports no torch: it is ready in a second, and small."""

from __future__ import annotations

import pytest

from tests.test_layering import run_python


@pytest.mark.parametrize(
    "names",
    [
        "raysharding.group.messages import Command",
        "raysharding.group.cluster import reserve",
        "raysharding.group.controller import REMOTE_CONTROLLER",
        "raysharding.group.rank import Assignment, RankActor, Title",
    ],
)
def test_what_the_controller_imports_needs_no_torch(names: str) -> None:
    heavy = ("torch", "transformers", "pyarrow")
    run_python(f"import sys\nfrom {names}\nfound = {{*{heavy!r}}} & {{*sys.modules}}\nassert not found, sorted(found)")
