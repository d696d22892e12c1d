"""`group.bug_report()`: what is in it, of a group that is broken, and what is not: secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from raysharding import GroupError, Placement
from raysharding.group.launch.masking import Masker, is_secret_name
from tests.group.conftest import make_group

pytestmark = pytest.mark.usefixtures("nothing_left")

SECRET = 'pl4nted-"in-the/environment'
KEY = "another-planted-value"
BEARER = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


def fail_with_secrets(secret: str, key: str, bearer: str) -> None:
    import os
    import sys

    from raysharding import current_worker

    print(f"hello from the rank, I have {os.environ['SERVICE_KEY']} and {secret!r}", flush=True)
    print(f"GET https://user:hunter22@host/a?X-Amz-Signature={key}&region=eu", file=sys.stderr, flush=True)
    print(f"headers: {{'Authorization': 'Bearer {bearer}'}}; db_password={key}", file=sys.stderr, flush=True)
    if current_worker().rank == 1:
        raise RuntimeError(f"cannot open s3://{key}:{key}@bucket/x?sig={key}")
    import torch.distributed as dist

    dist.barrier()


def test_of_a_broken_group(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("UNLISTED", "an unlisted value")
    placement = Placement(runtime_env={"env_vars": {"SERVICE_KEY": KEY}})
    group = make_group(checkpoint, placement=placement)
    with pytest.raises(GroupError):
        group.call(fail_with_secrets, SECRET, KEY, BEARER)
    path = group.bug_report(tmp_path / "report.zip")
    assert path == str(tmp_path / "report.zip")
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("raysharding: bug report: ")]
    assert len(told) == 1
    assert "stacks and logs of 2 ranks" in told[0]
    with zipfile.ZipFile(path) as report:
        parts = {name: report.read(name).decode() for name in report.namelist()}
    assert json.loads(parts["status.json"])["state"] == "broken"
    assert "RuntimeError: cannot open s3://***@bucket/x?sig=***" in parts["error.txt"]
    assert "in fail_with_secrets" in parts["error.txt"]
    assert "rank 1 (node " in parts["error.txt"]
    assert all("hello from the rank, I have *** and '***'" in parts[f"logs/rank-{rank}.txt"] for rank in (0, 1))
    assert "https://***@host/a?X-Amz-Signature=***" in parts["logs/rank-0.txt"]
    assert sorted(name for name in parts if name.startswith("stacks/")) == ["stacks/rank-0.txt", "stacks/rank-1.txt"]
    versions = json.loads(parts["versions.json"])
    assert {"driver", f"ranks on {group.ranks[0].node_ip}"} <= set(versions)
    assert all("torch" in one for one in versions.values())
    assert "2 ranks on cpu, broken" in parts["group.txt"]
    assert "SERVICE_KEY" in parts["group.txt"]
    whole = "\n".join(parts.values())
    for secret in (SECRET, json.dumps(SECRET)[1:-1], KEY, BEARER, "hunter22", "an unlisted value"):
        assert secret not in whole
    with pytest.raises(FileExistsError):
        group.bug_report(path)
    group.shutdown()
    assert zipfile.ZipFile(group.bug_report(tmp_path)).namelist() == list(parts)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://AKIDEXAMPLE:abc/def+x=@bucket/key?region=eu-west-1", "s3://***@bucket/key?region=eu-west-1"),
        ("https://h/x?a=1&sig=abc%2F&se=2", "https://h/x?a=***&sig=***&se=***"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=***"),
        ("using hf_abcdefghijklmnopqrst now", "using *** now"),
        ('{"aws_secret_access_key": "a\\"b, c", "n": 1}', '{"aws_secret_access_key": "***", "n": 1}'),
        ("--api-key abc --steps 3", "--api-key *** --steps 3"),
        ("Authorization: Basic dXNlcjpw\nnext", "Authorization: ***\nnext"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        ("password: hunter22", "password: ***"),
        ("tokens/s 81.5, token 3 of 9, key 'lm_head' is missing", None),
        ("KeyError: 'model.embed_tokens.weight'", None),
        ("http://10.0.0.1:8265/a@b and user@host, pad_token_id=0", None),
        ('File "/a/token.py", line 3, in monkey', None),
    ],
)
def test_what_is_masked(text: str, masked: str | None) -> None:
    assert Masker([])(text) == (text if masked is None else masked)


def test_which_variables_are_secret() -> None:
    secret = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "OPENAI_API_KEY", "DB_PASSWORD", "api-key")
    plain = ("TOKENIZERS_PARALLELISM", "RAY_AUTH_MODE", "PWD", "KEYBOARD", "OMP_NUM_THREADS")
    assert [name for name in (*secret, *plain) if is_secret_name(name)] == list(secret)
    hidden: Any = Masker([{"HF_TOKEN": "abcdef", "NCCL_DEBUG": "INFO999", "X_KEY": "1"}])
    assert hidden("abcdef INFO999 1 abcdef") == "*** INFO999 1 ***"
