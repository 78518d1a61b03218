"""Models in plain torch: each a small example of how a kind of model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from architectures.case import Case, Task

B, T, D = 2, 12, 16


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss of whatever the model returns."""
    out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return sum(each.abs().square().mean() for each in (out if isinstance(out, tuple) else (out,)))


class Of(nn.Module):
    """Layers by name, and a function that applies them."""

    def __init__(self, apply: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.apply_layers = apply
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *batch: Any) -> Any:
        """Apply the layers."""
        return self.apply_layers(self, *batch)


# -- convolutions ---------------------------------------------------------------------------------


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Sequential:
    """A convolution that keeps the size, with a norm and an activation."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.SiLU())


class Residual(nn.Module):
    """Adds the input where the shape stays."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        out = self.layers(x)
        return out + x if out.shape == x.shape else out


class Excitation(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the channels."""
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def classifier(*layers: nn.Module, channels: int) -> nn.Module:
    """Layers, the mean of the image, and an output layer."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def bottleneck(inputs: int, width: int, outputs: int, groups: int = 1, stride: int = 1) -> Any:
    """ResNet's, or ResNeXt's with groups."""
    middle = conv(width, width, groups=groups, stride=stride)
    return Residual(conv(inputs, width, 1), middle, conv(width, outputs, 1))


def inverted(inputs: int, outputs: int, excite: bool = False, stride: int = 1) -> Any:
    """MobileNetV2's, or EfficientNet's with excitation."""
    wide = 4 * inputs
    depthwise = conv(wide, wide, groups=wide, stride=stride)
    part = [Excitation(wide)] if excite else []
    last = nn.Conv2d(wide, outputs, 1, bias=False)
    return Residual(conv(inputs, wide, 1), depthwise, *part, last, nn.BatchNorm2d(outputs))


class UNet(nn.Module):
    """Down, up and skip connections; with a time, and attention to a text, for diffusion."""

    def __init__(self, text: int = 0, dims: int = 2) -> None:
        super().__init__()
        convolution, transposed = (
            getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose")
        )
        self.text, width = text, 8
        self.first = convolution(3, width, 3, padding=1)
        self.down = convolution(width, 2 * width, 4, stride=2, padding=1)
        self.middle = convolution(2 * width, 2 * width, 3, padding=1)
        self.up = transposed(2 * width, width, 4, stride=2, padding=1)
        self.last = convolution(2 * width, 3, 3, padding=1)
        if text:
            self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 2 * width))
            self.query, self.out = nn.Linear(2 * width, 16), nn.Linear(16, 2 * width)
            self.key_value = nn.Linear(text, 32)

    def forward(self, x: Tensor, time: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        """Predict an image of the same size."""
        first = self.first(x).relu()
        y = self.down(first).relu()
        if self.text:
            y = y + self.time(time)[..., None, None]
            flat = y.flatten(2).mT
            q, (k, v) = self.query(flat), self.key_value(text).chunk(2, -1)
            q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            y = y + self.out(found).mT.unflatten(-1, y.shape[2:])
        y = self.up(self.middle(y).relu()).relu()
        return self.last(torch.cat([first, y], 1))


def images(size: int = 16, channels: int = 3) -> Tensor:
    """A batch of images."""
    return torch.randn(B, channels, size, size)


def convolutional() -> dict[str, Callable[[], Task]]:
    """Networks of convolutions."""

    def of(make: Callable[[], nn.Module], batch: Callable[[], Any] = images) -> Any:
        return lambda: Task(make(), batch(), square)

    def diffusion() -> Task:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            x, text = batch
            time, noise = torch.randint(100, (B,)), torch.randn_like(x)
            level = (time / 100)[:, None, None, None]
            noisy = (1 - level).sqrt() * x + level.sqrt() * noise
            waves = (time[:, None] / torch.arange(1, 9)).sin()
            return F.mse_loss(model(noisy, waves, text), noise)

        return Task(UNet(text=24), (images(), torch.randn(B, 5, 24)), loss)

    return {
        "VGG": of(lambda: classifier(conv(3, 8), nn.MaxPool2d(2), conv(8, 16), channels=16)),
        "ResNet bottleneck": of(
            lambda: classifier(
                conv(3, 8, 7, stride=2),
                bottleneck(8, 4, 16),
                bottleneck(16, 4, 16, stride=2),
                channels=16,
            )
        ),
        "ResNeXt": of(
            lambda: classifier(
                conv(3, 8),
                bottleneck(8, 8, 16, groups=4),
                bottleneck(16, 8, 16, groups=2),
                channels=16,
            )
        ),
        "MobileNetV2": of(
            lambda: classifier(conv(3, 8), inverted(8, 8), inverted(8, 16, stride=2), channels=16)
        ),
        "EfficientNet": of(
            lambda: classifier(conv(3, 8), inverted(8, 8, True), inverted(8, 12, True), channels=12)
        ),
        "DenseNet": of(
            lambda: Of(lambda m, x: m.b(torch.cat([x, m.a(x)], 1)), a=conv(3, 8), b=conv(11, 8))
        ),
        "ShuffleNet": of(
            lambda: classifier(
                conv(4, 8, 1, groups=2), nn.ChannelShuffle(2), conv(8, 8, groups=8), channels=8
            ),
            lambda: images(channels=4),
        ),
        "dilated TCN": of(
            lambda: nn.Sequential(
                nn.Conv1d(3, 8, 3, dilation=2), nn.ReLU(), nn.Conv1d(8, 8, 3, dilation=4)
            ),
            lambda: torch.randn(B, 3, 40),
        ),
        "depthwise convolution of one dimension": of(
            lambda: nn.Sequential(nn.Conv1d(8, 8, 4, groups=8, padding=3), nn.Conv1d(8, 8, 1)),
            lambda: torch.randn(B, 8, 20),
        ),
        "grouped transposed convolutions": of(
            lambda: nn.Sequential(
                nn.ConvTranspose2d(4, 8, 3, groups=2),
                nn.ReLU(),
                nn.ConvTranspose2d(8, 8, 4, stride=2, groups=8),
            ),
            lambda: images(channels=4),
        ),
        "U-Net": of(UNet),
        "U-Net of volumes": of(lambda: UNet(dims=3), lambda: torch.randn(B, 3, 8, 8, 8)),
        "diffusion step": diffusion,
        "local layers (unfold)": of(
            lambda: Of(lambda m, x: m.mix(F.unfold(x, 4, stride=4).mT), mix=nn.Linear(48, 8))
        ),
        "spatial transformer": of(
            lambda: Of(
                lambda m, x: m.conv(
                    F.grid_sample(
                        x,
                        F.affine_grid(m.place(x).unflatten(1, (2, 3)), x.shape),
                        align_corners=False,
                    )
                ),
                place=nn.Sequential(nn.Flatten(), nn.Linear(768, 6)),
                conv=conv(3, 8),
            )
        ),
        "convolutions of each sample's own weights": of(
            lambda: Of(
                lambda m, x: F.conv2d(
                    x.reshape(1, -1, 16, 16), m.make(x.mean((2, 3))).view(B * 4, 3, 3, 3), groups=B
                ),
                make=nn.Linear(3, 108),
            )
        ),
    }


# -- recurrent ------------------------------------------------------------------------------------


def recurrent() -> dict[str, Callable[[], Task]]:
    """Recurrent networks on sequences."""

    def of(make: Callable[[], nn.Module], loss: Any = None) -> Any:
        def first(model: nn.Module, x: Tensor) -> Tensor:
            return model(x)[0].square().mean()

        return lambda: Task(make(), torch.randn(B, T, D), loss or first)

    def packed(model: nn.Module, x: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([T, 7]), batch_first=True)
        return model(rows)[0].data.square().mean()

    def cells(model: Any, x: Tensor) -> Tensor:
        state = torch.zeros(B, 8)
        for one in x.unbind(1):
            state = model(one, state)
        return state.square().mean()

    class Translator(nn.Module):
        """An encoder, and a decoder with additive attention."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.GRU(D, 8, batch_first=True)
            self.cell = nn.GRUCell(8, 8)
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
            self.energy, self.output = nn.Parameter(torch.randn(8)), nn.Linear(8, 30)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            memory, state = self.encoder(x)
            hidden, keys, outputs = state[0], self.key(memory), []
            for _ in range(4):
                scores = (self.query(hidden)[:, None] + keys).tanh() @ self.energy
                context = torch.bmm(scores.softmax(-1)[:, None], memory)[:, 0]
                hidden = self.cell(context, hidden)
                outputs.append(self.output(hidden))
            return (torch.stack(outputs, 1),)

    one = {"batch_first": True}
    return {
        "LSTM": of(lambda: nn.LSTM(D, 8, 2, **one)),
        "LSTM in both directions": of(lambda: nn.LSTM(D, 8, 2, bidirectional=True, **one)),
        "LSTM with projections": of(lambda: nn.LSTM(D, 8, proj_size=4, **one)),
        "LSTM of packed sequences": of(lambda: nn.LSTM(D, 8, **one), packed),
        "GRU": of(lambda: nn.GRU(D, 8, 2, **one)),
        "GRU in both directions": of(lambda: nn.GRU(D, 8, 2, bidirectional=True, **one)),
        "GRU of packed sequences": of(lambda: nn.GRU(D, 8, **one), packed),
        "RNN": of(lambda: nn.RNN(D, 8, **one)),
        "GRU cells": of(lambda: nn.GRUCell(D, 8), cells),
        "translation by GRUs with attention": of(Translator),
        "convolutions and an LSTM": of(
            lambda: Of(
                lambda m, x: m.lstm(m.conv(x.mT).mT),
                conv=nn.Conv1d(D, 8, 3),
                lstm=nn.LSTM(8, 8, **one),
            )
        ),
    }


# -- attention ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention by SDPA and a feed-forward part."""

    def __init__(self, width: int = D, heads: int = 4, kv_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.heads, self.size, self.options = heads, width // heads, options
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size)
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Attend to the input itself, or to a memory."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(x if memory is None else memory).unflatten(-1, (2, -1, self.size))
        k, v = kv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.second(self.first(x).relu())


class Language(nn.Module):
    """Embedding, layers and an output layer."""

    def __init__(self, *layers: nn.Module, vocabulary: int = 40, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, D), nn.ModuleList(layers)
        self.output = nn.Linear(D, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def ids(vocabulary: int = 40) -> Tensor:
    """A batch of tokens."""
    return torch.randint(vocabulary, (B, T))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a language model."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Experts(nn.Module):
    """Each token goes through two of four experts, by index or as grouped products."""

    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        self.grouped, self.router = grouped, nn.Linear(D, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, D, D) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """A weighted sum of two experts."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        if self.grouped:
            ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).to(torch.int32)
            up, down = self.up.bfloat16(), self.down.bfloat16()
            hidden = F.grouped_mm(flat[rows].bfloat16(), up, offs=ends).relu()
            out = F.grouped_mm(hidden, down, offs=ends).float()
            return (
                torch.zeros_like(flat)
                .index_add(0, rows, out * weights.flatten()[order, None])
                .view_as(x)
            )
        out = torch.zeros_like(flat)
        for expert in range(4):
            tokens, slot = (chosen == expert).nonzero(as_tuple=True)
            update = (flat[tokens] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, tokens, update * weights[tokens, slot, None])
        return out.view_as(x)


class Mamba(nn.Module):
    """A selective scan, step by step."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        wide = 2 * D
        self.inner, self.outer = nn.Linear(D, 2 * wide), nn.Linear(wide, D)
        self.conv = nn.Conv1d(wide, wide, 4, groups=wide, padding=3)
        self.select, self.step = nn.Linear(wide, 2 * states + 2), nn.Linear(2, wide)
        self.rates = nn.Parameter(torch.rand(wide, states))

    def forward(self, x: Tensor) -> Tensor:
        """Scan a sequence."""
        y, gate = self.inner(x).chunk(2, -1)
        y = F.silu(self.conv(y.mT)[..., : x.size(1)].mT)
        states = self.rates.size(1)
        into, out, step = self.select(y).split([states, states, 2], -1)
        delta = F.softplus(self.step(step))
        decay = (-delta[..., None] * self.rates).exp()
        drive = (delta * y)[..., None] * into[:, :, None]
        state, found = torch.zeros_like(drive[:, 0]), []
        for t in range(x.size(1)):
            state = decay[:, t] * state + drive[:, t]
            found.append((state @ out[:, t, :, None])[..., 0])
        return x + self.outer(torch.stack(found, 1) * F.silu(gate))


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(T, T), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Mix both dimensions."""
        return self.channels(x + self.tokens(x.mT).mT)


class Heads(nn.Module):
    """``nn.MultiheadAttention`` on itself."""

    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.inner, self.call = nn.MultiheadAttention(D, 4, batch_first=True), call

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return self.inner(x, x, x, **self.call)[0]


def attention() -> dict[str, Callable[[], Task]]:
    """Attention in all forms, and what replaces it."""

    def language(*layers: Callable[[], nn.Module], **options: Any) -> Any:
        return lambda: Task(Language(*(make() for make in layers), **options), ids(), next_token)

    def sequence(make: Callable[[], nn.Module], *more: Callable[[], Tensor]) -> Any:
        return lambda: Task(make(), (torch.randn(B, T, D), *(one() for one in more)), square)

    causal = torch.ones(T, T, dtype=torch.bool).tril()
    numbers = torch.zeros(T, T).masked_fill(~causal, -1e9)

    class Linear(nn.Module):
        """Linear attention as products of einsum."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(D, 3 * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each.unflatten(-1, (4, 4)) for each in self.qkv(x).chunk(3, -1))
            state = torch.einsum("bthd,bthe->bhde", k.softmax(1), v)
            return torch.einsum("bthd,bhde->bthe", q.softmax(-1), state).flatten(2)

    class Sets(nn.Module):
        """A set transformer's pooling: learned queries."""

        def __init__(self) -> None:
            super().__init__()
            self.seeds, self.block = nn.Parameter(torch.randn(3, D)), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.seeds.expand(B, -1, -1), x)

    return {
        "language model, SDPA": language(Block, Block),
        "language model, tied": language(Block, tied=True),
        "SDPA, causal": language(lambda: Block(is_causal=True)),
        "SDPA, mask of booleans": language(lambda: Block(attn_mask=causal)),
        "SDPA, mask of numbers": language(lambda: Block(attn_mask=numbers)),
        "SDPA, grouped queries": language(lambda: Block(kv_heads=2, enable_gqa=True)),
        "SDPA, one key and value head": language(lambda: Block(kv_heads=1, enable_gqa=True)),
        "SDPA, dropout": language(lambda: Block(dropout_p=0.3)),
        "SDPA, cross-attention": sequence(Block, lambda: torch.randn(B, 7, D)),
        "SDPA, learned queries": sequence(Sets),
        "nn.MultiheadAttention": sequence(lambda: Heads(need_weights=False)),
        "nn.MultiheadAttention with weights": sequence(Heads),
        "nn.TransformerEncoder": sequence(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(D, 4, 32, 0.0, batch_first=True), 2
            )
        ),
        "nn.Transformer": sequence(
            lambda: nn.Transformer(D, 4, 1, 1, 32, 0.0, batch_first=True),
            lambda: torch.randn(B, 7, D),
        ),
        "linear attention, einsum": sequence(Linear),
        "mixture of experts, by index": language(lambda: Experts()),
        "mixture of experts, grouped products": language(lambda: Experts(grouped=True)),
        "Mamba, scan in torch": language(Mamba),
        "MLP-Mixer": sequence(Mixer),
    }


# -- trainings ------------------------------------------------------------------------------------


class Manual(Task):
    """A step of its own, and an optimizer for each part."""

    automatic_optimization = False

    def __init__(self, parts: nn.ModuleDict, batch: Any, step: Callable[..., None]) -> None:
        super().__init__(parts, batch, square)
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run the step."""
        self.step(self, batch, batch_idx)

    def update(self, index: int, loss: Callable[[], Tensor]) -> None:
        """Train one part."""
        optimizers = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """One for each part."""
        return [torch.optim.SGD(part.parameters(), lr=0.0) for part in self.model.values()]


def mlp(*sizes: int, last: bool = True) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*(layers[:-1] if last else layers))


def adversarial(penalty: bool = False) -> Task:
    """A GAN: generator and discriminator, or critic with a gradient penalty."""
    parts = nn.ModuleDict({"generator": mlp(4, 16, 8), "critic": mlp(8, 16, 1)})

    def step(task: Manual, real: Tensor, _: int) -> None:
        generator, critic = task.model["generator"], task.model["critic"]
        task.update(0, lambda: -critic(generator(torch.randn(6, 4))).mean())

        def loss() -> Tensor:
            fake = generator(torch.randn(6, 4)).detach()
            value = critic(fake).mean() - critic(real).mean()
            if penalty:
                mixed = (fake + real).div(2).requires_grad_()
                (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                value = value + (gradient.norm(dim=1) - 1).square().mean()
            return value

        task.update(1, loss)

    return Manual(parts, torch.randn(6, 8), step)


class Autoencoder(nn.Module):
    """A variational autoencoder of images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.moments, self.back = nn.Linear(512, 8), nn.Linear(4, 512)
        self.decoder = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, sample and decode."""
        mean, log = self.moments(self.encoder(x)).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        return self.decoder(self.back(z).relu().unflatten(1, (8, 8, 8))) - x, mean, log


class Adapter(nn.Module):
    """LoRA: a frozen matrix and two small ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank), nn.Linear(rank, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Both products."""
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """A frozen language model with adapters for queries and values."""
    model = Language(Block(), Block()).requires_grad_(False)
    for layer in model.layers:
        layer.q, layer.kv = Adapter(layer.q), Adapter(layer.kv)
    return model


class Checkpointed(nn.Module):
    """A layer that is recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = mlp(D, 3 * D, D, last=False), reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Keep only the input."""
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def contrastive() -> Task:
    """CLIP: two encoders, and the similarity of all pairs."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, texts = (
            F.normalize(encode(one), dim=-1)
            for encode, one in zip(model.children(), batch, strict=True)
        )
        logits = pictures @ texts.T / 0.07
        target = torch.arange(B)
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)

    text = nn.Sequential(nn.Embedding(40, D), Block(), nn.Flatten(), nn.Linear(T * D, 10))
    both = nn.ModuleDict({"image": classifier(conv(3, 8), channels=8), "text": text})
    return Task(both, (images(), ids()), loss)


def distilled() -> Task:
    """A student that learns from a larger teacher, which has no gradient."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model.teacher(x)
        return F.mse_loss(model.student(x), target)

    return Task(Of(square, teacher=mlp(8, 64, 4), student=mlp(8, 8, 4)), torch.randn(6, 8), loss)


class Tuned(Task):
    """Another optimizer."""

    def __init__(self, *args: Any, optimizer: Callable[[Any], Any]) -> None:
        super().__init__(*args)
        self.make_optimizer = optimizer

    def configure_optimizers(self) -> Any:
        """The optimizer of the case."""
        return self.make_optimizer([each for each in self.parameters() if each.requires_grad])


def trainings() -> dict[str, Callable[[], Task]]:
    """Ways to train."""

    def of(make: Callable[[], nn.Module], *shape: int, loss: Any = square) -> Any:
        return lambda: Task(make(), torch.randn(*(shape or (6, 8))), loss)

    def language(make: Callable[[], nn.Module]) -> Any:
        return lambda: Task(make(), ids(), next_token)

    def frozen(below: bool) -> nn.Module:
        model = Language(Block(), Block(), Block()).requires_grad_(False)
        model.layers[2 if below else 0].requires_grad_(True)
        return model

    def actor_critic() -> Task:
        parts = nn.ModuleDict({"actor": mlp(8, 16, 4), "critic": mlp(8, 16, 1)})

        def step(task: Manual, x: Tensor, _: int) -> None:
            actor, critic = task.model["actor"], task.model["critic"]
            with torch.no_grad():
                value = critic(x)
            task.update(0, lambda: (actor(x).log_softmax(-1)[:, 0] * value[:, 0]).mean())
            task.update(1, lambda: critic(x).square().mean())

        return Manual(parts, torch.randn(6, 8), step)

    def tuned(optimizer: Callable[[Any], Any]) -> Any:
        return lambda: Tuned(mlp(8, 16, 4), torch.randn(6, 8), square, optimizer=optimizer)

    def sequential(model: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean()

    return {
        "GAN": adversarial,
        "VAE": lambda: Task(Autoencoder(), images(), square),
        "contrastive, two encoders": contrastive,
        "distillation": distilled,
        "LoRA": language(adapted),
        "frozen below": language(lambda: frozen(True)),
        "frozen above": language(lambda: frozen(False)),
        "actor and critic": actor_critic,
        "recomputation": language(lambda: Language(Checkpointed(False), Checkpointed(False))),
        "recomputation, reentrant": language(lambda: Language(Block(), Checkpointed(True))),
        "recomputation of segments": lambda: Task(
            nn.Sequential(*(mlp(8, 8, last=False) for _ in range(4))), torch.randn(6, 8), sequential
        ),
        "LBFGS": tuned(lambda weights: torch.optim.LBFGS(weights, lr=0.0, max_iter=1)),
        "Muon": tuned(
            lambda weights: torch.optim.Muon([each for each in weights if each.dim() == 2], lr=0.0)
        ),
        "factorization": lambda: Task(
            Of(
                lambda m, pairs: (m.user(pairs[:, 0]) * m.item(pairs[:, 1])).sum(-1),
                user=nn.Embedding(20, 8),
                item=nn.Embedding(20, 8),
                bias=nn.Linear(8, 1),
            ),
            torch.randint(20, (6, 2)),
            lambda m, x: square(m, x) + m.bias(m.user(x[:, 0])).mean(),
        ),
        "recommendation, interactions": lambda: Task(
            Of(
                lambda m, x: m.top(torch.bmm(m.item(x), m.item(x).mT).flatten(1)),
                item=nn.Embedding(20, 8),
                top=nn.Linear(9, 1),
            ),
            torch.randint(20, (6, 3)),
            square,
        ),
    }


# -- graphs and science ---------------------------------------------------------------------------


class Graph(nn.Module):
    """A graph network by index, with weights of edges from attention or from a network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, D), nn.Linear(D, 4)
        self.score, self.edge = nn.Linear(2 * D, 1), mlp(3, D * D)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        """Two layers."""
        source, target = edges
        y = self.first(x)
        messages = y[source]
        if self.kind == "attention":
            weight = self.score(torch.cat([messages, y[target]], -1)).exp()
            messages = messages * weight
        if self.kind == "network":
            messages = (self.edge(features).unflatten(-1, (D, D)) @ messages[..., None])[..., 0]
        if self.kind == "sparse":
            adjacent = torch.sparse_coo_tensor(edges.flip(0), torch.ones(30), (10, 10))
            return self.second(torch.sparse.mm(adjacent, y).relu())
        if self.kind == "dense":
            adjacent = torch.zeros(10, 10).index_put((target, source), torch.tensor(1.0))
            return self.second((adjacent @ y).relu())
        return self.second(torch.zeros_like(y).index_add(0, target, messages).relu())


class Physics(nn.Module):
    """The residual of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The gradient of the net, minus the net."""
        x = x.requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return slope.sum(-1, keepdim=True) - out


class Flow(nn.Module):
    """Coupling layers, with an invertible matrix between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(4, 16, 8), mlp(4, 16, 8)
        self.mix = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The code of a sample, and the log-determinant."""
        a, b = x.chunk(2, -1)
        scale, shift = self.first(a).chunk(2, -1)
        y = torch.cat([a, b * scale.exp() + shift], -1) @ self.mix
        a, b = y.chunk(2, -1)
        again, shift = self.second(a).chunk(2, -1)
        return torch.cat([a, b * again.exp() + shift], -1), scale.sum() + again.sum()


class Ode(nn.Module):
    """Steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Three steps of four evaluations."""
        for _ in range(3):
            a = self.net(x)
            b = self.net(x + a / 2)
            c = self.net(x + b / 2)
            x = x + (a + 2 * b + 2 * c + self.net(x + c)) / 6
        return x


class Fourier(nn.Module):
    """A Fourier neural operator: complex products of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.weight = (
            nn.Linear(1, 8),
            nn.Parameter(torch.randn(8, 8, 5, dtype=torch.cfloat)),
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        y = self.lift(x)
        waves = torch.fft.rfft(y, dim=1)[:, :5]
        mixed = torch.einsum("bki,iok->bko", waves, self.weight)
        return self.out(torch.fft.irfft(mixed, n=y.size(1), dim=1).relu() + y)


def science() -> dict[str, Callable[[], Task]]:
    """Graphs, equations and other products."""

    def graph(kind: str) -> Any:
        batch = (torch.randn(10, 8), torch.randint(10, (2, 30)), torch.randn(30, 3))
        return lambda: Task(Graph(kind), batch, square)

    def of(make: Callable[[], nn.Module], *shape: int) -> Any:
        return lambda: Task(make(), torch.randn(*(shape or (6, 8))), square)

    class Complex(nn.Module):
        """A layer of complex numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8, dtype=torch.cfloat)
            self.last = nn.Linear(8, 2, dtype=torch.cfloat)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.net(torch.complex(x, x)))

    def normed() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)),
        )

    return {
        "GNN, scatter": graph("plain"),
        "GNN, attention by scatter": graph("attention"),
        "GNN, network of edges": graph("network"),
        "GNN, dense adjacency": graph("dense"),
        "GNN, sparse product": graph("sparse"),
        "PointNet": of(
            lambda: Of(lambda m, x: m.head(m.each(x).amax(1)), each=mlp(3, 16, 8), head=mlp(8, 4)),
            B,
            20,
            3,
        ),
        "NeRF": of(
            lambda: Of(
                lambda m, x: m.net(torch.cat([(x * 2**i).sin() for i in range(4)], -1)),
                net=mlp(12, 32, 32, 4),
            ),
            40,
            3,
        ),
        "neural ODE": of(Ode),
        "normalizing flow": of(Flow),
        "Fourier neural operator": of(Fourier, B, 16, 1),
        "complex numbers": of(Complex),
        "einsum": of(
            lambda: Of(
                lambda m, x: torch.einsum("bij,kj->bik", m.net(x), m.other.weight),
                net=nn.Linear(8, 16),
                other=nn.Linear(16, 6),
            ),
            B,
            5,
            8,
        ),
        "capsules, einsum": of(
            lambda: Of(
                lambda m, x: torch.einsum("bni,nio->bno", x, m.net.weight.view(5, 8, 4)),
                net=nn.Linear(4, 40),
            ),
            B,
            5,
            8,
        ),
        "spectral and weight norm": of(normed),
    }


def plain_cases() -> list[Case]:
    """All of them."""
    kinds = (convolutional, recurrent, attention, trainings, science)
    makers = {name: make for kind in kinds for name, make in kind().items()}
    if not hasattr(torch.optim, "Muon"):  # older versions of torch
        del makers["Muon"]
    if not hasattr(F, "grouped_mm"):
        del makers["mixture of experts, grouped products"]
    # A net of three layers: the first one has no gradient of its input.
    small = 2 * 6 * (2 * 8 * 16 + 3 * 16 * 4)
    # Per token the matrices of the block, the recomputed layer and the output; and attention.
    matrices = D * (2 * D + 2 * D + 6 * D) + 2 * D * 3 * D + 40 * D
    by_hand = {
        "LBFGS": small,
        "Muon": small,
        "recomputation, reentrant": 3 * (2 * B * T * matrices + 4 * B * T * T * D),
    }
    reasons = {
        "Muon": {"products of the optimizer": -_muon([(16, 8), (4, 16)])},
        "LBFGS": {"products with a vector": 0},  # of the optimizer, which neither counts
    }
    cases = [
        Case(name, make, by_hand.get(name), reasons.get(name, {})) for name, make in makers.items()
    ]
    cases += [
        Case(f"{name}, {precision}", makers[name], options={"precision": precision})
        for precision in ("bf16-mixed", "bf16-true", "64-true")
        for name in ("ResNeXt", "language model, SDPA", "LSTM", "LoRA")
    ]
    cases += derivatives()
    return cases


def _muon(shapes: Sequence[tuple[int, int]], iterations: int = 5) -> int:
    """Newton and Schulz: three products per iteration of a matrix whose smaller side is first."""
    pairs = [(min(shape), max(shape)) for shape in shapes]
    return sum(iterations * 2 * (2 * m * m * n + m**3) for m, n in pairs)


def derivatives() -> list[Case]:
    """Steps with derivatives inside, which have closed formulas."""
    one, two = 2 * 6 * 8 * 16, 2 * 6 * 16  # products of the critic, of six samples
    # Generator: a forward; and gradients of its weights and, below the critic, of its output. The
    # critic's own weights are frozen meanwhile. Critic: the generator runs again, for its output.
    generator = 2 * 6 * (4 * 16 + 16 * 8)
    of_generator = generator + generator + 2 * 6 * 16 * 8 + 2 * (one + two)
    of_critic = generator + 2 * (2 * one + 3 * two)
    # The penalty: a forward and both gradients of data, of which the loss has the last one only. So
    # of the forward, the first product has two gradients; of that gradient's products, the second
    # one, too, and the first one, whose other factor is a constant, has one.
    penalty = (2 + 2 + 2) * one + (2 + 1) * two
    # As above, but the samples are fewer, and the loss has the output, too.
    first, second = 2 * 6 * 2 * 16, 2 * 6 * 16
    physics = (2 + 2 + 2) * first + (2 + 1 + 2) * second
    return [
        Case(
            "GAN with a gradient penalty",
            lambda: adversarial(True),
            of_generator + of_critic + penalty,
        ),
        Case(
            "physics-informed, second derivatives",
            lambda: Task(Physics(), torch.randn(6, 2), square),
            physics,
        ),
    ]
