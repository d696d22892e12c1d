"""The benchmark over slow links: its table, and one load. Needs root, else skipped."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.local.hosts import why_unavailable
from tests.bench.wire import ROOT, Transfer, table

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")


def test_table_relates_seconds_to_what_the_link_needs() -> None:
    rounds = [Transfer(index, "scatter", 2.0 + index, 1.5, 95_000_000, 100_000_000, 800.0) for index in range(3)]
    row = table(rounds).splitlines()[1].split()
    assert row[:2] == ["scatter", "3.000"]
    assert row[5:8] == ["95.4", "1.000", "3.000"]
    assert row[-2:] == ["1.500", "3.158"]


@pytest.mark.full
@pytest.mark.timeout(100)
def test_a_load_over_slow_links(tmp_path: Path) -> None:
    arguments = ["--hosts", "2", "--rate-mbit", "400", "--kind", "odd", "--size-gib", "0.025", "--rounds", "1"]
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "tests.bench.wire", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=95
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("scatter", "gloo-send"))]
    assert [row[0] for row in rows] == ["scatter", "gloo-send"]
    for row in rows:
        sent_mib, need_s, ratio = (float(field) for field in row[5:8])
        assert 13 < sent_mib < 14, "half of the checkpoint leaves rank 0's host"
        assert need_s == pytest.approx(sent_mib * (1 << 20) * 8e-6 / 400, rel=0.01)
        assert ratio > 0.95, f"faster than the link: {result.stdout}"
    assert time.monotonic() - started > float(rows[0][1])
