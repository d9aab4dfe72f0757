"""Run the tests in two processes: those on emulated NPUs, and all others. Each takes about half of the time and one core.

    python tests/side_by_side.py [ARGUMENTS OF PYTEST]

What the first prints is shown when both have ended. The exit status is 0 if both are 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

ASCEND = "tests/ascend"


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile() as said:
        cache = "cache_dir=build/pytest-ascend"  # two processes may not write one
        beside = subprocess.Popen([*pytest, "-o", cache, ASCEND], stdout=said, stderr=subprocess.STDOUT)
        try:
            status = subprocess.run([*pytest, "--ignore", ASCEND], check=False).returncode
        except BaseException:
            beside.terminate()  # at a terminal Ctrl-C has told it already
            raise
        finally:
            other = beside.wait()
            said.seek(0)
            print(f"{ASCEND}:", said.read().decode(errors="replace"), sep="\n", flush=True)
    return status or other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
