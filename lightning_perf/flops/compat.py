"""The internals of torch that counting needs, each with a fallback.

``tests/flops/test_flops_compat.py`` says what ends without each.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils.checkpoint import CheckpointFunction

from lightning_perf.patches import MethodPatch, PatchSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from torch._C import DispatchKeySet

_CHECKPOINT_FILE = CheckpointFunction.backward.__code__.co_filename
_RECOMPUTING = frozenset(["backward", "recompute_fn", "unpack_hook"])
#: The function of torch.autograd that starts each backward.
RUN = "_engine_run_backward"
_AUTOGRAD_BACKWARD = torch.autograd.backward.__code__
#: The number of the next node of autograd's graph in the calling thread; 0 if it is unknown.
next_node: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", int)
#: Whether each backward that runs under a counter will be differentiated (``create_graph=True``):
#: the innermost one is last.
_DIFFERENTIATED: list[bool] = []


def is_recomputation() -> bool:
    """Whether a forward is recomputed during a backward, by any kind of activation checkpointing.

    A backward runs with gradients disabled, unless it will be differentiated. Where it will not but
    gradients are enabled, a function of the graph has enabled them to run a forward again.
    Otherwise only torch's own checkpointing is recognized.
    """
    if hasattr(torch._C, "_current_graph_task_id"):
        if not is_in_backward():
            return False
        if torch.is_grad_enabled() and _DIFFERENTIATED[-1:] == [False]:
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


def current_backward() -> int:
    """A number of the backward that the calling thread runs; -1 if none, or if it is unknown."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if task is None else task()


def is_in_backward() -> bool:
    """Whether the calling thread runs a backward; False if it is unknown."""
    return current_backward() != -1


def graph_position() -> int | None:
    """The number of the next node of autograd's graph in this thread; None if it is unknown."""
    return None if next_node is int else next_node()


def nodes_since(tensors: Iterable[Tensor], position: int | None) -> set[Any]:
    """The nodes of autograd's graph behind some tensors that were made since a position."""
    end, found = graph_position(), set()
    if position is None or end is None:
        raise NotImplementedError
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node: Any = waiting.pop()
        # The numbers of leaves are greater than all others.
        if node is not None and node not in found and position <= node._sequence_nr() < end:
            found.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return found


def current_mode() -> object:
    """The innermost dispatch mode of the calling thread; None if it is unknown."""
    find = getattr(_python_dispatch, "_get_current_dispatch_mode", None)
    return None if find is None else find()


def modes() -> Sequence[object]:
    """The dispatch modes of the calling thread, the innermost first; empty if they are unknown."""
    find = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
    return [] if find is None else find()[::-1]


def leave(mode: object) -> None:
    """Take the innermost dispatch mode of the calling thread off torch's stack."""
    if current_mode() is mode:
        _python_dispatch._pop_mode()


#: Names of torch that split an operator into its parts; all or none of them are used.
_DISPATCHER = (
    "DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard", "_RestorePythonTLSSnapshot",
    "_after_ADInplaceOrView_keyset", "_dispatch_has_kernel_for_dispatch_key", "_dispatch_keys",
)  # fmt: skip


def is_registered_composite(operator: Any) -> bool:
    """Whether an operator with a tensor result is registered as a composition of others."""
    if not hasattr(operator, "_op_dk") or any(not hasattr(torch._C, name) for name in _DISPATCHER):
        return False
    # Operators without a tensor result return sizes and strides: for some subclasses these
    # decompose into themselves. `_can_decompose` is not used: it includes decompositions in Python,
    # which apply to tracing only, and it can abort the process outside aten.
    tensors = any("Tensor" in str(one.type) for one in operator._schema.returns)
    return tensors and _registered(operator, "CompositeImplicitAutograd")


def is_only_composite(operator: Any) -> bool:
    """Whether an operator is composed of others on every device, so that no mode sees it."""
    devices = ("CPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1")
    return is_registered_composite(operator) and not any(_registered(operator, d) for d in devices)


def parts_of(operator: Any, tensors: Sequence[Tensor]) -> Callable[..., Any] | None:
    """Return what runs the parts of a composite operator; None if it runs as a whole.

    It does if it has a kernel for these tensors.
    """
    keys = _key_set()
    for tensor in tensors:
        keys |= torch._C._dispatch_keys(tensor)
    backends = keys & torch._C._after_ADInplaceOrView_keyset
    nested = keys.has(torch._C.DispatchKey.AutogradNestedTensor)
    if operator.has_kernel_for_any_dispatch_key(backends) or (
        nested and _registered(operator, "CompositeImplicitAutogradNestedTensor")
    ):
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with _as_uncounted(operator, keys):
            # Not `operator.decompose`, which prefers decompositions in Python.
            return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return run


def _registered(operator: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def _key_set(prefix: str = "Undefined") -> DispatchKeySet:
    """Return the keys whose names start with a prefix."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith(prefix):
            keys |= torch._C.DispatchKeySet(key)
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
    autocast = _key_set("Autocast")
    # Autocast may handle the operator itself, and not its parts.
    if not operator.has_kernel_for_any_dispatch_key(keys & autocast):
        autocast = _key_set()
    restore = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
    with restore, torch._C._ExcludeDispatchKeyGuard(autocast):
        yield


class _Backward(MethodPatch):
    """As ``torch.autograd``'s function, noting whether it creates a graph."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        creates_graph = args[3] if len(args) > 3 else kwargs.get("create_graph", False)
        # What a recomputation differentiates is part of the forward that it runs again.
        _DIFFERENTIATED.append(bool(creates_graph) and not is_recomputation())
        try:
            return self.original(*args, **kwargs)
        finally:
            _DIFFERENTIATED.pop()


class Patches:
    """Patches of torch while any thread is inside of a mode of this kind.

    ``Tensor.__new__``, so that counted code can construct tensors of its own classes, which torch
    refuses under a mode; the function that starts each backward; and what ``wrap`` wraps, until
    its ``restore``. The mode has the methods ``begin`` and ``end``.
    """

    def __init__(self, kind: type[Any], wrap: Callable[[], Any]) -> None:
        self._kind, self._wrap = kind, wrap
        self._wrapped: Any = None
        self._lock, self._users = RLock(), 0
        # Another library's replacement, such as DeepSpeed's.
        self._replaced: Any = None
        self._backward = PatchSet()

    def patch(self) -> None:
        """A mode starts."""
        # It keeps the Tensor.__new__ of its import, which must be the original. The first operator
        # under a mode would import it anyway.
        import torch._dynamo

        with self._lock:
            if not self._users and hasattr(_python_dispatch, "_get_current_dispatch_mode"):
                self._replaced = vars(Tensor).get("__new__")
                Tensor.__new__ = self._construct  # type: ignore[method-assign, assignment]
            if not self._users:
                self._wrapped = self._wrap()
            self._backward.wrap(torch.autograd, RUN, _Backward)
            self._users += 1

    def restore(self) -> None:
        """A mode stops."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._backward.restore()
            self._wrapped.restore()
            # Whoever replaced it later restores it.
            if getattr(vars(Tensor).get("__new__"), "__self__", None) is self:
                del Tensor.__new__
                if self._replaced is not None:
                    Tensor.__new__ = self._replaced  # type: ignore[method-assign]

    def _construct(self, kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """As ``Tensor.__new__``, outside of the modes of this thread."""
        mode: Any = current_mode()
        if not isinstance(mode, self._kind):
            return super(Tensor, kind).__new__(kind, *args, **kwargs)
        mode.end()
        try:
            return self._construct(kind, *args, **kwargs)
        finally:
            mode.begin()


def fake_modes() -> tuple[type[Any], type[Any]]:
    """The mode in which tensors have no data, and the one in which a copy converts them."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    return FakeTensorMode, FakeCopyMode


def multiply_int8(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of int8, where torch has it."""
    return torch._int_mm(a, b)
