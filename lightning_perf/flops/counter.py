"""Counts the FLOPs of executed operators."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointFunction

from lightning_perf.flops.operators import (
    AUTOCAST,
    CUDNN,
    Formula,
    formula_of,
    has_own_kernel,
    is_autocast,
    is_composite,
    qualified_name,
    tf32_is_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType


_CHECKPOINT_FILE = CheckpointFunction.backward.__code__.co_filename
_RECOMPUTING = frozenset(["backward", "recompute_fn", "unpack_hook"])
_AUTOGRAD_BACKWARD = torch.autograd.backward.__code__
#: Whether the current backward keeps its graph, as it does to be differentiated itself.
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def is_recomputation() -> bool:
    """Whether a forward is recomputed during a backward, by any kind of activation checkpointing.

    A backward runs with gradients disabled, unless it will be differentiated and therefore keeps
    its graph. Where it does not keep it but gradients are enabled, a function of the graph has
    enabled them to run a forward again. Otherwise only torch's own checkpointing is recognized.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    if torch.is_grad_enabled() and not _keeps_graph():
        return True
    frame: FrameType | None = sys._getframe()
    callee = None
    while frame is not None:
        code = frame.f_code
        # A reentrant checkpoint first recomputes the forward, then runs its backward.
        if (
            code.co_name in _RECOMPUTING
            and code.co_filename == _CHECKPOINT_FILE
            and callee is not _AUTOGRAD_BACKWARD
        ):
            return True
        frame, callee = frame.f_back, code
    return False


_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_SPARSE = frozenset(
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)


@dataclass(frozen=True)
class Counts:
    """FLOPs and operator calls under a counter.

    FLOPs are grouped by the dtype of the operands (``"bfloat16"``), because the peak depends on it.
    What cuDNN computes of float32 in TensorFloat-32 is ``"tf32"``. A complex product counts as four
    real ones.
    """

    #: FLOPs without recomputation, for MFU.
    model: Mapping[str, int] = field(default_factory=dict)
    #: FLOPs including recomputation by activation checkpointing, for HFU.
    hardware: Mapping[str, int] = field(default_factory=dict)
    #: Calls of counted operators.
    tracked_operations: int = 0
    #: Calls of operators with unknown FLOPs, by name.
    untracked_names: Mapping[str, int] = field(default_factory=dict)

    @property
    def untracked_operations(self) -> int:
        """Calls of operators with unknown FLOPs."""
        return sum(self.untracked_names.values())

    @property
    def model_flops(self) -> int:
        """FLOPs of all dtypes, without recomputation."""
        return sum(self.model.values())

    @property
    def hardware_flops(self) -> int:
        """FLOPs of all dtypes, including recomputation."""
        return sum(self.hardware.values())


def mean(found: Sequence[Counts]) -> Counts:
    """The mean of several batches."""
    return weighted((1 / len(found), each) for each in found)


def weighted(parts: Iterable[tuple[float, Counts]]) -> Counts:
    """The sum of counts, each multiplied by a weight, in whole numbers."""
    names = ("model", "hardware", "untracked_names")
    sums: dict[str, dict[str, float]] = {name: {} for name in names}
    operations = 0.0
    for weight, counts in parts:
        operations += weight * counts.tracked_operations
        for name in names:
            for key, value in getattr(counts, name).items():
                sums[name][key] = sums[name].get(key, 0.0) + weight * value
    whole = ({key: round(value) for key, value in sums[name].items()} for name in names)
    model, hardware, untracked = whole
    return Counts(model, hardware, round(operations), untracked)


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of all operators that run inside, forward and backward.

    Results do not change. Operators that cannot be counted are listed by name and never raise. The
    counter is reentrant, and continues when entered again later. For tensor-parallel modules it
    counts the share of this rank.

    Example:
        >>> layer = torch.nn.Linear(4, 8)
        >>> with FlopCounter() as counter:
        ...     layer(torch.ones(2, 4)).sum().backward()
        >>> counter.counts.model
        {'float32': 256}
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled: torch would otherwise run it eagerly from then on."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0
        #: Whether nothing is counted for now.
        self.paused = False
        self._fake_mode: object = None
        self._model: Counter[str] = Counter()
        self._hardware: Counter[str] = Counter()
        self._tracked = 0
        self._untracked_names: Counter[str] = Counter()

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return Counts(
            dict(self._model), dict(self._hardware), self._tracked, dict(self._untracked_names)
        )

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._fake_mode = _fake_mode()
            _CONSTRUCTION.patch()
            self._push()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._pop()
            _CONSTRUCTION.restore()

    def _push(self) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]

    def _pop(self) -> None:
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count it."""
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper subclass (DTensor, nested, quantized): count the operators on the inner
            # tensors, which for a DTensor are the share of this rank.
            return NotImplemented
        kwargs = kwargs or {}
        if is_composite(operator):
            keys = _dispatch_keys((*args, *kwargs.values()))
            if not has_own_kernel(operator, keys):
                with _as_uncounted(operator, keys):
                    self._push()  # not `with self`, which has no effect inside itself
                    try:
                        # Not `operator.decompose`, which prefers decompositions in Python.
                        return operator._op_dk(_COMPOSITE, *args, **kwargs)
                    finally:
                        self._pop()
        out = operator(*args, **kwargs)
        try:
            self._count(operator, args, out)
        except Exception:  # no formula or an unexpected shape, which must not stop training
            self._untracked_names[qualified_name(operator)] += 1
        return out

    def _count(self, operator: Any, args: tuple[Any, ...], out: object) -> None:
        formula = formula_of(operator)
        # Another fake mode only computes shapes, as DTensor does for global shapes.
        if formula is None or self.paused or _fake_mode() is not self._fake_mode:
            return
        dtype, flops = _work(formula, args, out)
        self._tracked += 1
        self._hardware[dtype] += flops
        if not is_recomputation():
            self._model[dtype] += flops


class _Construction:
    """Lets counted code construct tensors of its own classes, which torch refuses under a mode.

    Replaces ``Tensor.__new__`` while any thread counts.
    """

    def __init__(self) -> None:
        self._lock, self._counters = Lock(), 0
        # Another library's replacement, such as DeepSpeed's.
        self._theirs: Any = None

    def patch(self) -> None:
        """A counter starts."""
        # It keeps the Tensor.__new__ of its import, which must be the original. The first operator
        # under a mode would import it anyway.
        import torch._dynamo  # noqa: F401

        with self._lock:
            if not self._counters:
                self._theirs = vars(Tensor).get("__new__")
            self._counters += 1
            Tensor.__new__ = _construct  # type: ignore[method-assign, assignment]

    def restore(self) -> None:
        """A counter stops."""
        with self._lock:
            self._counters -= 1
            if not self._counters:
                del Tensor.__new__
                if self._theirs is not None:
                    Tensor.__new__ = self._theirs  # type: ignore[method-assign]


_CONSTRUCTION = _Construction()


def _construct(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """As ``Tensor.__new__``, outside of the counters of this thread."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, FlopCounter):
        return torch._C.TensorBase.__new__(kind, *args, **kwargs)
    mode._pop()
    try:
        return _construct(kind, *args, **kwargs)
    finally:
        mode._push()


def _dispatch_keys(args: Sequence[Any]) -> DispatchKeySet:
    keys = DispatchKeySet(DispatchKey.Undefined)
    for tensor in _tensors(args):
        keys |= torch._C._dispatch_keys(tensor)
    return keys


@contextmanager
def _as_uncounted(operator: Any, keys: DispatchKeySet) -> Iterator[None]:
    """Dispatch the parts of an operator as they would be without a dispatch mode.

    A mode runs after autograd, autocast and view tracking. Under inference_mode, composite
    operators run before the latter two.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    known = AUTOCAST if is_autocast(operator, keys) else DispatchKeySet(DispatchKey.Undefined)
    restore = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    with restore, torch._C._ExcludeDispatchKeyGuard(known):
        yield


def _fake_mode() -> object:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _work(formula: Formula, args: tuple[Any, ...], out: object) -> tuple[str, int]:
    tensors = list(_tensors(args))
    if any(tensor.layout in _SPARSE for tensor in tensors):
        raise NotImplementedError  # it depends on the values
    dtype = tensors[0].dtype
    name = str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
    # MIOpen, cuDNN's counterpart on AMD devices, has no TensorFloat-32.
    nvidia = tensors[0].device.type == "cuda" and torch.version.hip is None
    if nvidia and formula in CUDNN and name == "float32" and tf32_is_on(cudnn=True):
        name = "tf32"
    return name, int(formula(args, out)) * (4 if dtype.is_complex else 1)


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)
