"""A signal at every point where Python could deliver one: before each bytecode instruction of a piece of work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def interrupted(
    work: Callable[[], object],
    steps: int,
    *,
    inside: tuple[str, ...] = (),
    error: type[BaseException] = KeyboardInterrupt,
) -> bool:
    """Runs `work` and raises `error` before Python's instruction number `steps` of it, as a signal's handler would.
    Whether it came to that; what `work` raises besides is the caller's.

    Args:
        inside: ends of the names of source files; only their instructions count. None: all do.
    """
    left = steps

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., object] | None:
        nonlocal left
        if inside and not frame.f_code.co_filename.endswith(inside):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except BaseException as caught:
        if left >= 0 or not isinstance(caught, error):
            raise
    finally:
        sys.settrace(before)
    return left < 0
