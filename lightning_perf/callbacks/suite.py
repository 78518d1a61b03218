"""A list of our callbacks: `Suite`, `always_on`, and the suite of LIGHTNING_PERF."""

from __future__ import annotations

from collections.abc import Callable  # LightningCLI resolves the annotations of `always_on`
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.checks import flag, is_list, whole
from lightning_perf.errors import ConfigError
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.compat import rank_zero_info
from lightning_perf.run.window_callback import LOGGING, WindowCallback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.run.run import Run


#: Endings of keys that ``keys="short"`` leaves out: they repeat another one, or only users of
#: Composer, fkat and Determined know them.
_LEFT_OUT = {
    "SpeedMonitor": (
        "/throughput/device/batches_per_sec", "/throughput/device/samples_per_sec",
        "/throughput/device/tokens_per_sec", "/throughput/flops_per_sec", "/time/train",
    ),
    "Flops": (
        "/actual_batches_per_sec", "/max_batches_per_sec", "/tflops_per_device", "/total_flops",
        "/tracked_operations",
    ),
    "Timings": ("/timings/train_batch",),
    "SystemMetrics": (
        "/cpu_util_max", "/disk_iops", "/disk_throughput_read", "/disk_throughput_write",
        "/net_throughput_recv", "/net_throughput_sent", "/process_rss", "/swap_used",
        "/memory/peak_rss",
    ),
}  # fmt: skip


class Suite(PerfCallback):
    """A list of our callbacks as one: during a run they are the Trainer's callbacks after it.

    Checkpoints have the state of each one within that of the Suite, and resume in either form.

    Args:
        callbacks: Callbacks of lightning_perf, in the order in which they run. Those of a Suite
            among them become this one's, with its other arguments.
        show_summary: Whether to print the summary of the run at its end, on rank 0.
        keys: Which metrics loggers get. ``"short"`` leaves out those that repeat another one or
            that only users of Composer, fkat and Determined know, and most of validation inside of
            fit; ``"all"`` logs what the callbacks log alone. All can be monitored.
        data_parallel_size: How many different batches the ranks train on at a time, if several
            ranks share a batch (tensor, context or pipeline parallel) and the strategy does not
            say so itself, as ``ModelParallelStrategy`` does.

    Raises:
        ConfigError: A callback is not ours, two are of one kind and key, or the data-parallel size
            does not divide the world size.

    Example:
        >>> from lightning_perf import Flops, SpeedMonitor, Suite
        >>> [type(part).__name__ for part in Suite([SpeedMonitor(), Flops()]).callbacks]
        ['SpeedMonitor', 'Flops']
    """

    def __init__(
        self,
        callbacks: list[PerfCallback],
        show_summary: bool = False,
        data_parallel_size: int | None = None,
        keys: str = "short",
    ) -> None:
        super().__init__()
        example = "[SpeedMonitor(), Flops()]"
        if not is_list(callbacks):  # first: a second callback would be `show_summary`
            raise ConfigError("callbacks", callbacks, "is not a list", example)
        if data_parallel_size is not None:
            data_parallel_size = whole("data_parallel_size", data_parallel_size, 1, "4")
        self.data_parallel_size = data_parallel_size
        self.show_summary = flag("show_summary", show_summary)
        if keys not in ("short", "all"):
            raise ConfigError("keys", keys, "is neither 'short' nor 'all'", "'all'")
        self.keys = keys
        self.callbacks: list[PerfCallback] = []
        for part in callbacks:
            if not isinstance(part, PerfCallback):
                problem = "may contain only callbacks of lightning_perf; pass others to the Trainer"
                if isinstance(part, type) and issubclass(part, PerfCallback):
                    problem = f"is a class: write {part.__name__}()"
                raise ConfigError("callbacks", part, problem, example)
            if isinstance(part, Suite):
                self.callbacks += part.callbacks
                self.show_summary |= part.show_summary
                self.data_parallel_size = self.data_parallel_size or part.data_parallel_size
            else:
                self.callbacks.append(part)
        if len(self._by_key) < len(self.callbacks):
            kinds = [type(each).__name__ for each in self.callbacks]
            twice = next(kind for kind in kinds if kinds.count(kind) > 1)
            problem = f"contains one callback twice: remove a {twice}()"
            raise ConfigError("callbacks", kinds, problem, None)

    @property
    def _by_key(self) -> dict[str, PerfCallback]:
        """The callbacks by their keys in checkpoints."""
        return {
            each.kind if each.keeps_progress else each.state_key: each for each in self.callbacks
        }

    @property
    @override
    def parts(self) -> list[PerfCallback]:
        return self.callbacks

    @property
    def reaches(self) -> set[str]:  # type: ignore[override]
        """The codes that its callbacks may reach."""
        return {code for part in self.callbacks for code in part.reaches}

    @override
    def settings(self) -> dict[str, dict[str, object]]:
        return {}

    @override
    def prepare(self, context: Run) -> None:
        kinds = [type(part).__name__ for part in self.callbacks]
        for kind, part in zip(kinds, self.callbacks, strict=True):
            if isinstance(part, WindowCallback):
                part.left_out = _LEFT_OUT.get(kind, ()) if self.keys == "short" else ()
                if part.left_out and kind == "SpeedMonitor" and "Flops" in kinds:  # which logs mfu
                    part.left_out += ("/throughput/device/mfu",)
        if self.data_parallel_size is not None:
            context.share_batches(self.data_parallel_size)

    def state_dict(self) -> dict[str, Any]:
        """The run's progress, and the state of each part by its key."""
        parts = {key: part.state_dict() for key, part in self._by_key.items()}
        return super().state_dict() | parts

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for key in self._by_key:  # the Suite has it
            checkpoint["callbacks"].pop(key, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress, and pass each part its own state."""
        super().load_state_dict(state_dict)
        for key, part in self._by_key.items():
            if key in state_dict:
                part.load_state_dict(state_dict[key])


def always_on(
    show_summary: bool = True, notify: Callable[[dict[str, Any]], object] | str | None = None
) -> Suite:
    """A `Suite` of what costs little: throughput, MFU, times, hardware, diagnosis, hang reports.

    Args:
        show_summary: Whether to print the summary of the run at its end, on rank 0.
        notify: A function or the URL of a webhook that gets critical verdicts and hangs: see
            `Diagnosis`.

    Raises:
        ConfigError: An argument is not valid.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import always_on
        >>> trainer = L.Trainer(callbacks=[always_on()], logger=False)
    """
    from lightning_perf.callbacks.diagnosis import Diagnosis
    from lightning_perf.callbacks.flops import Flops
    from lightning_perf.callbacks.hang import Hang
    from lightning_perf.callbacks.speed_monitor import SpeedMonitor
    from lightning_perf.callbacks.system_metrics import SystemMetrics
    from lightning_perf.callbacks.timings import Timings

    flag("show_summary", show_summary)
    parts: list[PerfCallback] = [
        SpeedMonitor(),
        Flops(schedule=LOGGING),
        Timings(),
        SystemMetrics(),
        Diagnosis(terminal=show_summary, notify=notify),
        Hang(notify=notify),
    ]
    return Suite(parts, show_summary)


class EnvironmentSuite(Suite):
    """What the environment variable LIGHTNING_PERF adds to a Trainer.

    Parts of a kind that the Trainer has already are left out, since a run has one of each kind.
    """

    def __init__(self, callbacks: list[PerfCallback], show_summary: bool = True) -> None:
        super().__init__(callbacks, show_summary)
        self._all = self.callbacks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [each for each in callbacks if isinstance(each, PerfCallback)]
        # Lightning appends to the user's own list: one that an earlier Trainer used has its suite.
        suites = [each for each in others if isinstance(each, EnvironmentSuite)]
        repeated = suites[0] is not self
        users = {type(each) for each in others if each not in (*suites, *self._all)}
        users |= {type(part) for each in others if each not in suites for part in each.parts}
        self.callbacks = [part for part in self._all if not (repeated or type(part) in users)]
        left_out = [type(part).__name__ for part in self._all if type(part) in users]
        if left_out and not repeated:
            names = ", ".join(left_out)
            rank_zero_info(f"LIGHTNING_PERF: the Trainer has its own {names}.")
        if self.callbacks:
            super().setup(trainer, pl_module, stage)
