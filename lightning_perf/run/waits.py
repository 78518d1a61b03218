"""How long each rank waits for others within a batch, without a synchronisation of ours."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable

from lightning_perf.patches import MethodPatch
from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_perf.run.spans import SpanRecorder

#: The action, within backward, of waiting for the other ranks' gradients.
GRADIENTS = "DistributedDataParallel.gradients"
#: The action, within forward, of waiting for the buffers of rank 0.
BUFFERS = "DistributedDataParallel.buffers"
#: The action, at the start of a batch, of waiting for rank 0.
START = "Trainer.broadcast_sigterm"
#: By column: the category and name of an action.
_HOST = {
    "waits/start": ("other", START),
    "waits/forward": ("forward", BUFFERS),
    "waits/backward": ("backward", GRADIENTS),
}
_DEVICE = {"waits/device/start": START, "waits/device/backward": GRADIENTS}
_NOTHING = Cost(0.0, 0)


class GradientsReady(MethodPatch):
    """Calls a function in each backward when this rank's gradients are computed.

    DDP waits for the other ranks in a function that runs after the backward pass, queued when the
    last gradient is ready. A hook of the loss, which runs first, queues ours ahead of it.

    Args:
        original: The strategy's ``backward``, which takes the loss first.
        ready: Returns whether this thread waits now. On a GPU it runs on autograd's thread.
        waited: Receives the seconds of waiting.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        ready: Callable[[], bool],
        waited: Callable[[float], None],
    ) -> None:
        super().__init__(original)
        self._ready, self._waited = ready, waited
        self._began: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward."""
        hook = None
        with suppress(Exception):  # not a tensor, or without gradients: the original will say so
            hook = args[0].register_hook(self._queue)
        try:
            return self.original(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            began, self._began = self._began, None
            if began is not None:
                self._waited(perf_counter() - began)

    def _queue(self, _gradient: object) -> None:
        with suppress(Exception):  # private: no waits are measured without it
            Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        with suppress(Exception):  # in C++, an error would end the backward
            if self._ready():
                self._began = perf_counter()


class WaitSignal:
    """Seconds of waiting for other ranks, as columns, and each rank's node."""

    gauges = frozenset({"waits/node_rank"})

    def __init__(self, recorder: SpanRecorder, node_rank: int) -> None:
        self._recorder, self._node = recorder, node_rank
        self._device = tuple(_DEVICE.values()) if recorder.device else ()
        device = tuple(_DEVICE) if recorder.device else ()
        self.columns = ("waits/node_rank", "waits/exchange", *_HOST, *device)

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds of a stage, without stages within it."""
        totals = self._recorder.totals()
        host = [_seconds(totals.costs, stage, *action) for action in _HOST.values()]
        device = [_seconds(totals.device, stage, name, "device") for name in self._device]
        exchange = self._recorder.exchange.total() if stage == "train" else 0.0
        return [self._node, exchange, *host, *device]


def _seconds(costs: Mapping[Action, Cost], stage: str, category: str, name: str) -> float:
    return costs.get(Action(stage, category, name), _NOTHING).seconds
