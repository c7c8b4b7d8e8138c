"""The end of a worker: the first SIGTERM or SIGINT drains, the second SIGINT ends at once, the third does not even wait
for that; and what is left on its event loop is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Signals:
    """Handles the signals of a worker while the block runs. In another thread than the main one it does nothing.

    ``drain(name)`` and ``now()`` are called on the event loop; ``abandon()`` in the signal handler itself. SIGHUP counts
    as SIGTERM, unless it was ignored (``nohup``).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drain: Callable[[str], None],
        now: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        self._loop, self._drain, self._now, self._abandon = loop, drain, now, abandon
        self._before: dict[int, Any] = {}
        self._asked = 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", None)):
            if number is None or (number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN):
                continue
            # Not loop.add_signal_handler: a handler of Python's own runs even while an agent keeps the loop busy.
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT and self._asked:
            return
        self._asked += 1
        if self._asked == 1:
            self._call(self._drain, signal.Signals(number).name)
        elif self._asked == 2:
            self._call(self._now)
        else:
            self._abandon()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(function, *arguments)


def cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs on *loop*, which has stopped, and give it half a second to end."""
    rest = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.wait(rest, timeout=0.5))
    loop.run_until_complete(loop.shutdown_asyncgens())


__all__ = ["Signals", "cancel_rest"]
