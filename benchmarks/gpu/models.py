"""The models that the checks train, and their expected FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from helpers.small import Small
from torch import Tensor, nn
from torch.nn import functional as F


class Repeated:
    """A loader that repeats one batch."""

    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([self.batch] * self.length)


class Costed(L.LightningModule):
    """A model that computes its FLOPs per batch from its shapes."""

    batch: Any
    #: Forward and backward, 2 per multiply-add.
    flops: float
    steps = 60

    def train_dataloader(self) -> Any:
        """The same batch again and again."""
        return Repeated(self.batch, self.steps)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose own work is small."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then the feed-forward layer."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(Costed):
    """A decoder-only transformer."""

    def __init__(self, width: int, depth: int, length: int, batch: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, max(width // 64, 1)) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        tokens = torch.arange(batch * (length + 1)).reshape(batch, length + 1) % vocabulary
        self.batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        # Per token: products of 12 width^2 per layer and of the head, and attention in full.
        forward = 2 * (12 * width**2 * depth + width * vocabulary) + 4 * depth * length * width
        self.flops = 3.0 * forward * batch * length

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of the next token."""
        logits = self.head(self.blocks(self.embedding(batch[0])))
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Residual(nn.Module):
    """Two convolutions beside an identity."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both ways, added."""
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(Costed):
    """A small residual network."""

    def __init__(self, width: int, size: int, batch: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        widths = [width, width, 2 * width, 4 * width]
        stages = [Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(widths[-1], 10)
        images = torch.linspace(-1, 1, batch * 3 * size**2).reshape(batch, 3, size, size)
        self.batch = (images, torch.arange(batch) % 10)
        self.flops = self._cost()

    def _cost(self) -> float:
        """Products of each layer; the stem has no gradient of its input."""
        costs: dict[nn.Module, float] = {}

        def note(layer: nn.Module, _: Any, out: Tensor) -> None:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            costs[layer] = 2.0 * out[:, :1].numel() * weight.numel()

        layers = [each for each in self.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
        hooks = [layer.register_forward_hook(note) for layer in layers]
        with torch.no_grad():
            self.eval()(self.batch[0])
        for hook in hooks:
            hook.remove()
        self.train()
        return 3 * sum(costs.values()) - costs[self.stem]

    def forward(self, images: Tensor) -> Tensor:
        """Scores of ten classes."""
        return self.head(self.stages(self.stem(images)).mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of classification."""
        return F.cross_entropy(self(batch[0]), batch[1])


class Spinner:
    """Keeps the device busy with one kernel that only waits; on a CPU it sleeps.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, device: str) -> None:
        self.cycles_per_second = 0.0
        if device == "cuda":
            cycles = 50_000_000
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            ended.record()
            ended.synchronize()
            self.cycles_per_second = cycles / (began.elapsed_time(ended) / 1e3)

    def __call__(self, seconds: float) -> None:
        """Occupy the device for some seconds; returns at once on a GPU."""
        if self.cycles_per_second:
            torch.cuda._sleep(int(seconds * self.cycles_per_second))  # type: ignore[no-untyped-call]
            return
        with torch.profiler.record_function("spin_kernel"):
            time.sleep(seconds)


class _SpinInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, spin: Callable[[], None]) -> Tensor:
        ctx.spin = spin
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.spin()
        return gradient, None


class Spinning(Small):
    """A tiny model whose passes take a known time on the device.

    Args:
        spin: Takes seconds.
        forward: Seconds of forward.
        backward: Seconds of backward.
        optimizer: Seconds of the optimizer's step.
        steps: Batches.
    """

    def __init__(
        self,
        spin: Spinner,
        forward: float = 0.0,
        backward: float = 0.0,
        optimizer: float = 0.0,
        steps: int = 40,
    ) -> None:
        super().__init__()
        self.spin, self.times, self.steps = spin, (forward, backward, optimizer), steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Spin, then the small model."""
        forward, backward, _ = self.times
        if forward:
            self.spin(forward)
        loss = super().training_step(batch, batch_idx)
        if backward:
            loss = _SpinInBackward.apply(loss, lambda: self.spin(backward))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD that spins after its step."""
        optimizer = super().configure_optimizers()
        if self.times[2]:
            optimizer.register_step_post_hook(lambda *_: self.spin(self.times[2]))
        return optimizer

    def train_dataloader(self) -> Any:
        """Pinned where possible, so that no copy waits."""
        x = torch.ones(4, 8)
        batch = [x, x[:, :1].contiguous()]
        if torch.cuda.is_available():
            batch = [each.pin_memory() for each in batch]
        return Repeated(batch, self.steps)


class Graphed(Small):
    """A training whose whole step is one CUDA graph, from the fourth batch on."""

    automatic_optimization = False

    def __init__(self, steps: int = 12) -> None:
        super().__init__()
        self.steps, self.graph = steps, None
        self.losses: list[Tensor] = []

    def _work(self) -> None:
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad(set_to_none=True)
        self.loss = F.mse_loss(self.net(self.x), self.y)
        self.manual_backward(self.loss)
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Warm up on a side stream, capture, replay; on a CPU, just work."""
        if not batch_idx:
            self.x, self.y = batch[0].clone(), batch[1].clone()
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])
        if self.device.type != "cuda":
            self._work()
        elif batch_idx < 3:
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                self._work()
            here.wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                self.optimizers().optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(self.graph):
                    self._work()
            self.graph.replay()
        self.losses.append(self.loss.detach().clone())
