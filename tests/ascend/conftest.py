"""Tests that need torch_npu run on emulated NPUs, in a process of their own.

torch_npu changes torch for its whole process, and the emulator reads its settings once. So a module here that
says

    EMULATED = {"devices": 2}

is collected as usual, but its tests run in one child process with these settings (shared by all modules
that ask for the same, and forked from one that has imported torch_npu), and their reports are shown as if they
had run here. A module without EMULATED runs here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import emulator

REPORTS = "MEMFERRY_EMULATED_REPORTS"  # set in the child: where its reports go
CACHE = "MEMFERRY_EMULATED_CACHE"  # set in the child: what this session has found out so far
TIMEOUT = 600.0  # seconds for one child
Reports = dict[str, list[dict[str, Any]]]  # by node id, as pytest serialises them
results = pytest.StashKey[Reports]()
failures = pytest.StashKey[dict[str, str]]()


def settings_of(item: pytest.Item) -> dict[str, object] | None:
    """What the item's module asks of the emulator."""
    module = item.getparent(pytest.Module)
    return getattr(module.obj, "EMULATED", None) if module else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run on this machine, with the reason."""
    reason = emulator.why_not()
    if reason:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def cache_of(config: pytest.Config) -> Path:
    """One cache for this session's processes: which kinds of layers may read host memory is asked once for each stack."""
    if CACHE in os.environ:
        return Path(os.environ[CACHE])
    return config._tmp_path_factory.getbasetemp() / "ascend-cache"  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def profile_cache(pytestconfig: pytest.Config) -> Path:
    return cache_of(pytestconfig)


def run_child(items: list[pytest.Item], settings: dict[str, object]) -> tuple[Reports, str]:
    """Run the items in one emulated process; their reports by node id, and what the process printed."""
    config = items[0].config
    with tempfile.TemporaryDirectory() as folder:
        reports, chosen, said = (Path(folder, name) for name in ("reports", "chosen", "said"))
        chosen.write_text("\n".join(item.nodeid for item in items))
        # What the emulator says is captured with each test; this copy outlives a child that dies.
        environ = {REPORTS: str(reports), CACHE: str(cache_of(config)), **settings.get("environ", {})}  # type: ignore[dict-item]
        command = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=short", f"@{chosen}"]
        try:
            with contextlib.chdir(config.rootpath):
                child = emulator.run(
                    command,
                    check=False,
                    timeout=TIMEOUT,
                    **(settings | {"environ": environ, "report": said}),  # type: ignore[arg-type]
                )
            printed = f"exit status {child.returncode}\n{child.stdout[-3000:]}\n{child.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            printed = f"stopped after {TIMEOUT:.0f} s"
        found: Reports = {}
        if reports.exists():
            for line in reports.read_text().splitlines():
                data = json.loads(line)
                found.setdefault(data["nodeid"], []).append(data)
        lines = said.read_text().splitlines() if said.exists() else []
    return found, "\n".join([*lines[-20:], printed])


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Show the reports of the child in place of running the test here."""
    settings = settings_of(item)
    if REPORTS in os.environ or settings is None or emulator.why_not():
        return None
    session = item.session
    found = session.stash.setdefault(results, {})
    broken = session.stash.setdefault(failures, {})
    if item.nodeid not in found and item.nodeid not in broken:
        together = [other for other in session.items if settings_of(other) == settings]
        reports, output = run_child(together, settings)
        found.update(reports)
        # A test without a complete set of reports took the process down, or never ran because of that.
        broken.update(
            {
                o.nodeid: output
                for o in together
                if len(reports.get(o.nodeid, ())) < 3 and not skipped(reports, o)
            }
        )
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in found.get(item.nodeid, ()):
        report = pytest.TestReport._from_json(data)
        hook.pytest_runtest_logreport(report=report)
    if item.nodeid in broken:
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            {},
            "failed",
            f"the emulated process ended early\n{broken[item.nodeid]}",
            "call",
        )
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What an earlier test set up for this package or folder ends here if the next test is not in it.
    session._setupstate.teardown_exact(nextitem)
    return True


def skipped(reports: Reports, item: pytest.Item) -> bool:
    """A skipped or failed set-up has two reports, not three."""
    return any(r["outcome"] != "passed" and r["when"] == "setup" for r in reports.get(item.nodeid, ()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child: write each report down."""
    path = os.environ.get(REPORTS)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(report._to_json()) + "\n")


@pytest.fixture(scope="session", autouse=True)
def npu() -> None:
    """torch_npu, in the child only."""
    if REPORTS in os.environ:
        import torch_npu  # noqa: F401
