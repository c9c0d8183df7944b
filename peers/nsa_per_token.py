#!/usr/bin/env python3
"""What Native Sparse Attention costs when it is written as a loop over queries, in PyTorch on one GPU: a JSON line.

  python3 peers/nsa_per_token.py --tokens 256

For each query and group the selected ranges are read on the host (one synchronisation), their keys and values are
gathered by slicing and concatenation, and one small attention call is made; autograd keeps a node for each. This is
how several readable implementations do it. One layer's selected branch runs over the first --tokens queries of the
shape `m7c`, forward and backward, eager; the figure for a step is that times layers * seq / tokens, an extrapolation
which is too low, since later queries select more. Nothing is sharded here.
"""
import argparse
import json
import time

import torch
import torch.nn.functional as F


def selected_branch(q, k, v, blocks, size):
    """q (T, groups, heads, D), k and v (T, groups, D), blocks (T, groups, n) with -1 for none."""
    out = []
    for t in range(q.shape[0]):
        row = []
        for g in range(q.shape[1]):
            keys, values = [], []
            for b in blocks[t, g]:
                b = b.item()  # the host waits for the device
                if b < 0:
                    continue
                end = min((b + 1) * size, t + 1)
                keys.append(k[b * size : end, g])
                values.append(v[b * size : end, g])
            kk, vv = torch.cat(keys), torch.cat(values)
            heads = q.shape[2]
            row.append(
                F.scaled_dot_product_attention(
                    q[t, g][None, :, None, :], kk[None, None].expand(1, heads, -1, -1), vv[None, None].expand(1, heads, -1, -1)
                )[0, :, 0]
            )
        out.append(torch.stack(row))
    return torch.stack(out)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=256, help="queries that are run, of --seq")
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--groups", type=int, default=2)
    p.add_argument("--heads", type=int, default=6, help="query heads a group")
    p.add_argument("--dim", type=int, default=64, help="of a head")
    p.add_argument("--selected", type=int, default=16)
    p.add_argument("--block", type=int, default=64)
    a = p.parse_args()
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = new(a.tokens, a.groups, a.heads, a.dim), new(a.tokens, a.groups, a.dim), new(a.tokens, a.groups, a.dim)
    blocks = torch.full((a.tokens, a.groups, a.selected), -1, device="cuda")
    for t in range(a.tokens):
        n = min(a.selected, t // a.block + 1)
        blocks[t, :, :n] = torch.arange(n, device="cuda")
    selected_branch(q[:8], k, v, blocks[:8], a.block).sum().backward()  # warm up
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = selected_branch(q, k, v, blocks, a.block)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    out.sum().backward()
    torch.cuda.synchronize()
    forward, backward = middle - start, time.perf_counter() - middle
    scale = a.layers * a.seq / a.tokens
    print(
        json.dumps(
            {
                "peer": "nsa_per_token",
                "config": vars(a),
                "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(),
                "forward_s": forward,
                "backward_s": backward,
                "step_s_extrapolated": (forward + backward) * scale,
                "tokens_per_sec_extrapolated": a.seq / ((forward + backward) * scale),
            }
        )
    )


if __name__ == "__main__":
    main()
