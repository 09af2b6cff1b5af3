"""When an answer ends: end-of-sequence ids, stop strings (also across tokens), and the token limit."""

from __future__ import annotations

from dataclasses import dataclass

from tileinfer_core.errors import UsageError


@dataclass(frozen=True, slots=True)
class StopRules:
    """`eos_ids` is the union of what generation_config, config and tokenizer name; `ignore_eos` switches them off.

    Raises:
        UsageError: an empty stop string, which would stop before the first character, or a limit below 1.
    """

    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("--stop must not be empty")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"--max-tokens must be at least 1, found {self.max_tokens}")

    def is_end(self, token_id: int) -> bool:
        return not self.ignore_eos and token_id in self.eos_ids

    def is_full(self, completion_tokens: int) -> bool:
        return self.max_tokens is not None and completion_tokens >= self.max_tokens

    def matcher(self) -> StopMatcher:
        return StopMatcher(self.stop)


class StopMatcher:
    """Finds stop strings in a text that comes in pieces; the pieces' borders do not change what is found.

    The string that is complete first wins; of several complete at the same character, the longest. The stop string
    and everything after it is dropped.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        if "" in stop:
            raise UsageError("--stop must not be empty")
        self._stop = stop
        self._held = ""
        self._longest = max(map(len, stop), default=0)
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string found, if any.

        What could still become a stop string is held back: at most its length less one character.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._stop:
            return text, None
        self._held += text
        if found := self._find():
            start, self.matched = found
            emit, self._held = self._held[:start], ""
            return emit, self.matched
        cut = len(self._held) - self._undecided()
        emit, self._held = self._held[:cut], self._held[cut:]
        return emit, None

    def flush(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self) -> tuple[int, str] | None:
        places = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        return min(places)[1:] if places else None

    def _undecided(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        for length in range(min(len(self._held), self._longest - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
