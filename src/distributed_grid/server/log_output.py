"""Log of the daemon, as the section `logging` of the config says: level, text or JSON, a file or standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import IO

from distributed_grid.config.sections import Logging
from distributed_grid.errors import GridError
from distributed_grid.log_rate_limit import LogRateLimit

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in UTC, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info or record.exc_text:
            fields["traceback"] = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
        return json.dumps(fields)


def apply_log_settings(settings: Logging, *filters: logging.Filter) -> None:
    """Log as the settings say from now on, what these filters let pass. Raises GridError where the file cannot be
    opened."""
    stream: IO[str] = sys.stderr
    if settings.file is not None:
        try:
            stream = open(os.path.expanduser(settings.file), "a", encoding="utf-8")  # noqa: SIM115 (open for good)
        except OSError as failure:
            raise GridError(f"the log {settings.file} cannot be opened: {failure.strerror}") from failure
    handler = logging.StreamHandler(stream)
    for one in (LogRateLimit(), *filters):
        handler.addFilter(one)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
