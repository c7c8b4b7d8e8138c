"""Signals for the time of a view: a handler only says what happened, the view's own thread does what it means.

A handler runs in the middle of whatever the main thread was doing, a write to the same stream or a lock it holds
included. So it neither writes nor waits: it puts a word into the view's inbox, a ``SimpleQueue``, whose ``put`` may be
interrupted by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


class Signals:
    """Handlers from ``install`` to ``remove``. Does nothing outside the main thread.

    Each of *actions* is called by the name of its signal and must return at once. With *chain* a handler that was there
    before is called after ours. Ctrl-Z calls its action and nothing more: the view gives the terminal back and then
    calls ``stop_here``.
    """

    def __init__(self, actions: Mapping[str, Callable[[], None]], *, chain: bool = True) -> None:
        self._chain = chain
        self._actions = {getattr(signal, name): action for name, action in actions.items() if hasattr(signal, name)}
        self._before: dict[int, Any] = {}
        self._stop = False

    def install(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._actions:
            before = signal.getsignal(number)
            if number == signal.SIGTSTP and before is not signal.SIG_DFL:
                continue  # ignored by whoever started us, or somebody else's
            self._before[number] = before
            signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Give the handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(number, before)
        self._before = {}

    def stop_here(self) -> None:
        """Really stop the process, as Ctrl-Z means it. From any thread; what is done on continuing is SIGCONT's action.

        In the main thread it returns when the process is continued, or at once where nobody could continue it.
        """
        self._stop = True
        os.kill(os.getpid(), signal.SIGTSTP)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP and self._stop:
            self._stop = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, self._on_signal)
            # A process that nobody could continue is not stopped, and not continued either.
            self._on_signal(signal.SIGCONT, frame)
            return
        action = self._actions.get(signal.Signals(number))
        if action is not None:
            action()
        before = self._before.get(number)
        if self._chain and callable(before):
            before(number, frame)


__all__ = ["Signals"]
