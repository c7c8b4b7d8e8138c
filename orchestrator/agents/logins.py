"""A settings folder for each attempt at work: programs of one account that share a folder overwrite each other's token."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from orchestrator.domain.given import Login

MOST = 1_000
"""Folders of one login on one host, at most."""

_LOCK = ".orchestrator-slot"


class Slot:
    """A folder that no other attempt on this host uses until ``free``. A dead process frees its folders by itself."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def free(self) -> None:
        """Give the folder back. Only when nothing of the attempt runs any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def take_slot(login: Login, base_dir: str) -> Slot:
    """The first folder of *login* that is free, made if it is not there. Raises OSError."""
    assert login.folder is not None
    for number in range(1, MOST + 1):
        text = login.folder.replace("{slot}", str(number))
        path = Path(base_dir, Path(text).expanduser())
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        return Slot(path, fd)
    raise OSError(f"{MOST} settings folders of login {login.name} are in use")


__all__ = ["Slot", "take_slot"]
