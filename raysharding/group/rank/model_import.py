"""`ModelImport`: imports the code of a transformers model while the rank waits for the driver and other ranks."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from raysharding.checkpoint import Checkpoint
from raysharding.errors import PlanError
from raysharding.imports import paused_gc
from raysharding.models import import_model


class ModelImport(threading.Thread):
    """Imports on a thread; the connections of a rendezvous, which take as long on GPUs, release the GIL."""

    def __init__(self, model: str | None, config: bytes) -> None:
        """Start the thread.

        Args:
            model: Name of a transformers auto class; `None` for the class that config.json names.
            config: Encoded `Checkpoint`; only its config.json is used.
        """
        super().__init__(name="model import", daemon=True)
        self._model, self._config = model, config
        self.seconds = 0.0
        """Seconds of the import, once it has ended."""
        self.start()

    def run(self) -> None:
        """Import the code of the model."""
        begun = time.monotonic()
        with suppress(PlanError, ImportError), paused_gc():  # `build` raises it again, as the error of a call
            import_model(self._model, Checkpoint.from_json(self._config))
        self.seconds = time.monotonic() - begun
