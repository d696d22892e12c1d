"""The benchmark of calls runs, and its figures are of what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysharding import ShardedModelGroup
from tests.bench.calls import Plain, lines, measure
from tests.conftest import make_group


@pytest.mark.full
def test_figures(group: ShardedModelGroup, checkpoint: Path) -> None:
    with make_group(checkpoint) as other:
        plain = Plain(other)
        found = measure(group, plain, rounds=2, calls=5, steps=2, step_s=0.01)
        plain.close()
    assert list(found) == ["empty", "plain", "bare", "steps", "looped", "supervised", "command", "overhead"]
    assert all(found[name].low > 0 for name in ("empty", "plain", "bare", "steps", "looped"))
    assert found["steps"].low > found["empty"].low, "a step takes longer than nothing"
    assert all(figure.num_rounds == 2 for figure in found.values())
    block = "\n".join(lines(2, found, 0.0, 0.0))
    assert "asked: at most 1.5 ms" in block
    assert "asked: at most 2 %" in block
