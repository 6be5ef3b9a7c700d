"""From one subtask to several: each row goes to the subtask that owns its key, everything else to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from etl.key_group import hash_keys, subtasks_of_hashes
from etl.runtime.element import Element
from etl.runtime.subtask import Output


class HashExchange:
    """Sends by key group.

    Args:
        channels: One a receiving subtask, in their order.
        keys: Numbers of the key's columns in a batch.
    """

    def __init__(self, channels: Sequence[Output], keys: Sequence[int]) -> None:
        self._channels = channels
        self._keys = keys

    def put(self, element: Element) -> None:
        """Send on, waiting for room; the rows of a key stay in their order.

        Raises:
            ChannelClosedError: The attempt was ended meanwhile.
        """
        if not isinstance(element, pa.RecordBatch):
            for channel in self._channels:
                channel.put(element)
            return
        hashes = hash_keys([element.column(number) for number in self._keys])
        owners = subtasks_of_hashes(hashes, len(self._channels))
        for subtask, channel in enumerate(self._channels):
            rows = np.flatnonzero(owners == subtask)
            if len(rows):
                channel.put(element if len(rows) == len(owners) else element.take(pa.array(rows)))
