"""The one error of the interpreter: what a kernel did that a GPU would do silently wrong."""

from __future__ import annotations


class InterpreterError(Exception):
    """A kernel broke a rule that the GPU does not check.

    The message names kernel, block, source line, operation, array and indices.
    """
