"""The benchmark harness behind `memferry bench`: models, systems, the bound, records and figures.

Installed as `memferry_ascend.bench`. `docs/benchmarks/README.md` says how to run it and what each figure means.
"""

from __future__ import annotations

from .command import register

__all__ = ["register"]
