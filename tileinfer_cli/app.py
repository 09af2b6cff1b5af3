"""The Typer application, and the one error boundary of the process.

Whatever happens below ends here as a message on stderr and an exit code:

    0 done · 1 TileInfer could not do it · 2 usage · 3 prompt longer than the context · 4 model not found
    5 not allowed · 6 disk · 7 damaged or unsupported model · 8 backend not available or out of memory
    129 the terminal is gone · 130 Ctrl-C · 141 nobody reads the output any more · 143 SIGTERM

No other file of the command line catches an error in order to end the process, and nothing here prints a
traceback unless `--debug` asks for it.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING

from tileinfer_cli.signals import ENDING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import NoReturn

    import typer

    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.terminal import Streams

# A start makes objects by the hundred thousand, and nearly all of them stay. Looking for garbage at Python's own pace,
# every 700 new ones, takes some 12 ms of it; so it is done as often as a long chat needs.
OBJECTS_BETWEEN_COLLECTIONS = 100_000
# OpenBLAS's threads spin for 2**28 clock ticks after their start and after each product, 77 ms of a core that the start
# needs for other things. 2**22 are 1.2 ms, more than there is between two products of a token.
BLAS_SPIN = ("OPENBLAS_THREAD_TIMEOUT", "22")
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
EXIT_ENDED = {128 + number: number for number in ENDING}
_SENT_AGAIN_AFTER_S = 0.002  # the finaliser has ended by then, or a few times later
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def main() -> NoReturn:
    _keep_numbers_of_closed_streams()
    try:
        code = run(sys.argv[1:], at_the_end=_ignore_ctrl_c)
    except KeyboardInterrupt:  # a second one, before it was ignored
        code = EXIT_INTERRUPTED
    _ignore_ctrl_c()
    if code == EXIT_INTERRUPTED or code in EXIT_ENDED:
        _leave_at_once(code)
    sys.exit(code)


def _keep_numbers_of_closed_streams() -> None:
    """The next file opened would be number 0, 1 or 2, and get what a library or a child writes to stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _leave_at_once(code: int) -> NoReturn:
    """After a signal, when every `finally` has run. Python's own end would wait for the threads' present work and take
    its objects apart one by one: 55 ms in place of 17 from Ctrl-C to the end with SmolLM2-135M in memory."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _ignore_ctrl_c() -> None:
    """Once the work is over, a further Ctrl-C has nothing to stop, and would end in a traceback of the clean-up."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(argv: list[str], *, at_the_end: Callable[[], None] = lambda: None) -> int:
    """One command line from words to exit code. What is not needed to define it is imported in here, so that Ctrl-C
    during an import ends like any other. `at_the_end` is called before an error is reported."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    os.environ.setdefault(*BLAS_SPIN)
    from tileinfer_cli.terminal import Streams

    streams = Streams.of_process()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # Python's warnings are for developers: -W default shows them
    cli: Cli | None = None
    try:
        with _signals_unwind():
            from tileinfer_cli.commandline import Cli

            cli = Cli(streams)
            return _dispatch(argv, cli)
    except BaseException as error:
        at_the_end()
        return _end(error, streams, debug=cli is not None and cli.debug)


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM, and SIGHUP when the terminal goes, leave through the `finally` blocks, so that half-written folders are
    removed and the terminal is put in order. What nohup has the process ignore stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    hook, sys.unraisablehook = sys.unraisablehook, _sending_again(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _sending_again(otherwise: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], None]:
    """What Python calls with an exception that can go nowhere. A signal whose exception comes up in a finaliser, or in
    a callback of the garbage collector, which may take 40 ms, would be lost; it is sent again until it is heeded."""

    def send(number: signal.Signals, hook_is_over: _thread.LockType) -> None:
        hook_is_over.acquire()
        time.sleep(_SENT_AGAIN_AFTER_S)
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            _thread.interrupt_main(number)

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        number = _signal_of(dropped.exc_value)
        if number is None:
            otherwise(dropped)
            return
        over = _thread.allocate_lock()
        over.acquire()
        _thread.start_new_thread(send, (number, over))  # threading's own waits for its start, and would be hit
        over.release()

    return hook


def _signal_of(error: BaseException | None) -> signal.Signals | None:
    """Whose exception it is."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return EXIT_ENDED.get(error.code)
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else None


def _dispatch(argv: list[str], cli: Cli) -> int:
    """Parses and runs. Typer's own `main` is not used: it turns a broken pipe into exit code 1."""
    import typer.main

    completing = "_TILEINFER_COMPLETE" in os.environ
    command = typer.main.get_command(build(None if completing or not argv else argv[0]))
    if completing:
        command.main(prog_name="tileinfer", standalone_mode=True)
    try:
        with command.make_context("tileinfer", list(argv), obj=cli) as context:
            command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    return 0


def build(first_word: str | None = None) -> typer.Typer:
    from tileinfer_cli.commands import register

    return register(first_word)


def _end(error: BaseException, streams: Streams, *, debug: bool) -> int:
    """The message of an error on stderr, and its exit code."""
    error = _signal_below(error) or error
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):
        from tileinfer_cli.terminal import silence

        silence(sys.stdout)
        return EXIT_BROKEN_PIPE
    if debug:
        import traceback

        streams.err.end_line()
        streams.err.write("".join(traceback.format_exception(error)))
    if isinstance(error, KeyboardInterrupt):
        if streams.err.look.terminal:
            streams.err.write("\n")
        return EXIT_INTERRUPTED
    from tileinfer_cli.render import print_error

    message, hint, code = _explain(error)
    streams.err.end_line()
    print_error(streams.err, message, hint)
    return code


def _signal_below(error: BaseException) -> BaseException | None:
    """The exception of a signal that another error wraps: raised in `__set_name__`, it becomes a RuntimeError, say."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (KeyboardInterrupt, SystemExit)):
        seen = seen.__cause__ or seen.__context__
    return seen


def _explain(error: BaseException) -> tuple[str, str | None, int]:
    """Message, way out and exit code."""
    from tileinfer_core.errors import BackendError, DiskError, TileinferError, UsageError

    if isinstance(error, TileinferError):
        return str(error), error.hint, error.exit_code
    if hasattr(error, "format_message"):  # Typer's own: an unknown option, a missing argument
        from tileinfer_cli.usage import explain_usage

        return *explain_usage(error), UsageError.exit_code
    if isinstance(error, MemoryError):
        hint = "a smaller --context, a shorter prompt or a smaller model needs less"
        return f"out of memory{f': {error}' if str(error) else ''}", hint, BackendError.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        code = DiskError.exit_code if error.errno in _DISK_ERRNOS else TileinferError.exit_code
        return f"{where}{error.strerror or error}", None, code
    hint = "this is a fault in TileInfer; run the command again with --debug and report what it prints"
    return f"{type(error).__name__}: {error}", hint, TileinferError.exit_code
