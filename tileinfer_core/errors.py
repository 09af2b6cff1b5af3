"""Every error a user can meet, and the exit code it ends the process with.

    TileinferError                  1   TileInfer could not do it
    ├── UsageError                  2   the request itself is wrong
    ├── ContextLengthError          3   the prompt is longer than the context
    ├── ModelNotFoundError          4   no such model, here or on the Hub
    ├── AccessError                 5   gated, private, or no valid token
    ├── DiskError                   6   full, read-only, not writable
    ├── ModelError                  7   this model can't be used
    │   ├── DamagedModelError           its files are broken or incomplete
    │   └── UnsupportedModelError       its files are whole, but ask for what TileInfer doesn't have
    └── BackendError                8   the backend asked for can't run
        ├── BackendUnavailableError     no GPU, no driver, no compiler
        ├── CompilerTimeoutError        the compiler took longer than it may
        └── OutOfMemoryError            it would not fit, or did not

Outside the tree: 130 for Ctrl-C (KeyboardInterrupt) and 141 for a closed pipe (BrokenPipeError).
"""

from __future__ import annotations


class TileinferError(Exception):
    """An error with a message for the user: what was wanted, what was found, and (hint) what to do.

    `str(error)` is the message alone; `hint` is the way out, shown on a second line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(TileinferError):
    exit_code = 2


class ContextLengthError(TileinferError):
    exit_code = 3


class ModelNotFoundError(TileinferError):
    exit_code = 4


class AccessError(TileinferError):
    exit_code = 5


class DiskError(TileinferError):
    exit_code = 6


class ModelError(TileinferError):
    exit_code = 7


class DamagedModelError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class BackendError(TileinferError):
    exit_code = 8


class BackendUnavailableError(BackendError):
    pass


class CompilerTimeoutError(BackendError):
    pass


class OutOfMemoryError(BackendError):
    pass
