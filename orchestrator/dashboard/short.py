"""Numbers as people read them: at most two units, never 0 for what is unknown.

``?`` is unknown, ``–`` there is none, a leading ``~`` an estimate, a trailing ``+`` at least this much.
"""

from __future__ import annotations

from datetime import datetime

from orchestrator.domain.outcome import Budget
from orchestrator.domain.snapshot import Count, Spend

UNKNOWN = "?"
NONE = "–"


def age(seconds: float) -> str:
    """Return a span as two units at most: ``38s``, ``2m14s``, ``1h07m``, ``3d04h``. Negative spans are ``0s``."""
    whole = max(0, int(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def duration(seconds: float) -> str:
    """Return a measured span: like ``age``, with tenths below ten seconds (``0.4s``)."""
    return f"{max(0.0, seconds):.1f}s" if seconds < 9.95 else age(seconds)


def coarse(seconds: float) -> str:
    """Return a span that nobody needs to the second: ``42s``, ``12m``, ``2h14m``."""
    return f"{int(seconds // 60)}m" if 60 <= seconds < 3600 else age(seconds)


def since(start: datetime | None, now: datetime) -> float | None:
    """Return the seconds from *start* to *now*, None without a start."""
    return None if start is None else (now - start).total_seconds()


def clock(at: datetime, now: datetime | None = None) -> str:
    """Return the local time ``12:04:31``; on another day than *now* ``11-28 23:10``."""
    local = at.astimezone()
    if now is None or local.date() == now.astimezone().date():
        return f"{local:%H:%M:%S}"
    return f"{local:%m-%d %H:%M}"


def until(at: datetime, now: datetime) -> str:
    """Return when something ends: ``13:00``, on another day ``11-28 23:10``."""
    local = at.astimezone()
    return f"{local:%H:%M}" if local.date() == now.astimezone().date() else f"{local:%m-%d %H:%M}"


def number(n: int | None, *, capped: bool = False) -> str:
    """Return a count in full with commas; ``25,000+`` if the counting stopped there."""
    return UNKNOWN if n is None else f"{n:,}{'+' if capped else ''}"


def counted(count: Count) -> str:
    """Return a ``Count`` as ``number`` does."""
    return number(count.n, capped=count.capped)


def estimate(n: int | None) -> str:
    """Return the planner's guess as ``~48k``."""
    return UNKNOWN if n is None else f"~{_scaled(n)}"


def money(usd: float | None, *, partial: bool = False) -> str:
    """Return USD: ``$0.41``, ``$12.30``, ``$1,204``; ``$0.004`` where two places would make nothing of something."""
    if usd is None:
        return UNKNOWN
    if usd >= 999.995:
        text = f"${usd:,.0f}"
    elif 0 < usd < 0.005:
        text = f"${usd:.3f}" if usd >= 0.0005 else "$0.001"
    else:
        text = f"${usd:.2f}"
    return text + ("+" if partial else "")


def _scaled(n: float) -> str:
    if n < 1000:
        return f"{n:.0f}"
    if n < 999_500:
        return f"{n / 1000:.0f}k"
    if n < 999_950_000:
        return f"{n / 1_000_000:.1f}M"
    return f"{n / 1_000_000_000:.1f}G"


def tokens(n: int | None, *, partial: bool = False) -> str:
    """Return tokens: ``812``, ``41k``, ``1.9M``."""
    return UNKNOWN if n is None else _scaled(n) + ("+" if partial else "")


def size(n: int | None) -> str:
    """Return bytes: ``512 B``, ``41 KB``, ``1.2 MB`` (1024)."""
    if n is None:
        return UNKNOWN
    if n < 1024:
        return f"{n} B"
    if n < 1024 * 1023.5:
        return f"{n / 1024:.0f} KB"
    if n < 1024**2 * 1023.95:
        return f"{n / 1024**2:.1f} MB"
    return f"{n / 1024**3:.1f} GB"


def of(attempt: int, max_retries: int | None, retry_count: int) -> int | None:
    """Return the most attempts that there can be: attempt + ``max_retries`` − ``retry_count`` at that claim."""
    return None if max_retries is None else max(attempt, attempt + max_retries - retry_count)


def attempt(n: int, most: int | None) -> str:
    """Return ``attempt 2 of 3``."""
    return f"attempt {n}" if most is None else f"attempt {n} of {most}"


def nearest(budget: Budget, seconds: float | None, spend: Spend) -> tuple[float, str] | None:
    """Return the share of the limit that is nearest, and its letter: ``$``, ``t`` tokens, ``n`` turns, none for time.

    None without a limit whose use is known. A use that is known in part only counts with that part.
    """
    shares = [
        (used / limit, letter)
        for used, limit, letter in (
            (seconds, budget.seconds, ""),
            (spend.usd, budget.usd, "$"),
            (spend.tokens, budget.tokens, "t"),
            (spend.turns, budget.turns, "n"),
        )
        if used is not None and limit
    ]
    return max(shares, key=lambda share: share[0], default=None)


def percent(share: float, letter: str = "") -> str:
    """Return ``39%``, ``88%$``; 100 only from the limit on."""
    whole = int(share * 100 + 1e-9)
    return f"{whole:,}%{letter}"


def limit(budget: Budget, letter: str) -> str:
    """Return the limit that *letter* stands for: ``5m00s``, ``$2.50``, ``400k``, ``12 turns``."""
    if letter == "$":
        return money(budget.usd)
    if letter == "t":
        return tokens(budget.tokens)
    if letter == "n":
        return f"{budget.turns} turns"
    return age(budget.seconds or 0)


def clears(ready: Count, done_hour: int | None) -> str:
    """Return how long a queue takes at the last hour's pace: ``~3d``, ``never``; empty when nothing is ready."""
    if not ready.n or done_hour is None:
        return ""
    if not done_hour:
        return "never"
    hours = ready.n / done_hour
    plus = "+" if ready.capped else ""
    if hours >= 24:
        return f"~{int(hours / 24):,}d{plus}"
    if hours >= 1:
        return f"~{int(hours)}h{plus}"
    return f"~{max(1, int(hours * 60))}m{plus}"


def reason(error_class: str | None, cause: str | None, message: str | None) -> str:
    """Return why something went wrong: ``permanent: bad_input: HTTP 422``.

    A cause that says no more than the message (an exit code, a signal) or the class is left out.
    """
    return ": ".join(part for part in (error_class, detail(cause, message, error_class)) if part)


def detail(cause: str | None, message: str | None, error_class: str | None = None) -> str:
    """Return cause and message as one text, without saying anything twice; *error_class* stands beside it."""
    if cause == error_class:
        cause = None
    if not message:
        return cause or ""
    if not cause or cause in ("exit_code", "signal") or message.startswith(cause):
        return message
    return f"{cause}: {message}"
