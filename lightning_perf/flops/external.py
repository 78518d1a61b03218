"""Counts code that torch's dispatcher does not see: kernels that packages launch themselves.

While a batch is counted, known functions and modules of such packages are wrapped: each call adds
the FLOPs of its formula. Triton kernels, and functions without a formula, are listed by name: what
was counted is then a lower bound.
"""

from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial, wraps
from inspect import signature
from math import inf
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.flops.attention import Attention, Work
from lightning_perf.flops.batch import tensors
from lightning_perf.flops.compat import (
    current_backward,
    graph_position,
    is_only_composite,
    nodes_since,
)
from lightning_perf.flops.operators import (
    FORMULAS,
    ByCall,
    ByName,
    formula_of,
    operand,
    qualified_name,
)
from lightning_perf.patches import MethodPatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    #: The dictionary of a module, and a name in it.
    Place = tuple[dict[str, Any], str]

#: Arguments by name. A formula gives the FLOPs of the call, of which a backward has twice as many,
#: or a pair of both.
Call = Mapping[str, Any]


# -- formulas -------------------------------------------------------------------------------------


def _te_products(call: Call) -> tuple[int, int]:
    """Transformer Engine: each weight once per token, and both gradients if they are needed."""
    module, x = call["self"], call["inp"]
    weights = [own for own in module.parameters(recurse=False) if own.dim() == 2]
    shared = getattr(module, "num_gemms", 1)  # each token has one of these weights
    flops = 2 * (x.numel() // x.size(-1)) * sum(weight.numel() for weight in weights) // shared
    gradients = x.requires_grad + any(weight.requires_grad for weight in weights)
    return flops, gradients * flops


def _te_attention(call: Call) -> Work:
    """Transformer Engine: tensors of the layout ``qkv_format``, such as ``sbhd``."""

    def option(name: str) -> Any:
        return call.get(name) or getattr(call["self"], name, None)

    layout, tensors = option("qkv_format"), {n[0]: call[f"{n}_layer"] for n in _TENSORS}
    if layout == "sbhd":
        tensors = {name: tensor.transpose(0, 1) for name, tensor in tensors.items()}
    if layout == "thd":
        tensors |= {"cu_seqlens_q": call["cu_seqlens_q"], "cu_seqlens_k": call["cu_seqlens_kv"]}
    mask = {
        "causal": "causal" in str(option("attn_mask_type")),
        "window_size": option("window_size"),
    }
    return _attention(tensors | mask)


_TENSORS = ("query", "key", "value")


def _attention(call: Call) -> Work:
    """Attention with the heads after the length, as in flash-attn."""
    work = Attention()(call)
    return work() if callable(work) else work


def _selective_scan(call: Call) -> int:
    """Mamba: ``u`` is [batch, channels, length], ``A`` [channels, states].

    Its authors' count: https://github.com/state-spaces/mamba/issues/110.
    """
    return int(9 * call["u"].numel() * call["A"].size(-1))


def _chunk_scan(call: Call) -> int:
    """Mamba-2: ``x`` is [batch, length, heads, features], ``B`` [batch, length, groups, states]."""
    x, groups, states = call["x"], call["B"].size(-2), call["B"].size(-1)
    heads, width = x.size(-2), x.size(-1)
    # C B' once per group, and its product with x; then the states of the chunks.
    within = call["chunk_size"] * (groups * states + heads * width)
    return int(2 * x.size(0) * x.size(1) * (within + 2 * heads * width * states))


def _linear_attention(call: Call) -> int:
    """Linear attention in fla's chunks of 64: ``q`` is [batch, length, heads, features]."""
    q, key, value = call["q"], call["q"].size(-1), call["v"].size(-1)
    return int(2 * (q.numel() // key) * (64 * (key + value) + 2 * key * value))


def _named(module: str, names: str, formula: Callable[[Call], Any] | None) -> dict[str, Any]:
    """The entries of some names of a module, whose formula gets arguments by name."""
    return {f"{module}:{name}": formula and ByName(formula) for name in names.split()}


#: Formulas by ``module:name`` of functions and modules; None for those that are listed by name.
EXTERNAL: dict[str, ByName | Callable[..., Any] | None] = {
    **_named(
        "transformer_engine.pytorch",
        "Linear LayerNormLinear LayerNormMLP GroupedLinear",
        _te_products,
    ),
    **_named("transformer_engine.pytorch", "DotProductAttention", _te_attention),
    **_named(
        "transformer_engine_torch", "generic_gemm te_general_grouped_gemm fused_attn_fwd", None
    ),
    **_named("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _selective_scan),
    **_named("selective_scan_cuda", "fwd", None),
    **_named("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _chunk_scan),
    **_named("fla.ops.gla", "chunk_gla", _linear_attention),
    **_named("fla.ops.linear_attn", "chunk_linear_attn", _linear_attention),
    **_named("fla.ops.retention", "chunk_retention", _linear_attention),
    **_named("fla.ops.simple_gla", "chunk_simple_gla", _linear_attention),
    **_named("flash_attn.cute.interface", "flash_attn_func flash_attn_varlen_func", _attention),
}
#: Types whose calls can be counted; other callables have more than their call.
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
#: Words in the names of Triton kernels, between underscores: of those with products ...
_HEAVY_KERNEL = re.compile(
    r"gemm(?!a)|gemv|mat_?mul|attn|attention|flash|linear|neighborhood"
    r"|(?:^|_)(?:[^\W_]*mm|mv|dot|conv[23]?d?|grouped|proj|scan|moe|delta)\d*(?:_|$)",
    re.IGNORECASE,
)
#: ... and of those whose work does not count otherwise, as that of elementwise operators.
_LIGHT_KERNEL = re.compile(
    r"(?:^|_)(?:[^\W_]*(?:norm|glu|elu|silu|max|sigmoid|entropy|rope|embedding|conv1d|quant"
    r"|quanti[sz]ed?|cast|copy|cumsum|sumexp)|normalize|rotary|kldiv|kl|jsd|distance|dyt|dropout"
    r"|adamw?|optim\w*|fill|convert|element(?:wise)?|reduce|activation|loss|fg|dfg|exact|approx)\d*(?:_|$)",
    re.IGNORECASE,
)


def flop_formula(target: Any, formula: Callable[..., Any]) -> None:
    """Give the FLOPs of an operator, a function or a module that lightning_perf does not know.

    Args:
        target: An operator (``torch.ops.mine.scan``), whose backward is an operator of its own; or
            a function, a method of a class or a class of modules, or its address
            ``"package.module:name"``, which is imported, whose work torch does not see, such as
            one that launches a Triton kernel.
        formula: Called with the arguments of a call and its result as ``out``, for modules with the
            module first. Returns the FLOPs of the forward, 2 per multiply-add. A backward of a
            function or a module counts twice as many, unless the formula returns a pair of both.

    Raises:
        ConfigError: It is none of these, or its calls cannot be counted.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ...     return x @ y
        >>> flop_formula(torch.ops.docs.scale, lambda x, y, out: 2 * x.size(1) * out.numel())
        >>> from lightning_perf.flops import FlopCounter
        >>> with FlopCounter() as counter:
        ...     product = scale(torch.ones(2, 3), torch.ones(3, 4))
        >>> counter.counts.model
        {'float32': 48}
    """
    operator = getattr(target, "_opoverload", target)  # of torch.library.custom_op
    overloads = getattr(operator, "overloads", None)
    if callable(overloads):
        operator = getattr(operator, overloads()[0])
    if not callable(formula):
        raise ConfigError("formula", formula, "is not a function of the call's arguments", None)
    if hasattr(operator, "_schema"):
        if is_only_composite(operator):
            problem = "is composed of others, which run instead: register a function that calls it"
            raise ConfigError("target", target, problem, None)
        FORMULAS[qualified_name(operator)] = ByCall(formula)
        formula_of.cache_clear()
        return
    is_module = isinstance(target, type) and issubclass(target, nn.Module)
    if isinstance(target, str) and re.fullmatch(r"[\w.]+:[\w.]+", target):
        address = target
    elif type(target) in _FUNCTIONS or is_module:
        address = _address(target)
    else:
        problem = "is no operator, function, module class or address of one"
        raise ConfigError("target", target, problem, '"my_package.kernels:scan"')
    try:
        importlib.import_module(address.partition(":")[0])
        owner, _, function = _find(address)
    except Exception as error:
        problem = f"is not found ({describe(error)}): register what a module has under a name"
        raise ConfigError("target", target, problem, '"my_package.kernels:scan"') from error
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        problem = "is part of a torch.autograd.Function: register a function that calls its apply"
        raise ConfigError("target", target, problem, None)
    if not isinstance(owner, type) and (holders := _holders(function)):
        warn(
            f"flop_formula: a {' and a '.join(holders)} also has {address}. Calls from there are "
            "not counted: register a function that makes them."
        )
    EXTERNAL[address] = formula


def _address(target: Any) -> str:
    """The address of a function or a class: its own, or the first name that a module has for it."""
    own = f"{target.__module__}:{target.__qualname__}"
    with suppress(Exception):
        owner, _, function = _find(own)
        if target in (owner, function):
            return own
    places = (
        f"{module}:{name}"
        for module, space in [*sys.modules.items()]
        if type(space) is ModuleType
        for name, value in [*vars(space).items()]
        if value is target
    )
    return next(places, own)


def _find(address: str) -> tuple[Any, str, Any]:
    """The owner of a function, its name there, and the function: ``forward`` of a module."""
    module, _, path = address.partition(":")
    owner: Any = None
    found: Any = sys.modules[module]
    for name in path.split("."):
        owner, found = found, vars(found)[name]
    if isinstance(found, type) and issubclass(found, nn.Module):
        owner, name, found = found, "forward", vars(found)["forward"]
    function = found.__func__ if isinstance(found, staticmethod) else found
    if type(function) not in _FUNCTIONS:
        raise TypeError(f"{name} is no function")
    return owner, name, function


def _holders(function: Any) -> list[str]:
    """Types of objects other than modules that hold a function, and probably call it."""
    found: set[str] = set()
    for each in gc.get_referrers(function):
        if isinstance(each, dict):  # but the names in a module, and keys
            # Not in a generator, which would be one more that has the function.
            calls = "__spec__" not in each and id(function) in map(id, each.values())
        elif isinstance(each, tuple):  # of default arguments
            calls = any(isinstance(owner, FunctionType) for owner in gc.get_referrers(each))
        else:
            calls = isinstance(each, partial | staticmethod | CellType | nn.Module)
        if calls:
            found.add(type(each).__name__)
    return sorted(found)


# -- calls while a batch is counted --------------------------------------------------------------


class _Counted(MethodPatch):
    """A function that is counted; it is equal to the original and pickles as it."""

    def __init__(self, original: Any, name: str, formula: Any, active: Callable[[], Any]) -> None:
        super().__init__(original)
        self._counts = name, formula, active
        self.__module__ = original.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and count it."""
        if torch.compiler.is_compiling():  # compiled code is counted on a shadow, or not at all
            return self.original(*args, **kwargs)
        return _call(self.original, *self._counts, args, kwargs)

    def __reduce__(self) -> Any:
        return self.original.__qualname__  # its module has it under this name


def _call(
    original: Any, name: str, formula: Any, active: Callable[[], Any], args: Any, kwargs: Any
) -> Any:
    """Call a function, and count it if the thread's operators are counted."""
    counter = active()
    if counter is None or counter.within_external:
        return original(*args, **kwargs)
    counter.within_external, out = formula is not None, None
    before, position = counter.progress, graph_position()
    try:
        out = original(*args, **kwargs)
    finally:  # a recomputation may end by an exception
        counter.within_external = False
        with suppress(Exception):
            _record(counter, name, formula, original, args, kwargs, out, before, position)
    return out


#: The name of compiled graphs among untracked calls: a dispatch mode sees few of their kernels.
COMPILED = "functions compiled by torch.compile"


class Wrapped:
    """Wraps what `EXTERNAL` names in packages that are imported, until `restore`.

    It reads and writes the dictionaries of modules, without their own ways of access, and wraps
    nothing but plain functions and those that a class defines. No error leaves it.
    """

    def __init__(self, active: Callable[[], Any]) -> None:
        # Returns the `FlopCounter` of the calling thread, if it counts.
        self._active = active
        self._functions: dict[int, _Counted] = {}
        # Classes, with the name and both values of a method.
        self._methods: list[tuple[type, str, Any, Any]] = []
        for address, formula in EXTERNAL.items():
            with suppress(Exception):  # of another version of the package
                self._wrap(address, formula)
        found = frozenset(self._functions)
        self._places = _places(len(sys.modules), found) if found else []
        self._known = {*sys.modules} if self._functions else set()
        for space, name in self._places:
            ours = self._functions.get(id(space.get(name)))
            if ours is not None and space.get(name) is ours.original:
                space[name] = ours
        with suppress(Exception):
            kernels = vars(sys.modules["triton.runtime.jit"])["JITFunction"]
            self._replace(kernels, "run", self._noted(vars(kernels)["run"]))
        with suppress(Exception):
            graphs = vars(sys.modules["torch._inductor.output_code"])["CompiledFxGraph"]
            self._replace(graphs, "__call__", self._noted_graph(vars(graphs)["__call__"]))

    def _wrap(self, address: str, formula: Any) -> None:
        owner, name, function = _find(address)
        counts = address.replace(":", "."), formula, self._active
        if not isinstance(owner, type):
            self._functions[id(function)] = _Counted(function, *counts)
            return

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return _call(function, *counts, args, kwargs)

        self._replace(owner, name, call)

    def _replace(self, owner: type, name: str, ours: Any) -> None:
        original = vars(owner)[name]
        if type(original) is staticmethod:
            ours = staticmethod(ours)
        if type(original) in (FunctionType, staticmethod):
            self._methods.append((owner, name, original, ours))
            setattr(owner, name, ours)

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            counter = None if torch.compiler.is_compiling() else self._active()
            if counter is not None and not counter.within_external:
                with suppress(Exception):
                    function = getattr(kernel, "fn", kernel)
                    name = function.__name__
                    if _HEAVY_KERNEL.search(name) or not _LIGHT_KERNEL.search(name):
                        counter.add_unknown(f"{function.__module__}.{name}")
            return original(kernel, *args, **kwargs)

        return run

    def _noted_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if (counter := self._active()) is not None:
                counter.add_unknown(COMPILED)
            return original(graph, *args, **kwargs)

        return call

    def restore(self) -> None:
        """Restore what is still wrapped, also in modules that were imported meanwhile."""
        for owner, name, original, ours in self._methods:
            with suppress(Exception):
                if vars(owner).get(name) is ours:  # it was not replaced since
                    setattr(owner, name, original)
        late = sys.modules.keys() - self._known if self._known else ()
        for space, name in [*self._places, *_names_in(late)]:
            value = space.get(name)
            if type(value) is _Counted and value is self._functions.get(id(value.original)):
                space[name] = value.original
        for function in self._functions.values():  # the user's objects may have kept it
            function._release(lambda: None)


def _names_in(modules: Iterable[str]) -> Iterator[Place]:
    """Every name in some modules, with their dictionaries."""
    for module in map(sys.modules.get, [*modules]):
        if type(module) is ModuleType:
            yield from ((vars(module), name) for name in [*vars(module)])


@lru_cache(maxsize=1)
def _places(imported: int, functions: frozenset[int]) -> list[Place]:  # noqa: ARG001 (of the cache)
    """The names under which modules have functions, by their identities.

    Cached until the number of imported modules changes: reading all names takes 100 ms.
    """
    names = _names_in(sys.modules)
    return [(space, name) for space, name in names if id(space.get(name)) in functions]


def _record(
    counter: Any, name: str, formula: Any, original: Any, args: Any, kwargs: Any, out: Any,
    before: Any, position: int | None,
) -> None:  # fmt: skip
    """Count a call that is over, and its backward when that runs.

    FLOPs of operators that torch has seen in them since ``before`` are counted already.
    """
    seen, differentiable = _since(counter, before)
    try:
        if isinstance(formula, ByName):
            bound = signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            flops: Any = formula.formula(bound.arguments)
        else:
            flops = formula(*args, **kwargs, out=out)
        forward, *pair = map(_work, flops if type(flops) is tuple else (flops,))
        dtype, later = _dtypes(name, [*args, *kwargs.values()], out)
    except Exception:  # there is no formula, or it does not know these arguments
        counter.add_unknown(name)
        return
    counter.add(dtype, _part(forward, forward.flops - seen))
    # Twice the forward, but what autograd differentiates, which counts as it runs.
    backward = pair[0] if pair else _part(forward, 2 * (forward.flops - differentiable))
    # Results in attributes of an object, too, and arguments that are written to.
    results = _tensors([*tensors(out, seen=set()), *tensors([args, kwargs])])
    if backward.flops and any(tensor.grad_fn is not None for tensor in results):
        try:
            _Backward(counter, later, backward).watch(nodes_since(results, position), bool(pair))
        except Exception:  # torch has changed
            counter.add_unknown(name)


def _work(flops: Any) -> Work:
    return flops if isinstance(flops, Work) else Work(int(flops))


def _part(work: Work, flops: float) -> Work:
    """Some FLOPs of a call, or none, with as many of them hidden."""
    flops = max(flops, 0)
    return Work(round(flops), round(work.hidden * flops / work.flops)) if work.flops else Work(0)


def _since(counter: Any, before: Any) -> tuple[float, float]:
    """The FLOPs that were counted since then, and those with a backward of autograd's own."""
    flops, differentiable, later = (
        now - then for now, then in zip(counter.progress, before, strict=True)
    )
    return (inf, inf) if later else (flops, differentiable)


class _Backward:
    """Counts the backward of a call while nodes of autograd's graph run that the call has made."""

    def __init__(self, counter: Any, dtype: str, work: Work) -> None:
        self._counter, self._dtype, self._work = counter, dtype, work
        # FLOPs that torch has seen, and work that was added, by backward.
        self._seen: dict[int, float] = {}
        self._added: dict[int, Work] = {}

    def watch(self, nodes: set[Any], all_seen: bool) -> None:
        """Count when a node that may launch kernels runs: not one of torch's own operators.

        What torch sees in its own is part of the work if ``all_seen``.
        """
        for node in nodes:
            opaque = not _OF_TORCH.fullmatch(node.name())
            if all_seen or opaque:
                self._watch(node, opaque)

    def _watch(self, node: Any, counts: bool) -> None:
        started: list[Any] = []

        def start(_: object) -> None:
            with suppress(Exception):
                started.append(self._counter.progress)

        def end(*_: object) -> None:
            with suppress(Exception):
                self._ran(_since(self._counter, started.pop())[0], counts)

        node.register_prehook(start)
        node.register_hook(end)

    def _ran(self, seen: float, counts: bool) -> None:
        run = current_backward()
        self._seen[run] = self._seen.get(run, 0.0) + seen
        if counts or run in self._added:
            rest = _part(self._work, self._work.flops - self._seen[run])
            flops, hidden = self._added.get(run, Work(0))
            self._counter.add(self._dtype, Work(rest.flops - flops, rest.hidden - hidden))
            self._added[run] = rest


#: Nodes of torch's own operators.
_OF_TORCH = re.compile(r"\w*Backward\d+")


def _dtypes(name: str, args: list[Any], out: Any) -> tuple[str, str]:
    """The dtypes of the operands of a call and of its backward."""
    weights = args[0].parameters() if args and isinstance(args[0], nn.Module) else ()
    first = operand([*_tensors(tensors([args, out])), *weights])
    device = first.device.type
    in_autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if in_autocast else first.dtype
    high = str(dtype).removeprefix("torch.")
    recipe = _recipe() if name.startswith("transformer_engine") else None
    if recipe is None:
        return high, high
    if name.endswith("Attention"):
        fp8 = getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
        return ("float8_e4m3fn",) * 2 if fp8 else (high, high)
    low = "float4_e2m1fn_x2" if getattr(recipe, "nvfp4", bool)() else "float8_e4m3fn"
    # Its backward may use the operands before or after quantization, in high precision.
    return low, high if getattr(recipe, "backward_override", None) else low


def _tensors(values: Iterable[tuple[object, Any]]) -> list[Tensor]:
    return [value for _, value in values if isinstance(value, Tensor)]


def _recipe() -> Any:
    """The recipe of low precision that Transformer Engine uses now, or None."""
    for module in ("transformer_engine.pytorch.fp8", "transformer_engine.pytorch.quantization"):
        state = getattr(sys.modules.get(module), "FP8GlobalStateManager", None)
        if state is not None:
            return state.get_fp8_recipe() if state.is_fp8_enabled() else None
    return None
