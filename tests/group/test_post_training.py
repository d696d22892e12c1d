"""`examples/post_training.py`: the reward rises, the policy moves away from its reference, and a picture shows both."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import post_training


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("cluster", "nothing_left")
def test_the_reward_rises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rewards = post_training.main()
    assert len(rewards) == post_training.STEPS
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.8
    printed = capsys.readouterr().out
    assert "KL from the reference" in printed
    assert "plan kept" in printed
    assert (tmp_path / "post_training.png").read_bytes().startswith(b"\x89PNG")
