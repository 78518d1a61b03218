"""Counts the FLOPs of executed operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_perf.errors import let_through
from lightning_perf.flops.attention import Work
from lightning_perf.flops.compat import (
    Patches,
    current_mode,
    is_in_backward,
    is_recomputation,
    leave,
    modes,
    parts_of,
)
from lightning_perf.flops.external import Wrapped
from lightning_perf.flops.operators import (
    CUDNN,
    Call,
    Formula,
    formula_of,
    is_composite,
    operand,
    qualified_name,
    tf32_is_on,
    work_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


_SPARSE = frozenset(
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
#: Tensors whose operators Python and autograd call alike.
_PLAIN = (Tensor, nn.Parameter)


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
    #: FLOPs of attention in ``model`` that causal masks hide, by dtype.
    hidden: Mapping[str, int] = field(default_factory=dict)

    @property
    def untracked_operations(self) -> int:
        """Calls of operators with unknown FLOPs."""
        return sum(self.untracked_names.values())

    @property
    def flops(self) -> tuple[Mapping[str, int], ...]:
        """FLOPs by dtype of the model, with recomputation, and hidden by causal masks."""
        return self.model, self.hardware, self.hidden

    @property
    def model_flops(self) -> int:
        """FLOPs of all dtypes, without recomputation."""
        return sum(self.model.values())

    @property
    def hardware_flops(self) -> int:
        """FLOPs of all dtypes, including recomputation."""
        return sum(self.hardware.values())


def mean(batches: Sequence[Counts]) -> Counts:
    """The mean of several batches."""
    return weighted((1 / len(batches), counts) for counts in batches)


def weighted(parts: Iterable[tuple[float, Counts]]) -> Counts:
    """The sum of counts, each multiplied by a weight, in whole numbers."""
    names = ("model", "hardware", "untracked_names", "hidden")
    sums: dict[str, dict[str, float]] = {name: {} for name in names}
    operations = 0.0
    for weight, counts in parts:
        operations += weight * counts.tracked_operations
        for name in names:
            for key, value in getattr(counts, name).items():
                sums[name][key] = sums[name].get(key, 0.0) + weight * value
    whole = ({key: round(value) for key, value in sums[name].items()} for name in names)
    model, hardware, untracked, hidden = whole
    return Counts(model, hardware, round(operations), untracked, hidden)


class Progress(NamedTuple):
    """The counts until now."""

    flops: int
    #: FLOPs of calls whose backward autograd runs by operators of its own.
    differentiable: int
    #: Calls whose FLOPs are not known yet.
    later: int


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
        self._depth, self._patched = 0, False
        #: Whether nothing is counted for now.
        self.paused = False
        #: Whether a function of `EXTERNAL` runs, whose formula covers those that it calls.
        self.within_external = False
        #: Seconds of counting, without those that torch takes to call this class.
        self.seconds = 0.0
        self._fake_mode: object = None
        self._model: Counter[str] = Counter()
        self._hardware: Counter[str] = Counter()
        self._hidden: Counter[str] = Counter()
        self._differentiable = 0
        # Calls whose FLOPs are known once the device has done them.
        self._later: list[tuple[str, Callable[[], Work], str, bool]] = []
        self._tracked = 0
        self._untracked_names: Counter[str] = Counter()

    @property
    def progress(self) -> Progress:
        """The counts so far; in a recomputation, those that include recomputed FLOPs."""
        counted = self._hardware if is_recomputation() else self._model
        return Progress(sum(counted.values()), self._differentiable, len(self._later))

    @property
    def counts(self) -> Counts:
        """The counts so far; on a GPU it may wait for the lengths of packed sequences."""
        later, self._later = self._later, []
        for name, read, dtype, recomputed in later:
            try:
                self._add(dtype, read(), recomputed)
            except Exception as error:
                let_through(error)
                self._untracked_names[name] += 1
        return Counts(
            dict(+self._model), dict(+self._hardware), self._tracked, dict(self._untracked_names),
            dict(self._hidden),
        )  # fmt: skip

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._fake_mode = _fake_mode([torch.empty(0, device="cpu")])
            _PATCHES.patch()
            self._patched = True
            self.begin()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.end()
            self._restore()

    def remove(self) -> None:
        """Stop counting where an interruption, such as Ctrl-C, has left the counter."""
        while current_mode() is self:
            try:
                self.end()
            except IndexError:  # torch was interrupted after it had restored its flags
                leave(self)
        self._restore()

    def _restore(self) -> None:
        if self._patched:
            self._patched, self._depth = False, 0
            _PATCHES.restore()

    def begin(self) -> None:
        """Count from now on, as the innermost mode."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop counting; no other mode may be inside of this one."""
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
        if any(type(each) not in _PLAIN for each in _tensors((*args, *kwargs.values()))):
            # Python calls the user's __torch_function__, which autograd does not in a backward.
            with torch._C.DisableTorchFunctionSubclass():
                return self._run(operator, args, kwargs)
        return self._run(operator, args, kwargs)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = None
        if is_composite(operator):
            parts = parts_of(operator, [*_tensors((*args, *kwargs.values()))])
        if parts is not None:
            self.begin()  # not `with self`, which has no effect inside itself
            try:
                return parts(*args, **kwargs)
            finally:
                self.end()
        out = operator(*args, **kwargs)
        began = perf_counter()
        try:
            self._count(Call(operator, args, kwargs), out)
        except Exception as error:  # no formula or an unexpected shape must not stop training
            let_through(error)
            self._untracked_names[qualified_name(operator)] += 1
        self.seconds += perf_counter() - began
        return out

    def _count(self, call: Call, out: object) -> None:
        formula = formula_of(call.operator)
        # Another fake mode only computes shapes, as DTensor does for global shapes.
        if formula is None or self.paused or _fake_mode((*call.args, out)) is not self._fake_mode:
            return
        dtype, factor = _dtype(formula, [*_tensors((*call.args, *call.kwargs.values()))])
        work = work_of(formula, call, out)
        self._tracked += 1
        if callable(work):
            self._later.append((qualified_name(call.operator), work, dtype, is_recomputation()))
        else:
            whole = work if isinstance(work, Work) else Work(int(work) * factor)
            self._add(dtype, whole, is_recomputation())

    def add(self, dtype: str, work: Work) -> None:
        """Count a call that torch's dispatcher does not see."""
        if self._depth and not self.paused:
            self._tracked += work.flops > 0
            self._add(dtype, work, is_recomputation())

    def add_unknown(self, name: str) -> None:
        """List a call with unknown FLOPs; its backward is not listed again."""
        if not is_in_backward():
            self._untracked_names[name] += 1

    def _add(self, dtype: str, work: Work, recomputed: bool) -> None:
        self._hardware[dtype] += work.flops
        if torch.is_grad_enabled():  # not in the forward of a torch.autograd.Function
            self._differentiable += work.flops
        if not recomputed:
            self._model[dtype] += work.flops
            if work.hidden:
                self._hidden[dtype] += work.hidden


def _active() -> FlopCounter | None:
    """The counter of the calling thread, if it counts; torch may have modes inside of it."""
    counter = next((mode for mode in modes() if isinstance(mode, FlopCounter)), None)
    return None if counter is None or counter.paused else counter


_PATCHES = Patches(FlopCounter, lambda: Wrapped(_active))


def _fake_mode(values: Sequence[Any]) -> object:
    """The mode of the fake tensors among some values; None if all are real."""
    modes = (getattr(tensor, "fake_mode", None) for tensor in _tensors(values))
    return next((mode for mode in modes if mode is not None), None)


def _dtype(formula: Formula, tensors: Sequence[Tensor]) -> tuple[str, int]:
    """The dtype of the operands, and by what the FLOPs of real numbers are multiplied."""
    if any(tensor.layout in _SPARSE for tensor in tensors):
        raise NotImplementedError  # it depends on the values
    first = operand(tensors)
    dtype = first.dtype
    name = str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
    # MIOpen, cuDNN's counterpart on AMD devices, has no TensorFloat-32.
    nvidia = first.device.type == "cuda" and torch.version.hip is None
    if nvidia and formula in CUDNN and name == "float32" and tf32_is_on(cudnn=True):
        name = "tf32"
    return name, 4 if dtype.is_complex else 1


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)
