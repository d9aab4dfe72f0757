"""Relays with TASK_QUEUE_ENABLE=0, where nothing is between torch_npu and the runtime."""

from __future__ import annotations

from test_relay_ascend import (  # noqa: F401
    backend,
    test_a_relay_starts_behind_its_streams_copies,
    test_copies_of_the_engines_streams_are_divided,
    test_relays_deliver_in_both_directions,
    test_the_stream_goes_on_when_the_peer_has_delivered,
    test_training_through_peers_has_the_bits_of_training_without,
)

EMULATED = {"devices": 3, "jitter": "100:3", "environ": {"TASK_QUEUE_ENABLE": "0"}}
