#!/usr/bin/env python3
"""What Native Sparse Attention costs when its selected branch is a loop over queries: training steps, one JSON line.

  python3 peers/nsa_per_token.py                                                    one GPU, nothing sharded
  torchrun --standalone --nproc_per_node=2 peers/nsa_per_token.py                   FSDP2, parameters sharded
  torchrun --standalone --nproc_per_node=2 peers/nsa_per_token.py --device cpu --seq 128

The model is ./train's preset m7c (dim 768, 12 heads in 2 groups of 64, bytes, 2048 tokens) of --depth blocks; one by
default, since a step of one takes minutes. For each query and group the indices of the selected blocks are read back
on the host, which waits for the device at each; their keys and values are sliced, put together and given to a small
attention call; autograd keeps a node for each of these. Several readable implementations do so. The other two branches
are plain PyTorch. Sharded, each block is a unit of FSDP2, gathered in bf16 and resharded after the forward; not
sharded, the parameters are bf16 themselves.

host_only is the same loop of one layer on CPU tensors whose heads have one value, so that there is next to nothing to
compute: what the host does when it launches nothing and waits for nothing.
"""

import argparse
import json
import math
import os
import platform
import sys
import threading
import time

from libraries import require

require("numpy", "torch")

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from corpus import Sampler, open_corpus
from model import rotate

DIM, HEADS, GROUPS, HEAD_DIM, VOCAB = 768, 12, 2, 64, 256
BLOCK, STRIDE, SELECT_BLOCK, SELECTED, WINDOW = 32, 16, 64, 16, 512
PER_GROUP = HEADS // GROUPS
BRANCHES = ("compressed", "selected", "window")


# ---------------------------------------------------------------------------------------------------------- attention
def selected_branch(q, k, v, blocks):
    """The loop. q (T, HEADS, D), k and v (T, GROUPS, D), blocks (T, GROUPS, n), -1 for none -> (T, HEADS, D)."""
    out = []
    for t in range(q.shape[0]):
        row = []
        for g in range(GROUPS):
            keys, values = [], []
            for b in blocks[t, g]:
                b = b.item()  # the host waits for the device
                if b < 0:
                    continue
                end = min((b + 1) * SELECT_BLOCK, t + 1)
                keys.append(k[b * SELECT_BLOCK : end, g])
                values.append(v[b * SELECT_BLOCK : end, g])
            kk, vv = torch.cat(keys), torch.cat(values)
            queries = q[t, g * PER_GROUP : (g + 1) * PER_GROUP][None, :, None]  # (1, PER_GROUP, 1, D)
            shared = (x[None, None].expand(1, PER_GROUP, -1, -1) for x in (kk, vv))
            row.append(F.scaled_dot_product_attention(queries, *shared)[0, :, 0])
        out.append(torch.cat(row))
    return torch.stack(out)


def grouped(x):
    """(B, T, GROUPS, D) -> (B, HEADS, T, D)"""
    return x.transpose(1, 2).repeat_interleave(PER_GROUP, dim=1)


def compress(x):
    """Means of BLOCK tokens, one every STRIDE: (B, T, GROUPS, D) -> (B, blocks, GROUPS, D)."""
    return x.unfold(1, BLOCK, STRIDE).mean(-1)


def compressed_branch(q, k, v):
    """-> output (B, T, HEADS, D), weights (B, HEADS, T, blocks): 0 for blocks that do not end before a query does."""
    t = torch.arange(q.shape[1], device=q.device)
    ends = torch.arange((q.shape[1] - BLOCK) // STRIDE + 1, device=q.device) * STRIDE + BLOCK - 1
    hidden = ends[None, :] > t[:, None]
    scores = q.transpose(1, 2) @ grouped(compress(k)).transpose(-1, -2) / math.sqrt(HEAD_DIM)
    weights = scores.float().masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0).to(v.dtype)
    return (weights @ grouped(compress(v))).transpose(1, 2), weights


@torch.no_grad()
def select(weights, length):
    """weights (B, HEADS, T, blocks) -> indices (B, T, GROUPS, SELECTED), ascending, -1 for none.

    The first block, the query's own and the one before it are always selected; the rest by the sum of their compressed
    weights over the heads of a group.
    """
    B, _, T, compressed = weights.shape
    last = -(-length // SELECT_BLOCK)
    start = torch.arange(compressed, device=weights.device) * STRIDE
    share = torch.zeros(compressed, last, device=weights.device)
    for offset in range(0, BLOCK, STRIDE):  # a compressed block counts for where its strides lie
        share[torch.arange(compressed), ((start + offset) // SELECT_BLOCK).clamp(max=last - 1)] += 1
    scores = (weights.float() @ share).view(B, GROUPS, PER_GROUP, T, last).sum(2)
    own = torch.arange(T, device=weights.device)[:, None] // SELECT_BLOCK
    block = torch.arange(last, device=weights.device)[None, :]
    always = (block == 0) | (block == own) | (block == own - 1)
    scores = scores.masked_fill(always, float("inf")).masked_fill(block > own, -1.0)
    best = scores.topk(min(SELECTED, last), dim=-1)
    indices = best.indices.masked_fill(best.values < 0, last).sort(-1).values
    return indices.masked_fill(indices == last, -1).transpose(1, 2)


def window_branch(q, k, v):
    t = torch.arange(q.shape[1], device=q.device)
    seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - WINDOW)
    return F.scaled_dot_product_attention(q.transpose(1, 2), grouped(k), grouped(v), attn_mask=seen).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (
            nn.ModuleDict({b: nn.Linear(DIM, GROUPS * HEAD_DIM, bias=False) for b in BRANCHES}) for _ in range(2)
        )
        self.gate = nn.Linear(DIM, 3 * HEADS)

    def forward(self, x, cos, sin):
        n = self.norm(x)
        q = rotate(self.q(n).unflatten(-1, (HEADS, HEAD_DIM)), cos, sin)
        k = {b: rotate(self.k[b](n).unflatten(-1, (GROUPS, HEAD_DIM)), cos, sin) for b in BRANCHES}
        v = {b: self.v[b](n).unflatten(-1, (GROUPS, HEAD_DIM)) for b in BRANCHES}
        compressed, weights = compressed_branch(q, k["compressed"], v["compressed"])
        blocks = select(weights, x.shape[1])
        selected = torch.stack(
            [selected_branch(q[i], k["selected"][i], v["selected"][i], blocks[i]) for i in range(len(x))]
        )
        window = window_branch(q, k["window"], v["window"])
        gates = self.gate(n).sigmoid().unflatten(-1, (3, HEADS))[..., None]
        mixed = sum(gates[:, :, i] * o for i, o in enumerate((compressed, selected, window)))
        return x + self.o(mixed.reshape(x.shape))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.attention, self.mlp, self.recompute = Attention(), MLP(), recompute

    def run(self, x, cos, sin):
        return self.mlp(self.attention(x, cos, sin))

    def forward(self, x, cos, sin):
        if self.recompute:
            return checkpoint(self.run, x, cos, sin, use_reentrant=False)
        return self.run(x, cos, sin)


class Model(nn.Module):
    def __init__(self, depth, recompute):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.block = nn.ModuleList([Block(recompute) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=math.sqrt(2 / (5 * DIM)))
        for b in self.block:
            nn.init.zeros_(b.attention.gate.bias)

    def forward(self, tokens):
        t = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)[:, None]
        exponents = torch.arange(0, HEAD_DIM, 2, device=tokens.device, dtype=torch.float32) / HEAD_DIM
        angle = t * 500000.0**-exponents
        x = self.embedding(tokens)
        for block in self.block:
            x = block(x, angle.cos(), angle.sin())
        return self.head(self.norm(x))


def shard(model, mesh, dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how = dict(
        mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    )
    for block in model.block:
        fully_shard(block, reshard_after_forward=True, **how)
    fully_shard(model, **how)


# -------------------------------------------------------------------------------------------------------- measurement
class Utilization:
    """NVML's share of time in which a kernel ran, sampled while the body runs; None without pynvml."""

    def __init__(self, gpu):
        self.samples, self.over, self.handle = [], threading.Event(), None
        if not gpu:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as e:  # no pynvml, or a container without NVML: the figure is left out
            print(f"no utilisation: {type(e).__name__}: {e}", file=sys.stderr)

    def sample(self):
        while not self.over.wait(0.25):
            self.samples.append(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100)

    def __enter__(self):
        self.thread = threading.Thread(target=self.sample, daemon=True) if self.handle else None
        if self.thread:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        if self.thread:
            self.thread.join()

    def mean(self):
        return sum(self.samples) / len(self.samples) if self.samples else None


class Stopwatch:
    def __init__(self, gpu):
        self.gpu = gpu
        self.lap()

    def lap(self):
        if self.gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        passed, self.at = now - getattr(self, "at", now), now
        return passed


def run_step(model, optimizer, tokens, targets, gpu):
    watch = Stopwatch(gpu)
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
    forward = watch.lap()
    loss.backward()
    backward = watch.lap()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    update = watch.lap()
    return {
        "forward_s": forward,
        "backward_s": backward,
        "optimizer_s": update,
        "step_s": forward + backward + update,
        "loss": loss.item(),
    }


def host_only(seq):
    """The selected branch of one layer and sequence, without a device."""
    new = lambda heads: torch.randn(seq, heads, 1, requires_grad=True)
    blocks = torch.full((seq, GROUPS, SELECTED), -1)
    for t in range(seq):  # the first ones and its own: as many as a query of its place selects
        own = t // SELECT_BLOCK
        n = min(SELECTED, own + 1)
        blocks[t, :, :n] = torch.arange(n)
        blocks[t, :, n - 1] = own
    watch = Stopwatch(False)
    out = selected_branch(new(HEADS), new(GROUPS), new(GROUPS), blocks)
    forward = watch.lap()
    out.sum().backward()
    return {"queries": seq, "layers": 1, "forward_s": forward, "backward_s": watch.lap()}


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--depth", type=int, default=1, help="blocks; m7c has 12")
    p.add_argument("--seq", type=int, default=2048, help="tokens of a sequence, at least 64")
    p.add_argument("--batch", type=int, default=1, help="sequences per rank")
    p.add_argument("--recompute", choices=["none", "block"], default="none")
    p.add_argument("--shard", choices=["full", "none"], help="default: full on several ranks, none on one")
    p.add_argument("--steps", type=int, default=1)
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no further step after so long")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=["gpu", "cpu"], default="gpu" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    a.shard = a.shard or ("full" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "none")
    if a.seq < SELECT_BLOCK or min(a.depth, a.batch, a.steps) < 1:
        p.error(f"--seq must be at least {SELECT_BLOCK}; --depth, --batch and --steps at least 1")
    if a.shard == "none" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        p.error("--shard none is for one process")
    return a


def make(a, device, world):
    torch.manual_seed(a.seed)
    dtype = torch.bfloat16 if a.device == "gpu" else torch.float32
    with device:
        model = Model(a.depth, a.recompute == "block")
    if a.shard == "full":
        shard(model, dist.init_device_mesh(device.type, (world,)), dtype)
    else:
        model.to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01, fused=True)


def more_steps(done, a, begin, device, world):
    """Rank 0 decides, for all."""
    more = torch.tensor([float(done < a.steps and time.perf_counter() - begin < a.seconds)], device=device)
    if world > 1:
        dist.broadcast(more, 0)
    return more.item() > 0


def slowest(steps, world):
    """The steps of the rank whose steps took longest."""
    everyone = [steps]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, steps)
    return max(everyone, key=lambda s: sum(x["step_s"] for x in s))


def main():
    a = parse()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu = a.device == "gpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # as in fsdp.cu (lib/comm/world.cc says why)
    if a.shard == "full":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29556")
        dist.init_process_group(
            "nccl" if gpu else "gloo", rank=rank, world_size=world, **({"device_id": device} if gpu else {})
        )
    model, optimizer = make(a, device, world)
    sampler = Sampler(open_corpus("", VOCAB, a.seq, a.seed), a.seq, a.seed)

    def batch(step):
        tokens, targets = sampler.batch(step, rank, world, 1, a.batch)
        return torch.from_numpy(tokens[0]).to(device), torch.from_numpy(targets[0]).to(device)

    tokens, targets = batch(1)  # a short sequence loads kernels and connects ranks
    run_step(model, optimizer, tokens[:, :SELECT_BLOCK], targets[:, :SELECT_BLOCK], gpu)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    steps, begin = [], time.perf_counter()
    with Utilization(gpu) as utilization:
        while more_steps(len(steps), a, begin, device, world):
            steps.append(run_step(model, optimizer, *batch(len(steps) + 1), gpu))
    steps = slowest(steps, world)
    if rank == 0:
        last = steps[-1]
        print(
            json.dumps(
                {
                    "ok": True,
                    "who": "PyTorch",
                    "peer": "nsa_per_token",
                    "result": {
                        **last,
                        "tokens_per_sec": a.batch * a.seq * world / last["step_s"],
                        "gpu_utilization": utilization.mean(),
                        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if gpu else None,
                    },
                    "steps": steps,
                    "sharded": a.shard == "full",
                    "ranks": world,
                    "config": {
                        **vars(a),
                        "seconds": a.seconds if math.isfinite(a.seconds) else None,
                        "dim": DIM,
                        "heads": HEADS,
                        "kv_heads": GROUPS,
                        "nsa_block": BLOCK,
                        "nsa_stride": STRIDE,
                        "nsa_select_block": SELECT_BLOCK,
                        "nsa_selected": SELECTED,
                        "nsa_window": WINDOW,
                    },
                    "params": sum(p.numel() for p in model.parameters()),
                    "host_only": host_only(a.seq),
                    "versions": {
                        "torch": torch.__version__,
                        "cuda": torch.version.cuda,
                        "python": platform.python_version(),
                    },
                    "hardware": {
                        "name": torch.cuda.get_device_name() if gpu else platform.machine(),
                        "gpus": world if gpu else 0,
                    },
                }
            ),
            flush=True,
        )
    if a.shard == "full":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
