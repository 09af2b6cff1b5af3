"""Runner on a CUDA device: prefill in chunks, then one recorded step per token, the host one step behind the device.

A decode step needs nothing from the host: the sampled id, the length, the random state and the block table lie on the
device and feed the next step. While the host looks at id i, the device works on the step that makes id i + 1; when the
caller stops, that one step is lost. The block table grows by an entry every 64 tokens, copied in stream order.

Nothing has to be undone when a step is abandoned: what it wrote lies beyond the cache's committed length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.cache import kernel_of
from kernels.carveout import step_carveout
from tileinfer_core.backends.cuda import buffers as buf
from tileinfer_core.backends.cuda import ops
from tileinfer_core.backends.cuda.ceilings import measure_ceilings
from tileinfer_core.backends.cuda.graphs import GraphCache
from tileinfer_core.backends.cuda.kv_pool import BlockTable, KvPool, SequencePages
from tileinfer_core.backends.cuda.memory import kv_bytes_per_token
from tileinfer_core.backends.cuda.plan import Plans
from tileinfer_core.backends.cuda.sampling_state import SamplingState
from tileinfer_core.errors import TileinferError
from tileinfer_core.kv_cache import KvCache
from tileinfer_core.models.decoder import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Mapping, Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.base import BoolArray, Float32Array
    from tileinfer_core.backends.cuda.device import Array, Device, Event, HostArray
    from tileinfer_core.backends.cuda.memory import MemoryPlan
    from tileinfer_core.backends.cuda.sampling_state import Pending
    from tileinfer_core.models.decoder import ModelDefinition
    from tileinfer_core.sampling import Sampled, SamplingParams

LOGIT_ROWS = 64  # rows of [V] float32 logits at a time when all are asked for
CAPTURE_AFTER = 1  # a prompt length is captured the second time it comes


class CudaRunner:
    """Runner. `arrays` are the weights by parameter name, on the device; loading fills them (load.py).

    `copies` are those of the memory plan, by parameter name.
    """

    backend_name = "cuda"

    def __init__(
        self,
        model: ModelDefinition,
        device: Device,
        arrays: Mapping[str, Array],
        *,
        memory: MemoryPlan,
        specs: Mapping[str, buf.Spec],
        copies: Mapping[str, Array],
        half: str,
        kv: str = "bf16",
    ) -> None:
        self.device = device
        self.memory = memory
        self.context_limit = memory.context
        self.compile_s = 0.0
        self.device_name = device.name
        sizes = {name: int(array.nbytes) for name, array in arrays.items()}
        self.weight_bytes = sum(sizes.values())
        self.copy_bytes = memory.copy_bytes
        self.step_weight_bytes = sum(sizes[name] for name in sizes if not model.only_looked_up(name))
        self.kv_bytes_per_token = kv_bytes_per_token(model, 1 if kv == "int8" else buf.item_bytes(half))
        kept = "int8" if kv == "int8" else half
        self.pool = KvPool(device, model.structure, model.config.num_hidden_layers, memory.pages, kept)
        self.buffers = buf.allocate_buffers(device, specs)
        buf.fill_tables(device, model.structure, self.buffers)
        self.prefill_chunk: int = self.buffers["token_ids"].shape[0]
        self._table = BlockTable(device, memory.pages)
        self.plans = Plans(
            model, bind(model, arrays), self.pool, self._table.array, buffers=self.buffers, copies=copies,
            arch=device.arch, pdl=device.pdl, processors=device.processors,
        )  # fmt: skip
        self.graphs = GraphCache(device)
        # the longest sequence of each decode step's graph
        self.bucket_ends = ops.bucket_ends(model.structure, device.arch, memory.context)
        self._hidden, self._int8 = model.structure.hidden_size, model.int8("gate_up_proj", 0) is not None
        self._int8_cache = kv == "int8"
        self._vocab: int = model.config.vocab_size
        self._sampling = SamplingState(device, self.buffers, self._vocab)
        self._chunks = _ChunkInputs(device, self.buffers)
        self._eval_logits: Array | None = None
        self._warnings: list[str] = []
        self._waiting: tuple[KvCache, int, int] | None = None  # whose last chunk it was, length then, its last row

    def bucket_end(self, context: int) -> int:
        """The longest context that a decode step's graph for this one serves."""
        return next(end for end in self.bucket_ends if context <= end)

    def carveout(self, context: int) -> int | None:
        """Percent of shared memory that the kernels of a decode step ask for; None leaves it to the driver."""
        end = self.bucket_end(context)
        return step_carveout(self.device.arch, self._hidden, end, int8=self._int8, int8_cache=self._int8_cache)

    def new_cache(self, max_tokens: int) -> KvCache:
        return KvCache(SequencePages(self.pool), min(max_tokens, self.context_limit))

    def show_pages(self, block_table: Sequence[int]) -> None:
        """Put a sequence's pages where the steps look for them, without running any."""
        self._table.update(block_table)

    def show_sampling(self, params: SamplingParams) -> None:
        """Put the sampler's settings where the steps look for them, as for a first token, without running any."""
        self._sampling.begin(params, None, (), 0)

    # -- prefill

    def prefill(self, cache: KvCache, token_ids: Sequence[int]) -> None:
        """Returns when the device has finished, at most one chunk behind while there are several."""
        previous: Event | None = None
        for first in range(0, len(token_ids), self.prefill_chunk):
            event = self._append(cache, token_ids[first : first + self.prefill_chunk])
            if previous is not None:
                previous.wait()
            previous = event
        if previous is not None:
            previous.wait()

    def _append(self, cache: KvCache, token_ids: Sequence[int]) -> Event:
        """Queue one chunk."""
        self._waiting = None
        cache.reserve(len(token_ids))
        self._table.update(cache.block_table)
        self._chunks.send(token_ids, cache.length)
        rows = buf.padded_rows(len(token_ids))
        self.graphs.launch(("prefill", rows), lambda: self.plans.prefill(rows), after=CAPTURE_AFTER)
        event = self.device.event()
        cache.commit(token_ids)
        self._waiting = (cache, cache.length, len(token_ids) - 1)
        return event

    def logits(self, cache: KvCache, token_ids: Sequence[int]) -> Float32Array:
        out = np.empty((len(token_ids), self._vocab), np.float32)
        for first in range(0, len(token_ids), self.prefill_chunk):
            part = token_ids[first : first + self.prefill_chunk]
            self._append(cache, part).wait()
            for row in range(0, len(part), LOGIT_ROWS):
                count = min(LOGIT_ROWS, len(part) - row)
                out[first + row : first + row + count] = self._logits_of(row)[:count]
        return out

    def _logits_of(self, first: int) -> HostArray:
        """Logits after rows `first` … first + LOGIT_ROWS - 1 of the last chunk (its padding included)."""
        if self._eval_logits is None:
            self._eval_logits = self.device.empty((LOGIT_ROWS, self._vocab), "float32")
        logits = self._eval_logits
        self.device.clear(logits)
        self.device.run(self.plans.all_logits(first, LOGIT_ROWS, logits))
        return self.device.download(logits)

    # -- decode

    def decode(
        self, cache: KvCache, params: SamplingParams, valid_ids: BoolArray | None, prompt_tokens: int
    ) -> Generator[Sampled, None, None]:
        assert self._waiting is not None  # noqa: S101 - prefill comes first
        owner, length, row = self._waiting
        assert owner is cache and length == cache.length  # noqa: S101, PT018 - and nothing in between
        self._waiting = None
        self._table.update(cache.block_table)
        first = cache.length - prompt_tokens
        self._sampling.begin(params, valid_ids, cache.token_ids, prompt_tokens)
        self.device.copy(self.buffers["residual"], self.buffers["rows_residual"][row : row + 1])
        self._launch("head", self.plans.head)
        self._launch("sample", self.plans.sample)
        pending = self._sampling.fetch(first)
        step = first
        try:
            while True:
                refusal, following = self._ahead(cache, step + 1)
                sampled = pending.take()
                yield sampled
                if following is None:
                    assert refusal is not None  # noqa: S101 - one or the other
                    raise refusal
                cache.commit([sampled.id])
                pending, step = following, step + 1
        finally:
            del cache, owner  # Python before 3.12.4 keeps a closed generator's names, and with them the pages

    def _ahead(self, cache: KvCache, step: int) -> tuple[TileinferError | None, Pending | None]:
        """Queue the step that follows the id in flight, or say why there can be none."""
        try:
            cache.reserve(1)
        except TileinferError as error:
            return error, None
        self._table.update(cache.block_table)
        end = self.bucket_end(cache.length + 1)
        self._launch(("decode", end), lambda: self.plans.decode(end), self.carveout(end))
        return None, self._sampling.fetch(step)

    def _launch(self, key: Hashable, plan: Callable[[], Sequence[Recorded]], carveout: int | None = None) -> None:
        """A part of a decode step. Everything was compiled before the first token: that it was not is worth a word."""
        known = len(self.device.compiled)
        self.graphs.launch(key, plan, carveout=carveout)
        if compiled := self.device.compiled[known:]:
            names = ", ".join(dict.fromkeys(kernel_of(symbol) for symbol in compiled))
            self._warnings.append(
                f"a decode step waited while {names} compiled ({len(compiled)} new); "
                "`tileinfer kernels explain` says what makes a kernel distinct"
            )

    def warn(self, text: str) -> None:
        """To be told with the next answer."""
        self._warnings.append(text)

    def take_warnings(self) -> tuple[str, ...]:
        found = tuple(self._warnings)
        self._warnings.clear()
        return found

    def ceilings(self) -> tuple[float, float]:
        """Bytes per second of a copy and of a read-only stream, measured now."""
        return measure_ceilings(self.device)

    def forget_warmup(self) -> None:
        """The scratch page took what kernels made of weights that were not there yet: it must hold finite numbers."""
        self.pool.clear_scratch(self.device)
        self.device.synchronize()

    def close(self) -> None:
        self.device.synchronize()
        self.graphs.clear()
        self._waiting = None
        del self.plans, self.buffers, self.pool, self._sampling, self._chunks, self._table
        self._eval_logits = None
        self.device.close()


class _ChunkInputs:
    """The ids and the position of a chunk, through two pinned slots used in turn."""

    def __init__(self, device: Device, buffers: Mapping[str, Array]) -> None:
        self._device = device
        self._buffers = buffers
        rows = buffers["token_ids"].shape[0]
        self._ids = [device.pinned((rows,), "int32") for _ in range(2)]
        self._starts = [device.pinned((1,), "int32") for _ in range(2)]
        self._busy: list[Event | None] = [None, None]
        self._turn = 0

    def send(self, token_ids: Sequence[int], start: int) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        busy = self._busy[turn]
        if busy is not None:
            busy.wait()
        count, rows = len(token_ids), buf.padded_rows(len(token_ids))
        ids = self._ids[turn]
        ids[:count] = token_ids
        ids[count:rows] = 0
        self._starts[turn][0] = start
        self._device.copy_in(self._buffers["token_ids"][:rows], ids[:rows])
        self._device.copy_in(self._buffers["start"], self._starts[turn])
        self._busy[turn] = self._device.event()
