"""Trainings of many kinds, each tiny, and everything that one of them results in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import callbacks as lc
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from helpers.outcome import Wrapped
from helpers.small import RANKS, Records, trainer

Net = Callable[[Tensor], Tensor]


class Model(L.LightningModule):
    """Trains a network on noise; draws random numbers and logs a metric in each step.

    Args:
        net: Made from batches of four samples of eight numbers.
    """

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(8, 8), net or nn.Linear(8, 3)
        self.losses: list[Tensor] = []

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        out = self.net(self.first(batch[0] + 0.1 * torch.randn_like(batch[0])))
        return (out.float() - 1).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.note(loss)
        return loss

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())
        self.log("theirs", loss.detach())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("theirs_too", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = torch.linspace(-1, 1, 24 * 8).reshape(24, 8)
        return DataLoader(TensorDataset(data, data.sum(1)), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 8), torch.ones(8)), batch_size=4)


class Layers(nn.Module):
    """Runs several modules side by side and joins what they give.

    Args:
        shape: The shape of a sample of theirs, which has as many numbers as divide eight.
        *layers: The modules.
    """

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module) -> None:
        super().__init__()
        self.shape, self.layers = shape, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        shaped = x.reshape(-1, *self.shape)
        outs = [layer(shaped) for layer in self.layers]
        firsts = [out[0] if isinstance(out, tuple) else out for out in outs]
        return torch.cat([out.flatten() for out in firsts])


class Function(nn.Module):
    """A function as a module, with a layer after it."""

    def __init__(self, function: Net) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


# -- networks -----------------------------------------------------------------------------------

_ACTIVATIONS = (
    "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax "
    "Mish PReLU ReLU ReLU6 RReLU SELU SiLU Sigmoid Softmin Softmax Softplus Softshrink Softsign "
    "Tanh Tanhshrink"
)
_LOSSES = (
    "BCEWithLogitsLoss GaussianNLLLoss HuberLoss KLDivLoss L1Loss MSELoss MultiLabelMarginLoss "
    "MultiLabelSoftMarginLoss PoissonNLLLoss SmoothL1Loss SoftMarginLoss CosineEmbeddingLoss "
    "HingeEmbeddingLoss MarginRankingLoss TripletMarginLoss CTCLoss CrossEntropyLoss "
    "MultiMarginLoss NLLLoss BCELoss"
)


def activations() -> nn.Module:
    made = [getattr(nn, name)() for name in _ACTIVATIONS.split()]
    return Layers((8,), *made, nn.Threshold(0.1, 0.2))


class Losses(Model):
    """The sum of all losses of torch.nn."""

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0]) + 0.1 * torch.randn(4, 8)
        y, classes, signs = x.detach().sigmoid(), torch.arange(4), torch.ones(4)
        per_row = {
            "GaussianNLLLoss": (x, y, y + 1), "KLDivLoss": (x.log_softmax(1), y.softmax(1)),
            "MultiLabelMarginLoss": (x, torch.zeros(4, 8).long()),
            "MultiLabelSoftMarginLoss": (x, y.round()), "SoftMarginLoss": (x, y.round() * 2 - 1),
            "CosineEmbeddingLoss": (x, y, signs), "HingeEmbeddingLoss": (x, torch.ones(4, 8)),
            "MarginRankingLoss": (x[:, 0], y[:, 0], signs), "TripletMarginLoss": (x, y, y + 1),
            "CTCLoss": (
                x.log_softmax(1)[:, None].expand(4, 2, 8), torch.ones(2, 2).long(),
                torch.tensor([4, 4]), torch.tensor([2, 2]),
            ),
            "CrossEntropyLoss": (x, classes), "MultiMarginLoss": (x, classes),
            "NLLLoss": (x.log_softmax(1), classes), "BCELoss": (x.sigmoid(), y),
        }  # fmt: skip
        found = [getattr(nn, name)()(*per_row.get(name, (x, y))) for name in _LOSSES.split()]
        return torch.stack([each.mean() for each in found]).sum()


def norms() -> nn.Module:
    return Layers(
        (4, 2), nn.BatchNorm1d(4), nn.LayerNorm(2), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4),
        nn.RMSNorm(2), nn.LocalResponseNorm(2),
    )  # fmt: skip


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 4)
        mixed, _ = self.attention(x, x, x)
        return mixed + F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(4, 2, 1, 1, 8, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 4)
        return self.net(x, x)


def recurrent() -> nn.Module:
    options: dict[str, Any] = {"num_layers": 2, "dropout": 0.3, "batch_first": True}
    return Layers((2, 4), *(kind(4, 3, **options) for kind in (nn.RNN, nn.LSTM, nn.GRU)))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Conv2d(2, 2, 3, dilation=2), nn.Flatten(2),
        nn.Conv1d(2, 2, 1), nn.Unflatten(2, (1, 2, -1)), nn.Conv3d(2, 1, 1),
    )  # fmt: skip


def pooling() -> nn.Module:
    return Layers(
        (2, 2, 2), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveMaxPool2d(1), nn.LPPool2d(2, 2), nn.FractionalMaxPool2d(2, output_size=1),
        nn.Upsample(scale_factor=2), nn.PixelShuffle(1), nn.ReflectionPad2d(1),
    )  # fmt: skip


def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2),
        nn.Unflatten(1, (2, 2, 2)), nn.Dropout2d(0.2), nn.Flatten(2), nn.Dropout1d(0.2),
    )  # fmt: skip


class Skipped(nn.Module):
    """Stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) > 0.5 or random.random() > 0.8 or np.random.rand() > 0.9:
                x = x + layer(x).relu()
        return x


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def parametrized() -> nn.Module:
    first = parametrizations.spectral_norm(nn.Linear(8, 8))
    second = parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(first, second, parametrizations.orthogonal(nn.Linear(8, 8)))


def hooked() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda _, __, out: out * 1.5)
    layer.register_full_backward_hook(lambda *_: None)
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    return layer


# -- modules ------------------------------------------------------------------------------------


class Compiled(Model):
    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.net = torch.compile(Wrapped(self.net), backend="aot_eager")


class Manual(Model):
    """Two optimizers take turns, as in a GAN."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.note(loss)

    def configure_optimizers(self) -> Any:
        parts = (self.first, self.net)
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]


class Sparse(Model):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Embedding(9, 4, sparse=True), None

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        return (self.first((batch[0].abs() * 8).long()) - torch.rand(4)).square().mean()

    flops_per_batch = 1.0  # it has no products that could be counted

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters(), lr=0.01)


class Bag(Model):
    """A loader with workers, each with a seed of its own."""

    class Noise(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> list[Tensor]:
            return [torch.rand(8) + random.random() + np.random.rand(), torch.ones(())]

    def train_dataloader(self) -> Any:
        return DataLoader(self.Noise(), batch_size=4, num_workers=1)


class Metered(Model):
    """Logs a metric of torchmetrics, by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def note(self, loss: Tensor) -> None:
        super().note(loss)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)


class Skipping(Model):
    """Skips batches, and leaves the rest of an epoch out."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 4 else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Searching(Model):
    """LBFGS calls its closure several times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Scheduled(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Thawing(Model):
    """Freezes a layer in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)


class Penalized(Model):
    """Differentiates the gradient."""

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss_of(batch)
        if torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(loss, self.first.weight, create_graph=True)
            loss = loss + gradient.square().sum()
        return loss


class Mapped(Model):
    """Gradients of each sample, by torch.func."""

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss_of(batch)
        if torch.is_grad_enabled():
            weights = dict(self.first.named_parameters())

            def cost(weights: Any, x: Tensor) -> Tensor:
                return torch.func.functional_call(self.first, weights, (x,)).square().mean()

            each = torch.func.vmap(torch.func.grad(cost), in_dims=(None, 0))(weights, batch[0])
            loss = loss + each["weight"].square().mean().detach()
        return loss


class Streamed(Model):
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for _ in range(5):
                yield [torch.rand(4, 8), torch.ones(4)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.Stream(), batch_size=None)


class Combined(Model):
    def train_dataloader(self) -> Any:
        data = super().train_dataloader()
        return CombinedLoader({"a": data, "b": data}, "max_size_cycle")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss_of(batch["b"])


class Tuned(Model):
    """Has a rate and a batch size for the tuners."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.01, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size)


# -- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One kind of training."""

    model: Callable[[], Model] = Model
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[L.Callback]] = list


def of(net: Callable[[], nn.Module], **options: Any) -> Kind:
    """A training of a network."""
    return Kind(lambda: Model(net()), options)


def by(function: Net) -> Kind:
    """A training through a function."""
    return of(partial(Function, function))


def _fft(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.complex(x[:, :5], x[:, :5]), n=8)


def _sparse_product(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), x)


KINDS: dict[str, Kind] = {
    "activations": of(activations),
    "losses": Kind(Losses),
    "norms": of(norms),
    "attention": of(SelfAttention),
    "transformer": of(EncoderDecoder),
    "recurrent": of(recurrent),
    "convolutions": of(convolutions),
    "pooling": of(pooling),
    "dropouts": of(dropouts),
    "stochastic depth": of(Skipped),
    "recomputation": of(Recomputed),
    "own autograd function": by(Double.apply),
    "fft and complex": by(_fft),
    "sparse product": by(_sparse_product),
    "einsum": by(lambda x: torch.einsum("bi,bj->bi", x, x)),
    "parametrizations": of(parametrized),
    "hooks of modules": of(hooked),
    "double backward": Kind(Penalized),
    "torch.func": Kind(Mapped),
    "sparse embedding": Kind(Sparse),
    "compiled": Kind(Compiled),
    "bf16-mixed": of(Skipped, precision="bf16-mixed"),
    "bf16-true": of(lambda: nn.Linear(8, 8), precision="bf16-true"),
    "64-true": of(dropouts, precision="64-true"),
    "accumulation": of(dropouts, accumulate_grad_batches=3),
    "clipping by norm": of(dropouts, gradient_clip_val=0.1),
    "clipping by value": of(
        dropouts, gradient_clip_val=0.1, gradient_clip_algorithm="value", detect_anomaly=True
    ),
    "manual, two optimizers": Kind(Manual),
    "LBFGS": Kind(Searching),
    "scheduler": Kind(Scheduled),
    "frozen layers": Kind(Thawing),
    "workers with seeds": Kind(Bag),
    "torchmetrics": Kind(Metered),
    "skipped batches": Kind(Skipping),
    "unsized data": Kind(Streamed),
    "combined loaders": Kind(Combined),
    "validation within an epoch": of(
        dropouts, val_check_interval=3, num_sanity_val_steps=2, limit_val_batches=2
    ),
    "reloaded loaders": of(dropouts, reload_dataloaders_every_n_epochs=1),
    "overfit_batches": of(dropouts, overfit_batches=2),
    "SWA": Kind(Model, {"max_epochs": 3}, lambda: [lc.StochasticWeightAveraging(0.01)]),
    "EMA": Kind(Model, {}, lambda: [lc.EMAWeightAveraging()]),
    "early stopping": Kind(Model, {}, lambda: [lc.EarlyStopping("theirs", patience=1)]),
    "pruning": Kind(Model, {}, lambda: [lc.ModelPruning("l1_unstructured", amount=0.3)]),
    "accumulation scheduler": Kind(
        Model, {}, lambda: [lc.GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "learning rate finder": Kind(Tuned, {}, lambda: [lc.LearningRateFinder(num_training_steps=6)]),
    "batch size finder": Kind(Tuned, {}, lambda: [lc.BatchSizeFinder(max_trials=2)]),
    "two ranks": of(dropouts, **RANKS),
}


def result(kind: Kind, folder: Path, ours: list[L.Callback]) -> dict[str, Any]:
    """Train; everything that must be the same with and without our callbacks."""
    L.seed_everything(11, workers=True)
    records, model = Records(), kind.model()
    options = {"max_epochs": 2, "limit_val_batches": 1, "logger": records, **kind.options}
    run = trainer(folder, *kind.callbacks(), *ours, **options)
    run.fit(model)
    path = folder / "end.ckpt"
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    names = [name for name in saved["callbacks"] if "lightning_perf" in name]
    kept = {name: saved["callbacks"].pop(name) for name in names}
    assert bool(kept) == bool([each for each in ours if getattr(each, "keeps_progress", False)])
    rows = [
        (step, {key: value for key, value in row.items() if key.partition("_")[0] in THEIRS})
        for step, row in records.rows
    ]
    return {
        "losses": model.losses,
        "checkpoint": saved,
        "logged": [row for row in rows if row[1]],
        "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "shown": {k: v for k, v in run.callback_metrics.items() if k.partition("_")[0] in THEIRS},
        "where": [run.global_step, run.current_epoch],
    }


#: The first words of the keys that the models log.
THEIRS = {"theirs", "mean"}


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two results differ, bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        # NaN equals itself here.
        return [] if same and torch.equal(_bits(one), _bits(other)) else [at]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [at]
    if type(one) is not type(other):
        return [f"{at}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        found = [] if list(one) == list(other) else [f"{at}: keys {list(one)} and {list(other)}"]
        return found + [d for k in one.keys() & other.keys()
                        for d in differences(one[k], other[k], f"{at}.{k}")]  # fmt: skip
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{at}[{i}]")]
    return [] if repr(one) == repr(other) else [f"{at}: {one!r} and {other!r}"]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().contiguous().reshape(-1).view(torch.uint8)
