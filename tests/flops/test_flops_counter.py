"""FlopCounter, compared with closed formulas."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_perf.flops import FlopCounter

ROWS, INPUTS, HIDDEN, OUTPUTS = 6, 8, 16, 4


def mlp(dtype=torch.float32):
    layers = [nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS)]
    return nn.Sequential(*layers).to(dtype)


def count(step):
    with FlopCounter() as counter:
        step()
    return counter.counts


def total(step):
    counts = count(step)
    assert counts.untracked_names == {}
    return counts.model_flops


FIRST, SECOND = 2 * ROWS * INPUTS * HIDDEN, 2 * ROWS * HIDDEN * OUTPUTS


def test_mlp_forward_and_backward():
    """Backward has two products per layer, except one for the first layer."""
    model, x = mlp(), torch.randn(ROWS, INPUTS)
    counts = count(lambda: model(x).sum().backward())
    assert counts.model == {"float32": 2 * FIRST + 3 * SECOND}
    assert counts.hardware == counts.model
    assert counts.tracked_operations == 5
    assert counts.untracked_operations == 0


def test_frozen_layers_have_no_weight_gradient():
    """A frozen layer has one product in backward; a frozen first layer has none."""
    model, x = mlp(), torch.randn(ROWS, INPUTS)
    model[2].requires_grad_(False)
    assert total(lambda: model(x).sum().backward()) == 2 * FIRST + 2 * SECOND
    model[2].requires_grad_(True)
    model[0].requires_grad_(False)
    assert total(lambda: model(x).sum().backward()) == FIRST + 2 * SECOND


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_without_gradients_operators_are_counted_too(context):
    """Composite operators, which stay whole under inference_mode, are counted by their parts."""
    x = torch.randn(ROWS, INPUTS)

    def step():
        with context():
            mlp()(x)
            torch.einsum("ij,kj->ik", x, x)
            nn.Conv1d(INPUTS, HIDDEN, 3)(torch.randn(2, INPUTS, 5))
            F.scaled_dot_product_attention(*torch.randn(3, 2, 4, 6, 8))

    convolution = 2 * 2 * HIDDEN * 3 * INPUTS * 3
    attention = 4 * 2 * 4 * 6 * 6 * 8
    assert total(step) == FIRST + SECOND + 2 * ROWS * ROWS * INPUTS + convolution + attention


@pytest.mark.parametrize(
    ("make", "shape", "products"),
    [
        (lambda: nn.Conv1d(8, 12, 3, stride=2, padding=1), (2, 8, 10), 12 * 5 * 8 * 3),
        (lambda: nn.Conv2d(8, 12, 3), (2, 8, 6, 7), 12 * 4 * 5 * 8 * 9),
        (lambda: nn.Conv2d(8, 12, 3, groups=4), (2, 8, 6, 7), 12 * 4 * 5 * 2 * 9),
        (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 6, 7), 8 * 4 * 5 * 9),
        (lambda: nn.Conv3d(4, 6, 2, dilation=2), (2, 4, 4, 4, 4), 6 * 8 * 4 * 8),
        (lambda: nn.ConvTranspose1d(8, 12, 4, stride=2), (2, 8, 5), 5 * 8 * 12 * 4),
        (lambda: nn.ConvTranspose2d(8, 12, 3, groups=2), (2, 8, 5, 6), 5 * 6 * 8 * 6 * 9),
    ],
)
def test_convolution(make, shape, products):
    """Each gradient of a convolution costs as much as its forward, also grouped or transposed."""
    layer, x = make(), torch.randn(shape, requires_grad=True)
    forward = 2 * 2 * products
    assert total(lambda: layer(x).sum().backward()) == 3 * forward
    x = x.detach()
    assert total(lambda: layer(x).sum().backward()) == 2 * forward


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers, directions):
    """Four gates per layer, direction and step, and twice that in backward."""
    steps, width, hidden = 5 * 3, 8, 16
    lstm = nn.LSTM(width, hidden, layers, bidirectional=directions == 2)
    x = torch.randn(5, 3, width, requires_grad=True)
    inputs = width + (layers - 1) * directions * hidden
    matrices = 4 * hidden * directions * (inputs + layers * hidden)
    assert total(lambda: lstm(x)[0].sum().backward()) == 3 * 2 * steps * matrices


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_lstm_computes_the_gradient_of_its_input(fused):
    """Also if nobody needs it; one that is not fused computes none of input and first state."""
    lstm, x = nn.LSTM(8, 16), torch.randn(5, 3, 8)
    with torch.backends.mkldnn.flags(enabled=fused):
        counted = total(lambda: lstm(x)[0].sum().backward())
    of_input, of_state = 5 * 3 * 8 * 4 * 16, 3 * 16 * 4 * 16
    assert counted == 3 * 2 * 5 * 3 * 4 * 16 * (8 + 16) - (not fused) * 2 * (of_input + of_state)


def test_gru():
    """Three gates per step; the requested gradient of the first state is included."""
    gru, x = nn.GRU(8, 16), torch.randn(5, 3, 8, requires_grad=True)
    state = torch.randn(1, 3, 16, requires_grad=True)
    forward = 2 * 5 * 3 * 3 * 16 * (8 + 16)
    assert total(lambda: gru(x, state)[0].sum().backward()) == 3 * forward


def test_flops_are_summed_per_dtype():
    """Each dtype has its own peak."""
    x = torch.randn(ROWS, INPUTS)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            mlp()(x)
        mlp(torch.float64)(x.double())

    assert count(step).model == {"bfloat16": FIRST + SECOND, "float64": FIRST + SECOND}


@pytest.mark.parametrize("allowed", [True, False])
def test_cudnn_uses_tf32_unless_it_is_forbidden(allowed):
    """On CUDA the peak of TensorFloat-32 applies to convolutions only, if it is allowed."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        with FakeTensorMode(), torch.no_grad(), FlopCounter() as counter:
            for device, dtype in (("cuda", None), ("cuda", torch.half), ("cpu", None)):
                image = torch.empty(1, 2, 4, 4, device=device, dtype=dtype)
                kernels, matrix = image.new_empty(3, 2, 3, 3), image.new_empty(5, 3)
                F.linear(F.conv2d(image, kernels).mean((2, 3)), matrix)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    conv, linear = 2 * 12 * 2 * 9, 2 * 5 * 3
    on_cuda = {"tf32": conv, "float32": linear} if allowed else {"float32": conv + linear}
    expected = {**on_cuda, "float32": on_cuda["float32"] + conv + linear, "float16": conv + linear}
    assert counter.counts.model == expected


def test_complex_products_count_four_times():
    """A complex multiply-add counts as four real ones, in the dtype of its parts."""
    x = torch.randn(4, 4, dtype=torch.complex64)
    assert count(lambda: x @ x).model == {"float32": 4 * 2 * 4**3}


def test_nested_counting_counts_once_and_later_counting_adds():
    """A backward inside a counted training step is counted once."""
    model, x, counter = mlp(), torch.randn(ROWS, INPUTS), FlopCounter()
    with counter:
        loss = model(x).sum()
        with counter:
            loss.backward()
        model(x)
    once = 2 * FIRST + 3 * SECOND
    assert counter.counts.model_flops == once + FIRST + SECOND
    with counter:
        model(x)
    assert counter.counts.model_flops == once + 2 * (FIRST + SECOND)


def test_an_exception_leaves_no_dispatch_mode():
    """After an error inside, no dispatch mode is active."""
    x, counter = torch.randn(2, 2), FlopCounter()

    def fail():
        with counter, counter, torch.inference_mode():
            torch.einsum("ij,jk->ik", x, torch.randn(3, 3))

    with pytest.raises(RuntimeError):
        fail()
    assert _get_current_dispatch_mode() is None
    torch.mm(x, x)
    assert counter.counts.model_flops == 0


def test_tensors_of_other_classes_are_constructed_until_the_last_counter_ends():
    """Counters may overlap, such as those of two threads; at the end `Tensor.__new__` is the
    original.
    """

    class Other(torch.Tensor):
        pass

    first, second = FlopCounter(), FlopCounter()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(first.__enter__).result()
        with second, FlopCounter():
            assert type(Other(torch.ones(2))) is type(Other([1.0])) is type(Other(2, 3)) is Other
            thread.submit(first.__exit__).result()
            assert type(Other(torch.ones(2))) is Other
        assert type(thread.submit(Other, [1.0]).result()) is Other
    assert "__new__" not in vars(torch.Tensor)


def test_another_library_s_constructor_is_restored(monkeypatch):
    """A replacement of `Tensor.__new__`, such as DeepSpeed's, is there again after a count."""

    def theirs(kind, *args):
        return torch._C.TensorBase.__new__(kind, *args)

    monkeypatch.setattr(torch.Tensor, "__new__", theirs, raising=False)
    with FlopCounter():
        assert torch.Tensor([1.0]).item() == 1.0
    assert torch.Tensor.__new__ is theirs


def test_uncounted_operators_are_named():
    """Transforms, decompositions, sparse products and custom operators are listed by name."""

    @torch.library.custom_op("lightning_perf_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    x = torch.randn(4, 4)

    def step():
        torch.fft.fft(x)
        torch.linalg.svd(x)
        torch.sparse.mm(x.to_sparse(), x)
        x.to_sparse() @ x
        double(x)
        x.relu().sum().add(1).reshape(1)

    counts = count(step)
    names = ["aten::_fft_r2c", "aten::_linalg_svd", "aten::_sparse_addmm", "aten::mm"]
    assert counts.untracked_names == dict.fromkeys([*names, "lightning_perf_test::double"], 1)
    assert counts.untracked_operations == 5
    assert counts.model == {}


def test_wrapper_subclasses_are_counted_by_their_inner_tensors():
    """A nested tensor costs its real rows."""
    lengths = 2, 4
    rows = [torch.randn(length, INPUTS) for length in lengths]
    model = mlp()
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    expected = 2 * FIRST + 3 * SECOND
    assert sum(lengths) == ROWS
    assert total(lambda: model(jagged).values().sum().backward()) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoder_fast_path():
    """The fused encoder layer costs the real lengths in a padded batch."""
    width, hidden, lengths = 16, 32, (7, 5, 3)
    layer = nn.TransformerEncoderLayer(width, 2, hidden, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]

    def step():
        with torch.no_grad():
            encoder(torch.randn(3, 7, width), src_key_padding_mask=padding)

    layer_weights = 4 * width * width + 2 * width * hidden
    each = [2 * n * layer_weights + 4 * n * n * width for n in lengths]
    assert total(step) == 2 * sum(each)


def test_compiled_code_stays_compiled():
    """Counting a compiled module does not make it eager."""
    if not hasattr(torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals"):
        pytest.skip("this torch cannot")
    runs = []

    def backend(graph, _):
        def run(*args):
            runs.append(None)
            return graph(*args)

        return run

    compiled = torch.compile(nn.Linear(4, 4), backend=backend, fullgraph=True)
    x = torch.randn(2, 4)
    with FlopCounter():
        compiled(x)
    compiled(x)
    assert len(runs) == 2


@pytest.fixture
def two_ranks():
    """A mesh of two ranks, of which only this rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_tensor_parallel_layers_cost_this_ranks_share(two_ranks):
    """A layer split over two ranks costs each of them half."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = parallelize_module(nn.Linear(INPUTS, HIDDEN), two_ranks, ColwiseParallel())
    x = torch.randn(ROWS, INPUTS)
    assert total(lambda: layer(x).sum().backward()) == 2 * FIRST // 2
