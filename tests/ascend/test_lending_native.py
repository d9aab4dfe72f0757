"""Relays through another process with TASK_QUEUE_ENABLE=0, where nothing is between torch_npu and the runtime."""

from __future__ import annotations

import pytest
from test_lending_ascend import (  # noqa: F401
    asked,
    backend,
    owner,
    owners,
    relayed,
    test_a_relay_starts_behind_its_streams_copies,
    test_relays_deliver_in_both_directions,
    test_the_stream_goes_on_when_the_owner_has_delivered,
)

EMULATED = {"devices": 3, "jitter": "100:3", "environ": {"TASK_QUEUE_ENABLE": "0"}}
pytestmark = pytest.mark.slow
