"""All SQL and every Session. Each public method is one unit of work: committed or rolled back before it returns.

Reading order: ``tasks`` (``claim`` is its first method), ``runs`` (``record_runs`` is its first), ``workers`` (leases and
death), ``adding`` (new tasks), ``operations`` (what operators do), then the reading side. No base class, no flags, and no
session is handed out; the one door for a caller's own transaction is ``add(..., session=…)``.
"""

from __future__ import annotations

from typing import TypeAlias

from sqlalchemy import Connection
from sqlalchemy.orm import Session

CallerSession: TypeAlias = Session | Connection
"""What ``session=`` of a transactional enqueue takes: the service names this type without importing SQLAlchemy."""

__all__ = ["CallerSession"]
