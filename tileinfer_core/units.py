"""Sizes as people read them: decimal units, as disks and download pages count."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """98.1 MB; whole bytes below a kilobyte."""
    size, units = float(count), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.95 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
