"""The record of `run.sh`: `record.json`, and `record.txt` with the same lines for people, both anew with each line.

`python -m tests.gpu.record begin FOLDER DEVICE`, then, after each part, `... end FOLDER PART SECONDS STATUS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FIGURE = re.compile(r"÷.*\d|MFU|of device memory")
"""Lines of a part's output that are figures of its benchmarks."""
NOT_REACHED = 255
"""Status of a part for which no time was left."""
MOST = 600
"""Characters of a figure."""


class Skipped(Exception):
    """What a check raises that this device or environment cannot run; says why."""


class Record:
    """The lines of one part, in the record of a folder."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        self.part = part
        self.failures = 0

    @classmethod
    def of_this_part(cls) -> Record:
        """That of the part which `run.sh` has started this process for; without it, in the working directory."""
        return cls(Path(os.environ.get("RECORD", ".")), os.environ.get("PART", "by hand"))

    def check(self, what: str, run: Callable[[], object]) -> None:
        """Run a check; a `str` that it returns is its figure. Until it ends, its line says `running`."""
        begun = time.monotonic()
        figure: object = None
        index = self.line(what, "running")
        try:
            found = run()
            figure, outcome = found if isinstance(found, str) else None, "ok"
        except Skipped as reason:
            figure, outcome = reason, "skipped"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            print(f"--- {what}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            figure, outcome = f"{type(error).__name__}: {error}", "FAILED"
            self.failures += 1
        self.line(what, outcome, time.monotonic() - begun, figure, index)

    def line(
        self, what: str, outcome: str, seconds: float | None = None, figure: object = None, index: int | None = None
    ) -> int:
        """Add a line, or replace that of an index; returns its index."""
        with self.opened() as record:
            lines = record["lines"]
            line = {"at_s": round(time.time() - record["begun"], 1), "part": self.part, "what": what}
            line["outcome"] = outcome
            if seconds is not None:
                line["seconds"] = round(seconds, 3)
            if figure is not None:
                line["figure"] = _in_one_line(str(figure))
            if index is None:
                lines.append(line)
            else:
                lines[index] = line
            return len(lines) - 1

    def note(self, **facts: object) -> None:
        """Add facts to the record's head."""
        with self.opened() as record:
            record["head"].update({name: str(fact) for name, fact in facts.items()})

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """The record, which is written at the end; other processes wait."""
        path = self.folder / "record.json"
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = json.loads(path.read_text()) if path.exists() else {"begun": time.time(), "head": {}, "lines": []}
            yield record
            for name, text in (("record.json", json.dumps(record, indent=1)), ("record.txt", as_text(record))):
                partial = self.folder / f"{name}.partial"
                partial.write_text(text + "\n")
                partial.rename(self.folder / name)


def _in_one_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    parts = lines if len(lines) < 4 else [lines[0], "...", lines[-1]]  # of a traceback the last says what it was
    return " | ".join(part[: MOST // len(parts)] for part in parts)


def as_text(record: dict[str, Any]) -> str:
    """Return a record as lines, in the order in which they ended."""
    head = [f"{name}: {fact}" for name, fact in record["head"].items()]
    return "\n".join([*head, "", *(_as_text(line) for line in sorted(record["lines"], key=lambda line: line["at_s"]))])


def _as_text(line: dict[str, Any]) -> str:
    seconds = f": {line['seconds']:.1f} s" if "seconds" in line else ""
    figure = f"; {line['figure']}" if "figure" in line else ""
    return f"[{line['at_s']:6.1f}] {line['outcome']:<9} {line['part']}: {line['what']}{seconds}{figure}"


def begin(folder: Path, device: str) -> None:
    """Start a record anew, with what is known without torch."""
    for name in ("record.json", "record.txt"):
        (folder / name).unlink(missing_ok=True)
    facts = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "commit": os.environ.get("COMMIT") or _commit()}
    facts["device"] = device
    query = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"
    facts["card"] = (_output(query) or "none") if device == "cuda" else "none"
    facts["machine"] = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
    for package in ("torch", "ray", "transformers", "peft", "nvidia-nccl-cu13"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    Record(folder, "").note(**facts)


def _commit() -> str:
    commit = _output("git rev-parse --short HEAD") or "unknown (set COMMIT)"
    return commit + (" and changes that are not committed" if _output("git status --porcelain") else "")


def _output(command: str) -> str:
    try:
        return subprocess.run(command.split(), capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def end(folder: Path, part: str, seconds: float, status: int) -> bool:
    """Record how a part has ended; what it was at when it was killed is what has failed. True if all was well."""
    record = Record(folder, part)
    outcome = {0: "ok", 124: "timed out", 137: "timed out", NOT_REACHED: "not reached"}.get(status, "FAILED")
    output = folder / f"{part}.txt"
    has_output = status != NOT_REACHED and output.exists()  # else there may be that of an earlier run
    lines = output.read_text(errors="replace").splitlines() if has_output else []
    with record.opened() as found:
        own = [line for line in found["lines"] if line["part"] == part]
        for line in own:
            if line["outcome"] == "running":
                line |= {
                    "outcome": "timed out" if outcome == "timed out" else "FAILED",
                    "figure": "the part ended here",
                }
        failed = sum(line["outcome"] in ("FAILED", "timed out") for line in own)
    for text in filter(FIGURE.search, lines):
        record.line(text.strip(), "figure")
    if failed and outcome == "ok":
        outcome = "FAILED"
    said = f"{len(own)} checks" if own else next((text.strip() for text in reversed(lines) if text.strip()), "")
    if outcome != "ok":
        said = f"status {status}, {failed} checks failed; see {output.name}; {said}"
    record.line(f"all of {part}", outcome, seconds, said)
    return outcome == "ok"


if __name__ == "__main__":
    verb, out, *rest = sys.argv[1:]
    if verb == "begin":
        begin(Path(out), *rest)
    else:
        sys.exit(not end(Path(out), rest[0], float(rest[1]), int(rest[2])))
