"""Shows an answer while it is made: the text on stdout, thinking and progress on stderr.

Thinking never goes to stdout, so that stdout has the answer alone even where thinking is shown.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tileinfer_cli.render import DIM, Progress, print_note, print_warning
from tileinfer_core.events import Finished, PrefillProgress, TextDelta
from tileinfer_core.progress import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from tileinfer_cli.terminal import Streams
    from tileinfer_core.engine import Engine
    from tileinfer_core.events import Event
    from tileinfer_core.settings import Setting


class AnswerView:
    """One answer. `silent` (for --json) writes no answer text; what was seen is in `text` and `thinking` either way."""

    def __init__(self, streams: Streams, *, show_thinking: bool, silent: bool = False, quiet: bool = False) -> None:
        self._out = streams.out
        self._err = streams.err
        self._show_thinking = show_thinking
        self._silent = silent
        self._progress = Progress(streams.err, quiet=quiet)
        self._in_thinking = False
        self.text = ""
        self.thinking = ""

    def show(self, events: Generator[Event], said: Callable[[], str] = str) -> Finished:
        """Runs the generation. Whatever ends it, the generator is closed and the cursor stands on a new line.

        `said` tells what the history has of an answer that Ctrl-C ended: a token may be there and not here yet, and
        who goes on with the answer would miss it.
        """
        try:
            try:
                with contextlib.closing(events), self._progress:
                    for event in events:
                        self._out.check_reader()
                        if isinstance(event, Finished):
                            return event
                        self._take(event)
            except KeyboardInterrupt:
                self._catch_up(said())
                raise
            finally:
                self._end_lines()
        finally:
            self._end_lines()  # Ctrl-C may have come in the other one
            if self._err.look.terminal and not self._silent:
                self._out.drain()
        raise AssertionError("a generation ended without Finished")

    def _catch_up(self, said: str) -> None:
        if said.startswith(self.text) and len(said) > len(self.text):
            self._say(said[len(self.text) :])

    def _take(self, event: PrefillProgress | TextDelta) -> None:
        if isinstance(event, PrefillProgress):
            self._progress(ProgressEvent("read the prompt", event.done, event.total, "tokens"))
            return
        self._progress.close()
        if event.thinking:
            self._think(event.text)
        else:
            self._say(event.text)

    def _think(self, text: str) -> None:
        self.thinking += text
        if self._show_thinking:
            self._in_thinking = True
            self._err.styled(text, DIM)

    def _say(self, text: str) -> None:
        if self._in_thinking:
            self._err.end_line()
            self._err.write("\n")
            self._in_thinking = False
        self.text += text
        if not self._silent:
            self._out.write(text)

    def _end_lines(self) -> None:
        self._err.end_line()
        if not self._silent:
            self._out.end_line()


def print_ending(streams: Streams, finished: Finished, *, limit_origin: str) -> None:
    """Says when an answer was not ended by the model: nothing is cut silently. Then what the backend noticed."""
    number = finished.usage.completion_tokens
    count = f"{number:,} token{'' if number == 1 else 's'}"
    if finished.reason == "length":
        print_note(streams.err, f"stopped after {count} ({limit_origin})")
    elif finished.reason == "context":
        print_note(streams.err, f"stopped after {count}: the context is full")
    for warning in finished.warnings:
        print_warning(streams.err, warning)


def as_document(engine: Engine, finished: Finished, sampling: Mapping[str, Setting[Any]]) -> dict[str, Any]:
    """What `generate --json` prints: a contract with scripts. Fields may be added, not renamed."""
    return {
        "model": engine.folder.name,
        "text": finished.text,
        "finish_reason": finished.reason,
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "seed": finished.seed,
        "sampling": {name: asdict(setting) for name, setting in sampling.items()},
        "backend": engine.backend.name,
        "stop": finished.stop,
        "warnings": list(finished.warnings),
    }


def token_list(engine: Engine, finished: Finished) -> list[dict[str, Any]]:
    """Each new token as `tokens --json` has it, and its log-probability."""
    piece = engine.tokenizer.piece
    return [{"id": token.id, "text": piece(token.id), "logprob": token.logprob} for token in finished.tokens]


def stats_text(finished: Finished) -> str:
    """One line: tokens, speeds, times, seed."""
    usage, timings = finished.usage, finished.timings
    prompt = f"prompt {usage.prompt_tokens:,} tokens"
    if usage.reused_tokens:
        prompt += f" ({usage.reused_tokens:,} reused)"
    parts = [prompt, f"answer {usage.completion_tokens:,} tokens"]
    if timings.prefill_tok_s is not None:
        parts.append(f"prefill {timings.prefill_tok_s:,.1f} tok/s")
    if timings.decode_tok_s is not None:
        parts.append(f"decode {timings.decode_tok_s:,.1f} tok/s")
    if timings.ttft_s is not None:
        parts.append(f"first token {timings.ttft_s:.2f} s")
    parts.append(f"load {timings.load_s:.2f} s")
    parts.append(f"seed {finished.seed}")
    return " · ".join(parts)
