"""`memferry probe` as a script: measure the paths between host memory and each device.

python tools/topology_probe.py --out paths.json --plot paths.png
python tools/topology_probe.py --fabric cm384 --emulate
python tools/topology_probe.py --plan-node cm384
"""

from __future__ import annotations

import sys

from memferry_ascend.cli import main

if __name__ == "__main__":
    sys.exit(main(["probe", *sys.argv[1:]]))
