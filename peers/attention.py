#!/usr/bin/env python3
"""PyTorch's attention by cuDNN on the shapes of ./bench --sweep kernels --peer, which starts this.

python3 peers/attention.py SHAPES.json: a list of {"B", "T", "H", "HKV", "D"} and "DV", where it is not D. Prints a line
of JSON for each: {"attention": the shape, "kernel": ..., "result": {...}}, or an "error" instead of the result. Causal,
in bf16, of normal numbers; q, k and v are columns of one matrix, as projections leave them. Each pass is recorded as a
graph, so that no time is the host's: medians of 20 replays after 3 that do not count, back to back.
"""

import json
import statistics
import sys

from libraries import require

require("torch")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def replays(work):
    """Milliseconds of each of 20 replays of what `work` issues."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for _ in range(3):
        graph.replay()
    for i, end in enumerate(ends):
        if i > 0:
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(ends, ends[1:])]


def spread(name, ms):
    return {name: statistics.median(ms), name + "_min": min(ms), name + "_max": max(ms)}


def measure(shape):
    B, T, H, HKV, D = (shape[key] for key in ("B", "T", "H", "HKV", "D"))
    DV = shape.get("DV", D)
    x = torch.randn(B, T, (H + HKV) * D + HKV * DV, device="cuda", dtype=torch.bfloat16)
    columns = x.split((H * D, HKV * D, HKV * DV), dim=2)
    q, k, v = (
        c.unflatten(2, (heads, -1)).transpose(1, 2).detach().requires_grad_()
        for c, heads in zip(columns, (H, HKV, HKV))
    )
    d_o = torch.randn(B, T, H, DV, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def forward():
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != HKV)

    def both():
        torch.autograd.grad(forward(), (q, k, v), d_o)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return spread("forward_ms", replays(forward)) | spread("forward_backward_ms", replays(both))


def main():
    if len(sys.argv) != 2:
        sys.exit("error: attention.py takes one file of shapes, as ./bench --sweep kernels --peer writes it")
    if not torch.cuda.is_available():
        sys.exit("error: attention.py needs a GPU, which PyTorch does not see")
    with open(sys.argv[1]) as file:
        shapes = json.load(file)
    torch.manual_seed(1)
    number = torch.backends.cudnn.version()
    cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    kernel = f"cuDNN {cudnn}, PyTorch {torch.__version__.split('+')[0]}"
    for shape in shapes:
        row = {"attention": shape, "kernel": kernel}
        try:
            row["result"] = measure(shape)
        except RuntimeError as e:  # no such kernel, or no memory
            row["error"] = str(e).splitlines()[0]
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
