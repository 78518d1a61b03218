"""A counted step runs the same kernels as an uncounted one: all of torch.nn, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_perf.flops import FlopCounter

Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def r(*shape: int) -> Tensor:
    """Random numbers that require a gradient."""
    return torch.randn(shape, requires_grad=True)


def p(*shape: int) -> Tensor:
    """Random numbers between 0 and 1."""
    return torch.rand(shape, requires_grad=True)


def i(high: int, *shape: int) -> Tensor:
    """Random class indices."""
    return torch.randint(high, shape)


def of(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (r(*shape),)


def sign(*shape: int) -> Tensor:
    return (torch.rand(shape) > 0.5).float() * 2 - 1


X, SEQ, IMG, VOL = of(4, 8), of(2, 4, 9), of(2, 4, 8, 9), of(2, 4, 6, 7, 8)

CASES: dict[str, list[Case]] = {}


def add(name: str, make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]]) -> None:
    if name[0].islower() or hasattr(nn, name):  # the oldest supported torch lacks some of them
        CASES.setdefault(name, []).append((make, inputs))


ELEMENTWISE = (
    "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU "
    "RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Identity "
    "Dropout AlphaDropout FeatureAlphaDropout"
)
for name in ELEMENTWISE.split():
    add(name, getattr(nn, name), of(33, 64))
for name in ("LogSoftmax", "Softmax", "Softmin"):
    add(name, lambda name=name: getattr(nn, name)(-1), X)
add("GELU", lambda: nn.GELU(approximate="tanh"), X)
add("Softmax2d", nn.Softmax2d, IMG)
add("Threshold", lambda: nn.Threshold(0.1, 2.0), X)

for name in ("BCELoss", "HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss", "KLDivLoss"):
    add(name, getattr(nn, name), lambda: (p(4, 8), torch.rand(4, 8)))
for name in ("BCEWithLogitsLoss", "MultiLabelSoftMarginLoss"):
    add(name, getattr(nn, name), lambda: (r(4, 8), torch.rand(4, 8)))
    add(name, lambda name=name: getattr(nn, name)(weight=torch.rand(8)), lambda: (r(4, 8), p(4, 8)))
for name in ("SoftMarginLoss", "HingeEmbeddingLoss"):
    add(name, getattr(nn, name), lambda: (r(4, 8), sign(4, 8)))
for name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"):
    add(name, getattr(nn, name), lambda: (r(4, 8), i(8, 4)))
    add(name, lambda name=name: getattr(nn, name)(weight=torch.rand(8)), lambda: (r(4, 8), i(8, 4)))
add(
    "CrossEntropyLoss", lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda: (r(9, 8), i(8, 9))
)
add("CrossEntropyLoss", nn.CrossEntropyLoss, lambda: (r(4, 8), p(4, 8)))
add(
    "CrossEntropyLoss",
    lambda: nn.CrossEntropyLoss(ignore_index=0),
    lambda: (r(4, 8, 5), i(8, 4, 5)),
)
add("NLLLoss2d", nn.NLLLoss, lambda: (r(2, 4, 5, 6), i(4, 2, 5, 6)))
add("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(8, 12), lambda: (r(4, 8), i(12, 4)))
add(
    "CTCLoss", nn.CTCLoss,
    lambda: (r(20, 3, 8).log_softmax(2), i(7, 3, 6) + 1, i(5, 3) + 15, i(5, 3) + 1),
)  # fmt: skip
add("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, lambda: (r(4, 8), r(4, 8), sign(4)))
add("MarginRankingLoss", nn.MarginRankingLoss, lambda: (r(4), r(4), sign(4)))
add("GaussianNLLLoss", nn.GaussianNLLLoss, lambda: (r(4, 8), r(4, 8), p(4, 8)))
add("PoissonNLLLoss", lambda: nn.PoissonNLLLoss(full=True), lambda: (r(4, 8), 5 * torch.rand(4, 8)))
add("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, lambda: (r(4, 8), i(8, 4, 8)))
for name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss"):
    add(name, getattr(nn, name), lambda: (r(4, 8), r(4, 8), r(4, 8)))
add(
    "TripletMarginLoss",
    lambda: nn.TripletMarginLoss(swap=True),
    lambda: (r(4, 8), r(4, 8), r(4, 8)),
)
add(
    "AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]),
    lambda: (r(9, 8), i(12, 9)),
)  # fmt: skip
add("CosineSimilarity", nn.CosineSimilarity, lambda: (r(4, 8), r(4, 8)))
add("PairwiseDistance", nn.PairwiseDistance, lambda: (r(4, 8), r(4, 8)))

add("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(3), IMG)
add("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), IMG)
add("GroupNorm", lambda: nn.GroupNorm(2, 4), IMG)
add("LayerNorm", lambda: nn.LayerNorm(8), X)
add("RMSNorm", lambda: nn.RMSNorm(8), X)
for dims, x in ((1, SEQ), (2, IMG), (3, VOL)):
    for kind in ("BatchNorm", "InstanceNorm"):
        name = f"{kind}{dims}d"
        add(name, lambda name=name: getattr(nn, name)(4, affine=True), x)
        add(name, lambda name=name: getattr(nn, name)(4, track_running_stats=True).eval(), x)
        add(f"Lazy{name}", getattr(nn, f"Lazy{name}"), x)
    for kind in ("Conv", "ConvTranspose"):
        name = f"{kind}{dims}d"
        add(name, lambda name=name: getattr(nn, name)(4, 6, 3, stride=2, padding=1), x)
        add(name, lambda name=name: getattr(nn, name)(4, 8, 3, groups=2, dilation=2), x)
        add(f"Lazy{name}", lambda name=name: getattr(nn, f"Lazy{name}")(6, 3), x)
    name = f"Conv{dims}d"
    add(name, lambda name=name: getattr(nn, name)(4, 4, 3, padding="same", groups=4), x)
    add(name, lambda name=name: getattr(nn, name)(4, 4, 3, padding=1, padding_mode="circular"), x)
    for kind in ("AvgPool", "MaxPool"):
        add(f"{kind}{dims}d", lambda name=f"{kind}{dims}d": getattr(nn, name)(2), x)
    add(f"LPPool{dims}d", lambda name=f"LPPool{dims}d": getattr(nn, name)(2, 2), x)
    for kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
        add(f"{kind}{dims}d", lambda name=f"{kind}{dims}d": getattr(nn, name)(3), x)
    add(f"AdaptiveAvgPool{dims}d", lambda name=f"AdaptiveAvgPool{dims}d": getattr(nn, name)(1), x)
    pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
    unpool = getattr(nn, f"MaxUnpool{dims}d")(2)
    both = Call(lambda x, pool=pool, unpool=unpool: unpool(*pool(x), x.shape[2:]))
    add(f"MaxUnpool{dims}d", lambda both=both: both, x)
    add(f"Dropout{dims}d", getattr(nn, f"Dropout{dims}d"), x)
    for kind in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
        add(f"{kind}{dims}d", lambda name=f"{kind}{dims}d": getattr(nn, name)(1), x)
    add(f"ConstantPad{dims}d", lambda name=f"ConstantPad{dims}d": getattr(nn, name)(1, 0.5), x)
for x, modes in (
    (SEQ, ["linear", "nearest", "nearest-exact"]),
    (IMG, ["bilinear", "bicubic", "nearest", "nearest-exact", "area"]),
    (VOL, ["trilinear", "nearest", "nearest-exact"]),
):
    for mode in modes:
        add("Upsample", lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), x)
add("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(12), IMG)
add("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(12), IMG)
add("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3), IMG)
add("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=3), VOL)

for name in ("RNN", "GRU", "LSTM"):
    for options in (
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.3},
        {"bias": False},
    ):
        add(name, lambda n=name, o=options: getattr(nn, n)(8, 6, **o), of(5, 3, 8))
    packed = lambda: (  # noqa: E731
        nn.utils.rnn.pack_padded_sequence(r(5, 3, 8), torch.tensor([5, 4, 2])),
    )
    add(name, lambda n=name: getattr(nn, n)(8, 6), packed)
    add(f"{name}Cell", lambda n=f"{name}Cell": getattr(nn, n)(8, 6), of(3, 8))
add("RNN", lambda: nn.RNN(8, 6, nonlinearity="relu"), of(5, 3, 8))
add("LSTM", lambda: nn.LSTM(8, 6, proj_size=4), of(5, 3, 8))

add("Linear", lambda: nn.Linear(8, 6), of(4, 5, 8))
add("Linear", lambda: nn.Linear(8, 6, bias=False), X)
add("LazyLinear", lambda: nn.LazyLinear(6), X)
add("Bilinear", lambda: nn.Bilinear(8, 6, 5), lambda: (r(4, 8), r(4, 6)))
add("Embedding", lambda: nn.Embedding(9, 8, padding_idx=0), lambda: (i(9, 4, 5),))
add("Embedding", lambda: nn.Embedding(9, 8, max_norm=1.0), lambda: (i(9, 4, 5),))
add("Embedding", lambda: nn.Embedding(9, 8, sparse=True), lambda: (i(9, 4, 5),))
for mode in ("sum", "mean", "max"):
    add("EmbeddingBag", lambda mode=mode: nn.EmbeddingBag(9, 8, mode=mode), lambda: (i(9, 4, 5),))
add("ChannelShuffle", lambda: nn.ChannelShuffle(2), IMG)
add("PixelShuffle", lambda: nn.PixelShuffle(2), IMG)
add("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), of(2, 4, 8, 8))
add("Flatten", nn.Flatten, IMG)
add("Unflatten", lambda: nn.Unflatten(1, (2, 2)), IMG)
add("Fold", lambda: nn.Fold((4, 5), 2), of(2, 12, 12))
add("Unfold", lambda: nn.Unfold(2), IMG)

#: The masked positions are at the ends, as padding is.
PADDING = torch.arange(6) >= torch.tensor([6, 4, 3])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


def attends(options: dict[str, Any], **call: Any) -> nn.Module:
    inner = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    return Wrapped(inner, lambda module, x: module(x, x, x, **call))


class Wrapped(nn.Module):
    """A module with a special call."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.inner, *args)


for options, call in (
    ({}, {}),
    ({}, {"need_weights": False}),
    ({}, {"need_weights": False, "key_padding_mask": PADDING}),
    ({}, {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True}),
    ({"dropout": 0.2}, {"need_weights": False}),
    ({"dropout": 0.2, "bias": False}, {}),
    ({"add_bias_kv": True, "add_zero_attn": True}, {}),
):
    add("MultiheadAttention", lambda o=options, c=call: attends(o, **c), of(3, 6, 16))
for options in ({}, {"norm_first": True, "activation": "gelu"}, {"dropout": 0.0}):
    layer = lambda o=options: nn.TransformerEncoderLayer(  # noqa: E731
        16, 4, 32, batch_first=True, **o
    )
    add("TransformerEncoderLayer", layer, of(3, 6, 16))
    add(
        "TransformerEncoderLayer",
        lambda make=layer: Wrapped(make(), lambda m, x: m(x, src_key_padding_mask=PADDING)),
        of(3, 6, 16),
    )
    add(
        "TransformerEncoder",
        lambda make=layer, o=options: Wrapped(
            nn.TransformerEncoder(make(), 2, enable_nested_tensor="norm_first" not in o),
            lambda m, x: m(x, src_key_padding_mask=PADDING),
        ),
        of(3, 6, 16),
    )
add(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True),
    lambda: (r(3, 6, 16), r(3, 5, 16)),
)
add(
    "TransformerDecoder",
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2),
    lambda: (r(3, 6, 16), r(3, 5, 16)),
)
add(
    "Transformer",
    lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
    lambda: (r(3, 6, 16), r(3, 5, 16)),
)
for options in (
    {},
    {"is_causal": True},
    {"dropout_p": 0.3},
    {"attn_mask": CAUSAL},
    {"attn_mask": CAUSAL == 0},
    {"attn_mask": CAUSAL, "dropout_p": 0.3},
    {"scale": 0.3},
):
    add(
        "scaled_dot_product_attention",
        lambda o=options: Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **o)),
        lambda: (r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)),
    )
    add(
        "scaled_dot_product_attention",
        lambda o=options: Call(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **o)
        ),
        lambda: (r(2, 4, 6, 8), r(2, 2, 6, 8), r(2, 2, 6, 8)),
    )
for name, function in {
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "matmul": lambda x, y: x @ y.mT,
    "cdist": torch.cdist,
    "norm": lambda x, y: (x - y).norm() + x.norm(dim=-1).sum() + y.norm(p=3),
    "reductions": lambda x, y: (
        x.prod() + y.cumprod(-1).std() + x.var(-1).sum() + x.logsumexp(-1).sum()
    ),
    "selections": lambda x, y: x[x > 0].sum() + torch.where(x > y, x, y).amax(-1).sum(),
    "scatter": lambda x, y: (
        torch.zeros(5, 8).to(x).index_add(0, torch.tensor([1, 1, 4, 0, 1]), x[0]) + y[0]
    ),
    "stft": lambda x, y: torch.stft(
        x.flatten(), 8, window=torch.ones(8), return_complex=True
    ).abs(),
    "weight_norm": lambda x, y: torch._weight_norm(x, y[:, :1, :1], 0),
    "gumbel": lambda x, y: F.gumbel_softmax(x) + F.dropout(y, 0.5, True),
    "one_hot": lambda x, y: F.one_hot(x.argmax(-1), 8) * y,
    "linalg": lambda x, y: (
        torch.linalg.solve(x @ x.mT + 9 * torch.eye(5), y).sum() + torch.linalg.det(x @ x.mT)
    ),
    "multi_dot": lambda x, y: torch.linalg.multi_dot([x[0], y[0].T, x[1]]),
    "pad": lambda x, y: (
        F.pad(x, (1, 1), mode="reflect").sum() + nn.utils.rnn.pad_sequence([x[0], y[0, :2]]).sum()
    ),
    "grid_sample": lambda x, y: F.grid_sample(
        x[None], y[:1, :4, :4].reshape(1, 2, 4, 2), align_corners=False
    ),
    "interpolate": lambda x, y: F.interpolate(x[None], (7, 12), mode="bilinear", antialias=True),
}.items():
    add(name, lambda f=function: Call(f), lambda: (r(3, 5, 8), r(3, 5, 8)))

EXCLUDED = {
    **dict.fromkeys(
        ["Module", "Container", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList"],
        "computes nothing",
    ),
    "Sequential": "calls others",
    "RNNBase": "the base of RNN, GRU and LSTM",
    "RNNCellBase": "the base of RNNCell, GRUCell and LSTMCell",
    "DataParallel": "calls another on GPUs",
    "SyncBatchNorm": "needs a process group on an accelerator",
}

#: Cases that any dispatch mode changes, even one that does nothing.
NOT_IN_AUTOCAST = {
    "Bilinear": "its kernel calls bmm, which autocast does not see below a dispatch mode",
}


def test_every_class_of_torch_nn_is_covered() -> None:
    """Every class of torch.nn is compared or excluded for a reason."""
    classes = {
        name
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module)
    }
    assert classes - CASES.keys() - EXCLUDED.keys() == set()


CONTEXTS = {"train": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def outcome(case: Case, mode: str, dtype: torch.dtype, counted: bool) -> list[Any]:
    """Results, gradients, buffers and random state after a step, or its error."""
    torch.manual_seed(7)
    module = case[0]()
    args = case[1]()
    if any(isinstance(one, nn.parameter.UninitializedParameter) for one in module.parameters()):
        module(*args)
    module = module.to(dtype)
    args = tuple(cast(one, dtype) for one in args)
    if mode == "fast path":
        module.eval()
    context = CONTEXTS.get(mode.split()[-1], torch.inference_mode)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode)
    try:
        with FlopCounter() if counted else nullcontext():
            with context(), autocast:
                out = flat(module(*args))
            if "train" in mode:
                loss = sum(one.float().square().mean() for one in out if one.is_floating_point())
                if loss.requires_grad:
                    loss.backward()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return [type(error), str(error)]
    grads = [one.grad for one in (*flat(args), *module.parameters())]
    # Square roots and exponents do not overflow at these sizes, so that NaN hides no difference.
    kept = [*out, *grads, *module.buffers(), torch.get_rng_state()]
    return [one if one is None else one.detach().clone() for one in kept]


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value.to(dtype)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    return value


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in flat(part)] if isinstance(value, tuple) else []


def same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b) if not isinstance(a, Tensor) and not isinstance(b, Tensor) else False
    if a.is_sparse:
        a, b = a.coalesce(), b.coalesce()
        return torch.equal(a.indices(), b.indices()) and same(a.values(), b.values())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (a, b)))


MODES = [
    *product([*CONTEXTS, "fast path"], [torch.float32, torch.bfloat16]),
    ("autocast train", torch.float32),
    ("autocast inference", torch.float32),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_counted_step_has_the_bits_of_an_uncounted_one(name: str) -> None:
    """Outputs, gradients, buffers, random numbers and errors are the same."""
    for mode, dtype in MODES:
        if "autocast" in mode and name in NOT_IN_AUTOCAST:
            continue
        for number, case in enumerate(CASES[name]):
            plain, counted = (outcome(case, mode, dtype, counted) for counted in (False, True))
            where = mode, dtype, number
            if dtype is torch.float32 and "autocast" not in mode:
                # Some operators do not support bfloat16 on a CPU.
                assert not isinstance(plain[0], type), (where, plain)
            assert len(plain) == len(counted), (where, counted)
            assert all(same(*pair) for pair in zip(plain, counted, strict=True)), where


class Noisy(Tensor):
    """Adds noise to the result of each function that Python calls, as analog simulations do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        cls.calls += 1
        if isinstance(out, Tensor) and out.is_floating_point():
            with torch._C.DisableTorchFunctionSubclass():
                return out + 0.01 * torch.randn_like(out)
        return out


@pytest.mark.parametrize("counts", [False, True])
def test_functions_of_a_tensor_subclass_are_called_as_without_counting(counts: bool) -> None:
    """Autograd calls operators without it, so that one call more would change gradients."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    gradients, calls = [], []
    for context in (nullcontext(), FlopCounter() if counts else nullcontext()):
        torch.manual_seed(1)
        Noisy.calls = 0
        layer.zero_grad()
        with context:
            layer(x.as_subclass(Noisy)).square().mean().as_subclass(Tensor).backward()
        gradients.append(layer.weight.grad.clone())
        calls.append(Noisy.calls)
    assert torch.equal(*gradients)
    assert calls[0] == calls[1] > 0
