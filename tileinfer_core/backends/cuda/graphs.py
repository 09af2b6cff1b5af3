"""Recorded steps by kind, each recorded once, when it is first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kernels.specs import Recorded
    from tileinfer_core.backends.cuda.device import Device, Graph


class GraphCache:
    """`launch(key, plan)` replays the graph of `key`, recording it from `plan()` the first time.

    With `after` runs, the first ones of a key launch kernel by kernel: a prompt length that occurs once is not worth a
    graph.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Graph] = {}
        self._runs: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def prepare(self, key: Hashable, plan: Callable[[], Sequence[Recorded]], carveout: int | None = None) -> Graph:
        """Record without running."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._device.record(plan(), carveout)
        return graph

    def launch(
        self,
        key: Hashable,
        plan: Callable[[], Sequence[Recorded]],
        *,
        after: int = 0,
        carveout: int | None = None,
    ) -> None:
        runs = self._runs.get(key, 0)
        self._runs[key] = runs + 1
        if runs < after and key not in self._graphs:
            self._device.run(plan())
        else:
            self.prepare(key, plan, carveout).launch()

    def clear(self) -> None:
        self._graphs.clear()
        self._runs.clear()
