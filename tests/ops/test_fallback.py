"""Without the extension the same classes run over torch operations, and pass the same tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "MEMFERRY_NO_NATIVE": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_variable_forces_the_fallback_and_says_so():
    code = (
        "import torch; torch.set_num_threads(2)\n"
        "from memferry_ascend import hostmath as h\n"
        "h.set_threads(5); h.shutdown()\n"
        "print(h.NATIVE, h.simd_level(), h.threads(), torch.get_num_threads())"
    )
    done = python("-c", code)
    assert done.stdout.split() == ["False", "torch", "2", "2"], done.stderr


@pytest.mark.skipif(
    os.environ.get("MEMFERRY_NO_NATIVE", "0") not in ("", "0"), reason="this run is the fallback's"
)
def test_the_fallback_passes_the_same_tests():
    files = [str(HERE / name) for name in ("test_remainder.py", "test_adam.py", "test_sums.py")]
    done = python("-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
