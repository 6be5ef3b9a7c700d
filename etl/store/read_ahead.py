"""Reading while what was read before is being worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _End:
    """Nothing follows; the reason when reading failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Reader(Generic[Item]):
    def __init__(self, items: Iterable[Item], ahead_max: int) -> None:
        self._items = items
        self._read: SimpleQueue[Item | _End] = SimpleQueue()
        self._room = Semaphore(ahead_max)
        self._stopped = False
        self._thread = Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._read.put(item)
                self._room.acquire()
                if self._stopped:
                    break
        except BaseException as raised:  # noqa: BLE001 - raised again by the thread that takes the items
            error = raised
        self._read.put(_End(error))

    def taken(self) -> Iterator[Item]:
        """The items, as they come."""
        while True:
            item = self._read.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            self._room.release()
            yield item

    def stop(self) -> None:
        """Read no more; what the items are read from is free for others when this returns."""
        self._stopped = True
        self._room.release()
        self._thread.join()


@contextmanager
def read_ahead(items: Iterable[Item], ahead_max: int) -> Iterator[Iterator[Item]]:
    """Take items in a thread of their own, a few before they are asked for.

    Args:
        items: Taken by the other thread only, from here to the end of the block.
        ahead_max: Most items that wait to be asked for; one more may be on its way.

    Raises:
        BaseException: What the iteration raised, at the place where it was.
    """
    reader = _Reader(items, ahead_max)
    try:
        yield reader.taken()
    finally:
        reader.stop()
