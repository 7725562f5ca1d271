"""A run's log, in its folder: slower paths that were taken, and chunks that were halved."""

from __future__ import annotations

import logging
from pathlib import Path

#: Where warnings of a run are written, next to its other files; there where there were any.
RUN_LOG = "run.log"

_logger = logging.getLogger("dpscaffold")


class RunLog(logging.FileHandler):
    """Writes the package's warnings to a run's folder while the run goes on.

    They are still logged where they would be without it: to the handlers of whoever set up logging,
    or else on the error output. A log that cannot be written ends no run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / RUN_LOG, encoding="utf-8", delay=True)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        _logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """To the file, and to the error output where nobody else listens."""
        others = [one for one in _logger.handlers if not isinstance(one, RunLog)]
        heard = others or (_logger.propagate and logging.getLogger().handlers)
        if not heard and logging.lastResort is not None:
            logging.lastResort.handle(record)
        super().emit(record)

    def note(self, text: str) -> None:
        """Write what was said before the run had a folder, to the file alone."""
        record = logging.LogRecord(_logger.name, logging.WARNING, __file__, 0, text, (), None)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: the run goes on."""

    def close(self) -> None:
        """Write no more."""
        _logger.removeHandler(self)
        super().close()
