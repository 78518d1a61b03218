"""Predicting new shapes: within 0.1 % if a polynomial fits, otherwise no prediction."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_perf.flops import FlopCounter
from lightning_perf.flops.counter import Counts
from lightning_perf.flops.prediction import fit
from lightning_perf.flops.signature import signature

SHAPES = [(1 + i % 5, 4 + 3 * i) for i in range(16)]


def counted(step, batch):
    with FlopCounter() as counter:
        step(batch)
    return counter.counts


def predictor(step, batches):
    model = fit({signature(batch): counted(step, batch) for batch in batches})
    assert model is not None
    return model


def close(step, batches, unseen):
    model = predictor(step, batches)
    for batch in unseen:
        expected = counted(step, batch)
        found = model.predict(signature(batch))
        assert found.model == pytest.approx(expected.model, 1e-3)
        assert found.hardware == pytest.approx(expected.hardware, 1e-3)


class Attention(nn.Module):
    """A causal language model of one layer, with mixed dtypes and an activation checkpoint."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first, self.tokens = batch_first, nn.Embedding(20, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids):
        x = self.tokens(ids if self.batch_first else ids.T)
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(self.attend, x, use_reentrant=False)
        y = self.head(y.float())
        return F.cross_entropy(y.flatten(0, 1), ids.flatten())

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).exp()


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer(batch_first):
    """Longer and larger batches are predicted by dtype, with recomputation."""
    model = Attention(batch_first)
    step = lambda ids: model(ids).backward()  # noqa: E731

    def ids(b, t):
        return torch.zeros((b, t) if batch_first else (t, b), dtype=torch.long)

    close(step, [ids(*s) for s in SHAPES], [ids(7, 64), ids(32, 9), ids(1, 1)])


def test_a_recurrent_net():
    """Time-first batches are predicted."""
    net = nn.LSTM(4, 6)
    shapes = [torch.randn(t, b, 4) for b, t in SHAPES]
    close(lambda x: net(x)[0].sum().backward(), shapes, [torch.randn(70, 8, 4)])


def test_constant_dimensions_are_not_extrapolated():
    """With one counted length, other lengths are refused and other batch sizes predicted."""
    model = Attention()
    step = lambda ids: model(ids).backward()  # noqa: E731
    found = predictor(step, [torch.zeros(b, 16, dtype=torch.long) for b in range(1, 10)])
    assert found.predict(signature(torch.zeros(4, 17, dtype=torch.long))) is None
    larger = torch.zeros(64, 16, dtype=torch.long)
    assert found.predict(signature(larger)).model == counted(step, larger).model


def known(cost, batches):
    return {signature(one): Counts(*2 * [{"float32": cost(one)}]) for one in batches}


def test_an_encoder_and_a_decoder():
    """Two independent lengths and the batch size are predicted."""
    draw = random.Random(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)

    def pair():
        samples = draw.randrange(1, 6)
        return [torch.randn(samples, draw.randrange(2, 20), 8) for _ in range(2)]

    step = lambda pair: decoder(pair[1], encoder(pair[0])).sum().backward()  # noqa: E731
    close(step, [pair() for _ in range(16)], [pair() for _ in range(16)])


def test_a_graph_of_any_number_of_nodes_and_edges():
    """Message passing is predicted from nodes and edges."""
    draw = random.Random(0)
    nodes, edges = nn.Linear(6, 8), nn.Linear(8, 8)

    def step(graph):
        x, (source, target) = nodes(graph[0]), graph[1]
        torch.zeros_like(x).index_add(0, target, edges(x[source]).relu()).sum().backward()

    def graph():
        count = draw.randrange(2, 60)
        return torch.randn(count, 6), torch.randint(count, (2, draw.randrange(1, 200)))

    close(step, [graph() for _ in range(16)], [graph() for _ in range(300)])


@pytest.mark.parametrize("padding", [0, 1])
def test_images_of_any_number_and_both_sizes(padding):
    """A convolution is predicted for any height, width and batch size."""
    draw = random.Random(0)
    body, head = nn.Conv2d(3, 8, 3, padding=padding), nn.Linear(8, 10)
    step = lambda x: head(body(x).mean((2, 3))).sum().backward()  # noqa: E731

    def images():
        return torch.randn(draw.randrange(1, 5), 3, draw.randrange(4, 20), draw.randrange(4, 20))

    close(step, [images() for _ in range(16)], [images() for _ in range(50)])


@pytest.mark.parametrize("seed", range(20))
def test_predictions_are_close_or_refused(seed):
    """For any polynomial or step function, predictions are within 0.1 % or None."""
    draw = random.Random(seed)
    weights = {(a, b): draw.choice([0, 0, 1, 7, 1000]) for a in range(4) for b in range(4)}
    divisor = draw.choice([1, 1, 1, 2])

    def cost(x):
        a, b = x.shape
        return sum(w * a**i * b**j for (i, j), w in weights.items()) // divisor

    batches = [torch.empty(draw.randrange(1, 40), draw.randrange(1, 40)) for _ in range(300)]
    for size in (8, 12, 16, 32, 64):
        model = fit(known(cost, batches[:size]))
        for batch in batches if model else []:
            found = model.predict(signature(batch))
            assert found is None or found.model_flops == pytest.approx(cost(batch), 1e-3)


def test_many_large_sizes_are_predicted():
    """A polynomial of four sizes and quadrillions of FLOPs is found."""
    draw = random.Random(0)

    def sizes():
        return [torch.empty(draw.randrange(1, 9000), 0) for _ in range(4)]

    def cost(batch):
        a, b, c, d = (part.shape[0] for part in batch)
        return a * (10**6 + 10**5 * b + 3 * b * c * d) + 7 * d

    batches = [sizes() for _ in range(90)]
    model = fit(known(cost, batches[:64]))
    for one in batches[64:]:
        assert model.predict(signature(one)).model_flops == pytest.approx(cost(one), 1e-3)


@pytest.mark.parametrize(
    ("sizes", "cost"),
    [
        (lambda b, k: (b, 9 * k, 16 * k, 0), lambda b, k: 2 * 54321 * b * 9 * k * 16 * k),
        (lambda b, k: (b, 160 * k, k, 0), lambda b, k: b * (77 * k + 2 * 160 * k + 6 * k * k)),
        (lambda b, k: (k, 0), lambda b, k: 15 * k * (k - 1) // 2 + 9 * k),
        (lambda b, k: (b, 128 * (1 + k % 2)), lambda b, k: b * 128 * (1 + k % 2) * 10**9),
    ],
    ids=["one aspect ratio", "samples and frames", "pairs", "two lengths"],
)
def test_sizes_in_a_fixed_ratio_are_predicted(sizes, cost):
    """Sizes that are multiples of each other, halves and few different sizes are predicted."""
    draw = random.Random(0)
    pairs = {(draw.randrange(1, 9), draw.randrange(2, 90)) for _ in range(60)}
    counts = {signature(torch.empty(sizes(*pair))): cost(*pair) for pair in pairs}
    some = [*counts.items()][:16]
    model = fit({one: Counts(*2 * [{"float32": flops}]) for one, flops in some})
    for one, flops in counts.items():
        assert model.predict(one).model_flops == pytest.approx(flops, 1e-3)


def test_collinear_sizes_are_not_separated():
    """If edges were always twice the nodes, other graphs are not predicted."""
    pairs = [(torch.empty(n, 4), torch.empty(2 * n)) for n in range(2, 20)]
    cost = lambda pair: 3 * pair[0].shape[0] + 5 * pair[1].shape[0]  # noqa: E731
    model = fit(known(cost, pairs))
    assert model.predict(signature((torch.empty(50, 4), torch.empty(100)))).model_flops == 650
    assert model.predict(signature((torch.empty(50, 4), torch.empty(101)))) is None


def test_dependent_sizes_are_checked():
    """A size that always depended on another one must do so again."""
    tied = [(torch.empty(4, n), torch.empty(4, n - 1)) for n in range(5, 20)]
    model = fit(known(lambda pair: 6 * pair[0].numel(), tied))
    assert model.predict(signature((torch.empty(4, 99), torch.empty(4, 98)))) is not None
    assert model.predict(signature((torch.empty(4, 99), torch.empty(4, 99)))) is None


@pytest.mark.parametrize(
    "cost",
    [lambda x: x.shape[0] ** 3, lambda x: x.shape[1] ** 3, lambda x: hash(x.shape)],
    ids=["contrastive", "cubic", "arbitrary"],
)
def test_costs_that_do_not_fit_are_refused(cost):
    """Costs that a held-out batch contradicts give no model."""
    assert fit(known(lambda x: abs(cost(x)), [torch.empty(s) for s in SHAPES])) is None


def test_other_structures_are_not_predicted():
    """Batches with other dtypes, dimensions or members are not predicted."""
    model = fit(known(torch.numel, [torch.empty(s) for s in SHAPES]))
    assert model.predict(signature(torch.empty(3, 50))).model == {"float32": 150}
    assert model.predict(signature(torch.empty(3, 50, dtype=torch.float64))) is None
    assert model.predict(signature(torch.empty(3, 50, 1))) is None
    assert model.predict(signature([torch.empty(3, 50)])) is None


def test_too_few_counts_give_no_model():
    """Few batches, a single shape or incomplete counts give no model."""
    batches = [torch.empty(s) for s in SHAPES]
    assert fit(known(torch.numel, batches[:7])) is None
    assert fit(known(torch.numel, [torch.empty(3)] * 12)) is None
    gaps = Counts({"float32": 5}, {"float32": 5}, 1, {"aten::_fft_r2c": 1})
    assert fit({signature(x): gaps for x in batches}) is None
