"""The benchmark of calls runs, and its figures are of what they say."""

from __future__ import annotations

import pytest

from raysharding import ShardedModelGroup
from tests.bench.calls import lines, measure


@pytest.mark.full
def test_figures(group: ShardedModelGroup) -> None:
    found = measure(group, rounds=2, calls=5, steps=2, step_s=0.01)
    arms, ratios = ["empty", "queued", "bare", "steps", "looped"], ["empty ÷ bare", "queued ÷ bare", "overhead"]
    assert list(found) == arms + ratios
    assert all(found[name].low > 0 for name in arms)
    assert found["steps"].low > found["empty"].low, "a step takes longer than nothing"
    assert found["queued"].median < found["empty"].median, "nobody waits for each"
    assert all(figure.num_rounds == 2 for figure in found.values())
    block = "\n".join(lines(2, found, 0.0, 0.0))
    assert "asked: at most 2.3" in block
    assert "asked: at most 1.5" in block
