"""A trace as written by torch.profiler on a GPU, with hand-written times.

The schema is that of Kineto; the values are not measured, since the tests have no GPU.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
HOST = {"pid": 4711, "tid": 4711}
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::relu>(int, float*)"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LINE = "train.py(42): training_step"


def on_host(category: str, name: str, start: float, end: float, link: int = 0) -> Event:
    """An event of the main thread, in microseconds."""
    args = {"External id": link, "Record function id": 0} if link else {}
    return {"ph": "X", "cat": category, "name": name, **HOST, "ts": start, "dur": end - start,
            "args": args}  # fmt: skip


def on_device(
    category: str, name: str, start: float, end: float, link: int, stream: int = 7, device: int = 0
) -> Event:
    """A kernel or copy, in microseconds."""
    args = {"External id": link, "device": device, "context": 1, "stream": stream,
            "correlation": link, "grid": [1, 2, 3], "block": [128, 1, 1]}  # fmt: skip
    return {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream, "ts": start,
            "dur": end - start, "args": args}  # fmt: skip


def step(number: int, begin: float, device: int = 0) -> list[Event]:
    """One step of 1 ms.

    The GPU waits 200 us for data and 100 us for the host's operators, then works for 600 us: 300 in
    a matrix product, 200 in communication of which 50 are hidden, 100 in another kernel, 50 in a
    copy. The last 100 us of the step are unused.
    """

    def host(category: str, name: str, start: float, end: float, link: int = 0) -> Event:
        return on_host(category, name, begin + start, begin + end, link)

    def gpu(category: str, name: str, start: float, end: float, link: int, stream: int) -> Event:
        return on_device(category, name, begin + start, begin + end, link, stream, device)

    link = 100 * number
    loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return [
        host("user_annotation", f"ProfilerStep#{number}", 0, 1000, link + 1),
        host("user_annotation", loading, 0, 200, link + 2),
        host("cpu_op", "aten::stack", 50, 150, link + 3),
        host("python_function", LINE, 200, 700),
        host("cpu_op", "aten::linear", 200, 300, link + 4),
        host("cpu_op", "aten::addmm", 210, 290, link + 5),
        host("cuda_runtime", "cudaLaunchKernel", 220, 230, link + 5),
        host("python_function", "torch/_tensor.py(7): item", 500, 690),
        host("cpu_op", "aten::item", 510, 680, link + 6),
        host("cpu_op", "aten::_local_scalar_dense", 520, 670, link + 7),
        host("cuda_runtime", "cudaStreamSynchronize", 540, 660, link + 7),
        gpu("kernel", GEMM, 300, 600, link + 5, 7),
        gpu("kernel", NCCL, 550, 750, link + 8, 20),
        gpu("kernel", RELU, 750, 850, link + 9, 7),
        gpu("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 850, 900, link + 7, 7),
        # Events without effect: the steps on the device's timeline, flows, and thread names.
        gpu("gpu_user_annotation", f"ProfilerStep#{number}", 300, 900, link + 1, 7),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": link, **HOST, "ts": begin + 220},
        {"ph": "M", "name": "process_name", **HOST, "ts": begin, "args": {"name": "python"}},
    ]


def cuda_trace(steps: int = 2) -> dict[str, Any]:
    """A whole trace, with events before the first step and after the last one."""
    events = [event for number in range(steps) for event in step(number + 5, 1000.0 * number)]
    events += [
        on_host("cpu_op", "aten::warmup", -500, -400, 1),
        on_device("kernel", GEMM, -300, -100, 1),
        on_host("cuda_runtime", "cudaDeviceSynchronize", 1000 * steps + 1, 1000 * steps + 9000),
    ]
    properties = [{"id": 0, "name": "NVIDIA H100", "computeMajor": 9}]
    return {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": events}
