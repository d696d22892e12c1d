"""Entry point of `python -m raysharding`."""

from __future__ import annotations

import sys

from raysharding.cli import main

if __name__ == "__main__":
    sys.exit(main())
