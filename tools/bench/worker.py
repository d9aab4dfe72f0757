"""What one process of the harness does (processes.py starts it): results, a JSON line each.

A job names the model, the system (or "bound") and several settings; each result is written as soon as it is known, so
that what is done survives what comes after it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .bound import bound
from .measure import Timing, row
from .systems import Setup


def run(job: dict[str, Any], out: Path) -> None:
    """Every setting of the job in turn."""
    timing = Timing(**job["timing"])
    for fields in job["setups"]:
        setup = Setup(**fields | {"assist": tuple(fields["assist"])})
        if job["system"] == "bound":
            result = bound(job["model"], setup, timing)
        else:
            result = row(job["model"], job["system"], setup, timing)
        with out.open("a") as file:
            file.write(json.dumps(result, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
