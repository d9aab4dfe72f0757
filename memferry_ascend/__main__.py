"""`python -m memferry_ascend` is `memferry`."""

import sys

from memferry_ascend.cli import main

sys.exit(main())
