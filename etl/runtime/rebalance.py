"""From one subtask to several: batches to each of them in turn, everything else to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from etl.runtime.element import Element
from etl.runtime.subtask import Output


class RebalanceExchange:
    """Deals batches out.

    Args:
        channels: One a receiving subtask, in their order.
        first: Which of them gets the first batch; another one for each sender.
    """

    def __init__(self, channels: Sequence[Output], first: int) -> None:
        self._channels = channels
        self._next = first % len(channels)

    def put(self, element: Element) -> None:
        """Send on, waiting for room.

        Raises:
            ChannelClosedError: The attempt was ended meanwhile.
        """
        if isinstance(element, pa.RecordBatch):
            self._channels[self._next].put(element)
            self._next = (self._next + 1) % len(self._channels)
            return
        for channel in self._channels:
            channel.put(element)
