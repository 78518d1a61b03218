"""Counting on a shadow gives the closed formulas and does not change the module."""

import random
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning as L
import numpy as np
import pytest
import torch
from helpers.small import Records
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_perf.flops.shadow import ShadowError, count_on_shadow, is_compiled

ROWS, WIDTH = 6, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def sum_over_ranks(model, x):
    out = model(x)
    return (out[0] if isinstance(out, tuple) else out).sum()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).relu())


def flops(module, batch, step=sum_over_ranks):
    return count_on_shadow(module, batch, step).model


IMAGE = torch.randn(2, 8, 6, 6)


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (MLP, torch.randn(ROWS, WIDTH), 5 * PRODUCT),
        (lambda: nn.Conv2d(8, 12, 3, groups=4), IMAGE, 2 * 2 * 2 * 12 * 4 * 4 * 2 * 9),
        (
            lambda: nn.LSTM(8, 16),
            torch.randn(5, 3, 8, requires_grad=True),
            3 * 2 * 15 * 4 * 16 * 24,
        ),
    ],
    ids=["mlp", "grouped convolution", "lstm"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_closed_formulas(make, batch, expected, compiled):
    """A shadow gives the formula's result, whether the module is compiled or not."""
    module = make()
    if compiled:
        module.compile(backend="eager")
    assert flops(module, batch) == {"float32": expected}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(masked):
    """It counts without a mask. A shadow has no values of a mask, and the error says so."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = None
    if masked:
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu")

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = mask

        def forward(self, x):
            return flex.flex_attention(x, x, x, block_mask=self.mask)

    x = torch.randn(2, 3, 256, 32)
    with torch.no_grad():
        if not masked:
            assert flops(Attends(), x) == {"float32": 4 * 2 * 3 * 256 * 256 * 32}
            return
        with pytest.raises(ShadowError, match=r"sizes in .*flex_attention.* depend on data"):
            flops(Attends(), x)


def test_autocast_applies():
    """The step's own context decides the dtype of the products."""

    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return sum_over_ranks(model, x)

    assert flops(MLP(), torch.randn(ROWS, WIDTH), step) == {"bfloat16": 5 * PRODUCT}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_adds_to_the_hardware(reentrant):
    """Recomputation on the shadow counts for hardware FLOPs only."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step(model, x):
        return checkpoint(lambda y: model(y).relu(), x, use_reentrant=reentrant).sum()

    counts = count_on_shadow(MLP(), x, step)
    assert counts.model_flops == 6 * PRODUCT
    assert counts.hardware_flops == 8 * PRODUCT


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_steps_without_gradients(context):
    """Validation costs the forward, under no_grad and inference_mode."""

    def step(model, x):
        with context():
            return sum_over_ranks(model, x)

    batch = torch.randn(ROWS, WIDTH)
    assert flops(MLP(), batch, step) == {"float32": 2 * PRODUCT}
    with context():
        assert flops(MLP(), batch) == {"float32": 2 * PRODUCT}


class Watcher:
    """A compiler backend that counts compilations and calls."""

    def __init__(self):
        self.compiled = self.ran = 0

    def __call__(self, graph, _inputs):
        self.compiled += 1

        def run(*args):
            self.ran += 1
            return graph(*args)

        return run


def by_call(watcher, fullgraph):
    module = MLP()
    module.compile(backend=watcher, fullgraph=fullgraph)
    return module


def by_wrapper(watcher, fullgraph):
    return torch.compile(MLP(), backend=watcher, fullgraph=fullgraph)


def by_part(watcher, fullgraph):
    return nn.Sequential(torch.compile(MLP(), backend=watcher, fullgraph=fullgraph), nn.ReLU())


def by_attribute(watcher, fullgraph):
    module = MLP()
    module.forward = torch.compile(module.forward, backend=watcher, fullgraph=fullgraph)
    return module


def by_decorator(watcher, fullgraph):
    # Lightning before 2.2.2 replaces torch.compile by a function that needs the model.
    compiled = partial(torch.compile, backend=watcher, fullgraph=fullgraph)

    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = MLP()

        @compiled
        def forward(self, x):
            return self.layers(x)

    return Decorated()


def by_static_method(watcher, fullgraph):
    compiled = partial(torch.compile, backend=watcher, fullgraph=fullgraph)

    class Static(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = MLP()

        @staticmethod
        @compiled
        def apply_to(layers, x):
            return layers(x)

        def forward(self, x):
            return self.apply_to(self.layers, x)

    return Static()


def by_free_function(watcher, fullgraph):
    apply = torch.compile(lambda layers, x: layers(x), backend=watcher, fullgraph=fullgraph)

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = MLP()

        def forward(self, x):
            return apply(self.layers, x)

    return Caller()


WAYS = [
    by_call, by_wrapper, by_part, by_attribute, by_decorator, by_static_method, by_free_function,
]  # fmt: skip


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_stays_compiled(way, fullgraph):
    """Counting neither runs, discards nor adds compiled code, for all ways to compile."""
    torch._dynamo.reset()
    watcher = Watcher()
    module, x = way(watcher, fullgraph), torch.randn(ROWS, WIDTH)
    assert is_compiled(module) == (way is not by_free_function)
    assert flops(module, x) == {"float32": 5 * PRODUCT}
    assert (watcher.compiled, watcher.ran) == (0, 0)
    for runs in 1, 2, 3:
        sum_over_ranks(module, x).backward()
        assert flops(module, x) == {"float32": 5 * PRODUCT}
        assert (watcher.compiled, watcher.ran) == (1, runs)


def test_modules_that_lightning_compiled_are_detected():
    """A module that is not compiled is not detected, whatever its attributes return."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.proxy, module.settings = MagicMock(), SimpleNamespace(_torchdynamo_orig_callable=1)
    module._compiler_ctx = None
    assert not is_compiled(module)
    module[0]._compiler_ctx = {"compiler": "dynamo"}
    assert is_compiled(module)


def test_functions_excluded_from_compilation_are_not_compiled():
    """`torch.compiler.disable` marks a function that stays eager, as Lightning's `log` may be."""

    class Eager(nn.Module):
        @torch.compiler.disable
        def log(self):
            pass

    assert not is_compiled(Eager())


@pytest.mark.slow
def test_the_compiler_is_not_imported():
    """Detection does not import torch's compiler, which takes a second."""
    code = (
        "import sys; from torch import nn; from lightning_perf.flops import is_compiled; "
        "assert not is_compiled(nn.Linear(2, 2)); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Noisy(nn.Module):
    """Uses every random generator, has buffers, and disables gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        torch.manual_seed(random.randrange(100) + np.random.randint(100))
        out = self.layers(x + torch.randn_like(x))
        torch.set_grad_enabled(False)
        return out


def test_counting_on_a_shadow_changes_nothing():
    """Parameters, gradients, buffers, attributes, random state and grad mode do not change."""
    module, x = Noisy(), torch.randn(ROWS, WIDTH)
    with torch.enable_grad():
        module.layers(x).sum().backward()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [p.grad.clone() for p in module.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    flops(module, x)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert module.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    after = [p.grad for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, gradients, strict=True))


def test_compiled_training_is_bit_identical():
    """Losses, weights and random numbers are those of a run that was not counted."""

    def train(count):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, WIDTH))
        model.compile(backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            if count:
                flops(model, x)
            loss = sum_over_ranks(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach(), *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_no_weight_is_copied():
    """A model too large to copy is counted."""
    with torch.device("meta"):
        module = nn.Linear(2**20, 2**20, bias=False)
    kept = []
    shadow_of = lambda model, x: kept.append(model.weight) or sum_over_ranks(model, x)  # noqa: E731
    x = torch.empty(2, 2**20, device="meta")
    assert flops(module, x, shadow_of) == {"float32": 2 * 2 * 2 * 2**40}
    flops(nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH), shadow_of)
    assert kept[1].device.type == "cpu"
    assert kept[1].untyped_storage().device.type == "meta"


def test_tied_weights_stay_tied():
    """Shared parameters and views are also shared on the shadow."""
    module = MLP()
    module.second.weight = module.first.weight
    seen = []
    flops(module, torch.randn(ROWS, WIDTH), lambda m, x: seen.append(m) or sum_over_ranks(m, x))
    assert seen[0].second.weight is seen[0].first.weight
    assert isinstance(seen[0].first.weight, nn.Parameter)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Numpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.detach().numpy())


class Item(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x[x[:, 0] > 0])


class Closed(nn.Module):
    """Calls the real layer through a closure, which cannot be copied."""

    def __init__(self):
        super().__init__()
        layer = self.layer = nn.Linear(WIDTH, WIDTH)
        self.call = lambda x: layer(x)

    def forward(self, x):
        return self.call(x)


class Raising(nn.Module):
    def forward(self, x):
        raise ValueError("no\nway")


class Uncopied(nn.Module):
    def __init__(self):
        super().__init__()
        self.lines = (line for line in ())


@pytest.mark.parametrize("make", [Branching, Numpy, Item, Routed, Closed, Raising, Uncopied])
def test_awkward_modules_are_refused(make):
    """Modules that depend on values or cannot be copied are refused with the reason."""
    module = make()
    with pytest.raises(ShadowError, match=rf"{make.__name__} cannot be counted.*: \w+") as caught:
        flops(module, torch.randn(ROWS, WIDTH))
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in module.parameters())
    assert torch.ones(2).sum().item() == 2


class Lightning(L.LightningModule):
    """Logs in every way, reads the trainer, and calls a compiled part."""

    def __init__(self):
        super().__init__()
        self.layers = torch.compile(MLP(), backend="eager")

    def training_step(self, batch, _index):
        loss = sum_over_ranks(self.layers, batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss.item()})
        self.logger.log_metrics({"loss": loss.detach()}, self.global_step)
        self.print(loss)
        return loss / self.trainer.world_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adversarial(L.LightningModule):
    """Two optimizers with manual optimization and toggling."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def training_step(self, batch, _index):
        first, second = self.optimizers()
        first.param_groups[0]["lr"] = 0.01
        self.toggle_optimizer(first)
        self.manual_backward(self.judge(self.make(batch)).sum())
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            second.step(closure=lambda: self.manual_backward(self.judge(self.make(batch)).sum()))
        second.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return batch.sum()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(p.parameters(), lr=0.1) for p in (self.make, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]


class CountsAtStart(L.Callback):
    """Counts on a shadow at the start of the first batch."""

    counts = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.counts is None:
            rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
            self.counts = count_on_shadow(module, batch, lambda m, b: m.training_step(b, 0))
            assert trainer.callback_metrics == {}
            assert rates == [g["lr"] for one in trainer.optimizers for g in one.param_groups]
            assert all(p.requires_grad and p.grad is None for p in module.parameters())
            assert module.trainer is trainer


@pytest.mark.parametrize(
    ("make", "products"),
    # Generator's step: forward, data and weight. Discriminator's step: forward and one weight.
    [(Lightning, 5), (Adversarial, 2 + 2 + 2 + 1)],
)
def test_a_module_in_training(make, products, tmp_path):
    """Logging, schedulers and optimizers have no effect, and training continues unchanged."""
    counting = CountsAtStart()
    trainer = L.Trainer(
        max_steps=2,
        accelerator="cpu",
        callbacks=[counting],
        logger=Records(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(make(), torch.utils.data.DataLoader(torch.randn(3 * ROWS, WIDTH), ROWS))
    assert counting.counts.model == {"float32": products * PRODUCT}


class Reaching(Lightning):
    def training_step(self, batch, _index):
        self.trainer.save_checkpoint("stolen.ckpt")


def test_the_trainer_cannot_be_called(tmp_path, monkeypatch):
    """A shadow that calls a method of the trainer is refused."""
    monkeypatch.chdir(tmp_path)
    module = Reaching()
    module.trainer = L.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(ShadowError, match=r"trainer\.save_checkpoint is not available"):
        count_on_shadow(module, torch.ones(1), lambda m, b: m.training_step(b, 0))
    assert not list(tmp_path.iterdir())
