"""The inside of a warm child process: it loads one agent function and runs one task after the other.

    worker → child    hello, then one ``task`` at a time
    child → worker    ``ready`` or ``failed``; per task ``progress``, ``usage``, ``session``, ``log``, ``keep``, at last ``end``
    worker → child    one ``kept`` for each ``keep``

A frame is four bytes of length and a JSON object, over a socket pair; stdout and stderr are the function's own and are
read by the worker. Nothing that comes out of a child is ever unpickled. The socket's end ends the child; the end of the
lifeline, which the worker holds open as long as it lives, ends it and everything that it started.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import types
from base64 import b64decode
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from orchestrator.agents.functions import AgentFunction, Context, is_async
from orchestrator.agents.typed import BadResult, Types, types_of
from orchestrator.domain.asking import Ask
from orchestrator.errors import OrchestratorError

BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from orchestrator.agents.child import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
HEADER = struct.Struct(">I")
FRAME_LIMIT = 256 * 1024 * 1024
RESULT_LIMIT = 64 * 1024 * 1024
_PR_SET_CHILD_SUBREAPER = 36


def pack(frame: dict[str, Any]) -> bytes:
    """A frame as bytes."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    return HEADER.pack(len(data)) + data


class _Link:
    """The child's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = bytearray()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()
        self.open = True

    def receive(self) -> dict[str, Any] | None:
        """The next task; None at the end."""
        with self._reading:
            return self._waiting.popleft() if self._waiting else self._next()

    def exchange(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        """Write a frame and return its ``kept``; a task that comes before it waits for ``receive``."""
        with self._reading:
            self.send(frame)
            while (answer := self._next()) is not None and answer.get("t") != "kept":
                self._waiting.append(answer)
            return answer

    def _next(self) -> dict[str, Any] | None:
        while True:
            if len(self._held) >= HEADER.size:
                (size,) = HEADER.unpack_from(self._held)
                if len(self._held) >= HEADER.size + size:
                    frame: dict[str, Any] = json.loads(bytes(self._held[HEADER.size : HEADER.size + size]))
                    del self._held[: HEADER.size + size]
                    return frame
            data = self._sock.recv(1 << 18)
            if not data:
                return None
            self._held += data

    def send(self, frame: dict[str, Any]) -> None:
        """Write a whole frame; blocks while the worker is slow to read."""
        self.send_packed(pack(frame))

    def send_packed(self, data: bytes) -> None:
        """Write what ``pack`` made."""
        with self._lock:
            self._sock.sendall(data)


class _TaskChannel:
    """What a running function says, as frames; closed when its task has ended, whoever still holds the context."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self.open = True

    def _send(self, frame: dict[str, Any]) -> None:
        if self.open:
            self._link.send(frame)

    def progress(self, percent: float | None, message: str | None) -> None:
        self._send({"t": "progress", "percent": percent, "message": message})

    def usage(self, fields: dict[str, Any]) -> None:
        self._send({"t": "usage", "fields": {key: value for key, value in fields.items() if _plain(value)}})

    def session(self, session: str) -> None:
        self._send({"t": "session", "id": session})

    def log(self, text: str) -> None:
        self._send({"t": "log", "text": text})

    def keep(self, name: str, text: str) -> Future[Any]:
        """A thread waits for the worker's answer, so that whoever asked may be a coroutine."""
        kept: Future[Any] = Future()

        def ask() -> None:
            try:
                answer = self._link.exchange({"t": "keep", "name": name, "text": text}) if self.open else None
            except OSError as error:
                kept.set_exception(error)
                return
            if answer is None or "error" in answer:
                kept.set_exception(OrchestratorError(answer["error"] if answer else "the worker has gone"))
            else:
                kept.set_result(answer["value"])

        threading.Thread(target=ask, name="checkpoint", daemon=True).start()
        return kept


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(one) for key, one in value.items())
    return value is None or isinstance(value, str | int | float)


# Loading ---------------------------------------------------------------------------------------------------------------


def load_module(name: str, path: str | None) -> types.ModuleType:
    """Import the module *name*; if no path leads to it, load it from its file *path*."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is missing somewhere inside is the module's own fault and is told as it is.
        if path is None or (error.name is not None and not (name == error.name or name.startswith(f"{error.name}."))):
            raise
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {name!r}, and {path} cannot be loaded", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def load_main(name: str | None, path: str | None) -> None:
    """Load the worker's main script under another name, so that what stands below its ``__main__`` guard stays quiet."""
    module = types.ModuleType("__mp_main__")
    if name is not None:
        content = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    elif path is not None:
        content = runpy.run_path(path, run_name="__mp_main__")
    else:
        raise ImportError("the function was defined in an interactive session, of which a child process knows nothing")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def find(path: str) -> Any:
    """Import ``package.module:name.of.it`` and return what stands there."""
    module_name, _, names = path.partition(":")
    if not module_name or not names:
        raise ImportError(f"{path!r} names no function; expected package.module:function")
    found: Any = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _load(hello: dict[str, Any]) -> Callable[[Context], Any]:
    if hello.get("main"):
        load_main(**hello["main"])
    if "value" in hello:
        import pickle

        target = pickle.loads(b64decode(hello["value"]))  # noqa: S301 - from the worker, never from a function
    elif "file" in hello:
        target = load_module(hello["module"], hello["file"])
        for name in hello["names"].split("."):
            target = getattr(target, name)
    else:
        target = find(hello["path"])
    function = target.function if isinstance(target, AgentFunction) else target
    if not callable(function):
        raise TypeError(f"{hello.get('path') or hello.get('names')} is no function but {type(function).__name__}")
    return function


# Running ---------------------------------------------------------------------------------------------------------------


class _Stopped:
    asked = False


def _terminate(number: int, frame: Any) -> NoReturn:
    """SIGTERM: unwind the function, so that its ``finally`` blocks run."""
    _Stopped.asked = True
    raise SystemExit(128 + number)


def _die_with_worker(lifeline: int) -> None:
    while True:
        try:
            if not os.read(lifeline, 1):
                break
        except InterruptedError:
            continue
        except OSError:
            return
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _rest() -> bool:
    """Collect children that have ended; say whether others still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _await(awaitable: Any) -> Any:
    import asyncio

    async def call() -> Any:
        return await awaitable

    return asyncio.run(call())


def _run(
    function: Callable[[Context], Any], types: Types, on_loop: bool, task: dict[str, Any], channel: _TaskChannel
) -> dict[str, Any]:
    context: Context = Context(channel, **task)
    try:
        types.take(context)
        if on_loop:
            result = _await(function(context))
        else:
            result = function(context)
            if inspect.isawaitable(result):  # a plain wrapper around an async function
                result = _await(result)
        if _Stopped.asked:
            return {"t": "end", "status": "stopped"}
        if context.open_question is not None:
            return _suspended(context.open_question, returned=True)
        return {"t": "end", "status": "done", "result": types.give(result)}
    except BaseException as error:  # noqa: BLE001 - whatever it raises ends its task, not its process
        if _Stopped.asked:
            return {"t": "end", "status": "stopped"}
        if context.open_question is not None:
            return _suspended(context.open_question, returned=False)
        from orchestrator.agents.faults import outcome_of

        outcome = outcome_of(error, below=__file__)
        return {
            "t": "end",
            "status": str(outcome.status),
            "cause": outcome.cause,
            "message": outcome.message,
            "retry_at": None if outcome.retry_at is None else outcome.retry_at.isoformat(),
            "retry_after": outcome.retry_after,
            "notes": list(outcome.notes),
            "result": error.result if isinstance(error, BadResult) else None,
        }


def _suspended(ask: Ask, *, returned: bool) -> dict[str, Any]:
    """The frame that ends a task with a question, in the words of the events file."""
    deadline = ask.seconds if ask.deadline is None else ask.deadline.isoformat()
    return {
        "t": "end",
        "status": "suspended",
        "returned": returned,
        "ask": {
            "name": ask.name,
            "question": ask.question,
            "choices": list(ask.choices),
            "deadline": deadline,
            "default": ask.default,
        },
    }


def _limit_memory(megabytes: int) -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = megabytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def main(fd: int, lifeline: int) -> None:
    """Serve the worker at the other end of *fd* until it closes the socket."""
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_die_with_worker, args=(lifeline,), name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        # What a function leaves behind becomes a child of this process, where ``_rest`` sees it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(fd, False)
    os.set_inheritable(lifeline, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    link = _Link(socket.socket(fileno=fd))
    hello = link.receive()
    if hello is None:
        return
    sys.path[:] = hello["sys_path"]
    sys.argv[:] = hello["argv"]
    os.environ.update(hello["environ"])
    try:
        function = _load(hello)
        types = types_of(function)
    except BaseException as error:  # noqa: BLE001 - user code runs at import, and may raise anything
        from orchestrator.agents.faults import qualified_name, told, trace_of

        link.send(
            {
                "t": "failed",
                "message": f"{qualified_name(type(error))}: {told(error)}",
                "trace": trace_of(error, below=__file__),
            }
        )
        return
    for name in hello["forget"]:
        os.environ.pop(name, None)
    if hello["memory_mb"] is not None:
        _limit_memory(hello["memory_mb"])
    on_loop = is_async(function)
    pid = os.getpid()
    link.send({"t": "ready"})
    while (task := link.receive()) is not None:
        channel = _TaskChannel(link)
        end = _run(function, types, on_loop, task, channel)
        if os.getpid() != pid:
            os._exit(0)  # the function forked and both sides returned: only one of them is the agent
        channel.open = False
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        if _rest():
            end["rest"] = True
        data = pack(end)
        if len(data) > RESULT_LIMIT:
            text = f"the result is larger than {RESULT_LIMIT >> 20} MB as JSON: write it to a file and return its path"
            data = pack({"t": "end", "status": "permanent", "cause": "result_too_large", "message": text})
        link.send_packed(data)
        if _Stopped.asked:
            sys.exit(128 + signal.SIGTERM)
