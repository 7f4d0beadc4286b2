"""Logs: one JSON object a line on stderr. Prompts, pixels, metadata and keys are never logged."""

from __future__ import annotations

import datetime
import json
import logging
import sys

__all__ = ["fields", "set_up_logs"]


def fields(**values: object) -> dict[str, dict[str, object]]:
    """`extra=` of a record: further fields of its line."""
    return {"fields": values}


def set_up_logs() -> None:
    """Send the records of this process to stderr, in place of any other handler. For the command line alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
