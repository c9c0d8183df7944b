#!/usr/bin/env python3
"""PyTorch's FSDP on the models and shapes of fsdp.cu, for the tables in NOTES.md: one JSON line out.

  torchrun --standalone --nproc_per_node=N peers/torch_fsdp.py --parallel fsdp2 --compile block
  ./bench --sweep depth --peer       runs it beside ./train, on the same shapes

Written for torch 2.11, CUDA 13, H100 and H200. Follows torchtitan practice: meta init, per-block
torch.compile *before* per-block fully_shard, MixedPrecisionPolicy(param bf16, reduce fp32 or bf16,
cast_forward_inputs=False), [norm, head] as one unit that is not resharded after forward, explicit
one-deep prefetch both ways, fused AdamW on fp32 shards, gc off, expandable segments, no NVLS.

FLOPs per token, forward + backward (PaLM style; recompute is NOT counted in MFU):
  matmul      6 * (L * (2*d*d + 2*d*kv*hd + mlp) + d*V)        mlp = 2*d*f (gelu) or 3*d*f (swiglu)
  attention   6 * L * d * T   causal counted as half   -> mfu_causal
             12 * L * d * T   causal not discounted    -> mfu_full   (torchtitan / PaLM convention)
  MFU = flops_per_token * tokens_per_second_per_gpu / peak,  peak = 989.5e12 unless --peak-tflops
  hfu_causal additionally counts the recomputed forward of --ckpt.
  mfu_simple_pytorch repeats the formula in lucasb-eyer/simple_pytorch main.py as written there (its
  MLP term lacks a factor d and its attention term ignores GQA), only to compare with its README table.

Notes
  * --arch simple is the simple_pytorch model: LayerNorm(affine), additive sin/cos positions, GQA
    without biases, 2-matrix tanh-GELU MLP with biases, untied head, vocab 32768, AdamW(3e-4), CE against
    the same tokens.  --arch llama is RMSNorm + RoPE + SwiGLU.  --arch rope is RMSNorm + RoPE + GELU MLP.
  * --parallel none/ddp have no bf16 gather, so they use autocast (default) or --amp pure (bf16 weights).
    The cleanest one-GPU baseline for an FSDP comparison is --parallel fsdp2 with --nproc_per_node=1.
  * --parallel simple is a small property-based SimpleFSDP (whole-graph compile); experimental.
  * If --sdpa-backend cudnn finds no kernel for grouped heads, add --gqa repeat.
"""

import os
import sys

# NVLink multicast stays off, as in fsdp.cu (lib/comm/world.cc says why): set before NCCL or torch start.
for _k, _v in (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
):
    os.environ[_k] = _v
if "--no-expandable-segments" not in sys.argv:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import contextlib
import gc
import json
import math
import statistics
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# --------------------------------------------------------------------------------------- arguments
def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # model (defaults: the simple_pytorch reference shape)
    p.add_argument("--arch", choices=["simple", "rope", "llama"], default="simple")
    p.add_argument("--dim", type=int, default=4096)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--heads", type=int, default=0, help="query heads; 0 = dim / 128")
    p.add_argument("--kv-heads", type=int, default=0, help="0 = heads / 4")
    p.add_argument("--vocab", type=int, default=32768)
    p.add_argument("--mlp-mult", type=float, default=4.0, help="hidden = round(mult * dim, 128)")
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--bs", type=int, default=8, help="sequences per GPU per microbatch")
    p.add_argument("--ce", choices=["model", "fp32"], default="model", help="dtype of the logits in the loss")
    p.add_argument("--target", choices=["same", "next"], default="same", help="same = simple_pytorch")
    p.add_argument("--zero-head", action="store_true", help="zero-init the head, as simple_pytorch does")
    # kernels
    p.add_argument("--attn", choices=["sdpa", "flex"], default="sdpa")
    p.add_argument("--sdpa-backend", choices=["auto", "flash", "cudnn"], default="auto")
    p.add_argument("--gqa", choices=["native", "repeat"], default="native")
    p.add_argument("--ckpt", choices=["none", "mlp", "attn", "both", "block"], default="none")
    p.add_argument("--compile", choices=["none", "fwdbwd", "model", "block"], default="block")
    p.add_argument("--compile-mode", default=None, help="e.g. max-autotune-no-cudagraphs")
    p.add_argument("--allow-breaks", action="store_true", help="block compile without fullgraph=True")
    # parallelism
    p.add_argument("--parallel", choices=["none", "ddp", "fsdp2", "fsdp1", "simple"], default="fsdp2")
    p.add_argument("--wrap", choices=["titan", "block", "root"], default="titan")
    p.add_argument("--param-dtype", choices=list(DTYPES), default="bf16")
    p.add_argument("--reduce-dtype", choices=list(DTYPES), default="fp32")
    p.add_argument("--reshard-after-forward", type=int, choices=[0, 1], default=1)
    p.add_argument("--hsdp-replicate", type=int, default=1, help="replicas for HSDP (fsdp2 only)")
    p.add_argument("--prefetch", type=int, default=1, help="explicit prefetch depth; 0 = implicit only")
    p.add_argument("--emb-bwd-gather", type=int, choices=[0, 1], default=1, help="fsdp2 titan wrap: 1 = as torchtitan")
    p.add_argument("--amp", choices=["autocast", "pure"], default="autocast", help="none/ddp only")
    p.add_argument("--bucket-cap-mb", type=float, default=25.0, help="ddp only")
    p.add_argument("--min-shard-mib", type=float, default=1.0, help="simple only: replicate smaller params")
    p.add_argument("--grad-accum", type=int, default=1)
    p.add_argument("--accum-no-sync", action="store_true", help="fsdp2: keep unsharded grads until the last microbatch")
    # optimizer and run
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--steps", type=int, default=20, help="steady steps that are timed")
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--peak-tflops", type=float, default=989.5)
    p.add_argument("--no-expandable-segments", action="store_true")
    p.add_argument("--profile", default="", help="write a chrome trace of 3 steps to this path (rank 0)")
    p.add_argument("--tag", default="")
    a = p.parse_args()
    a.heads = a.heads or a.dim // 128
    a.kv_heads = a.kv_heads or max(1, a.heads // 4)
    a.hidden = max(128, int(round(a.mlp_mult * a.dim / 128)) * 128)
    if a.dim % a.heads or a.heads % a.kv_heads:
        p.error("dim must divide by heads, heads by kv-heads")
    if a.parallel != "fsdp2" and a.hsdp_replicate != 1:
        p.error("--hsdp-replicate needs --parallel fsdp2")
    if a.parallel == "none" and int(os.environ.get("WORLD_SIZE", "1")) != 1:
        p.error("--parallel none is for one process")
    if a.warmup < 1 or a.steps < 1 or a.grad_accum < 1:
        p.error("--warmup, --steps and --grad-accum must be at least 1")
    return a


# ------------------------------------------------------------------------------------------- model
_flex = None


def prepare_flex():
    """Compile flex_attention on its own, so that it also runs fused inside a checkpointed region."""
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention)


def rotate(x, cos, sin):
    """Half-split rotary embedding on (B, T, H, hd), computed in fp32."""
    x1, x2 = x.float().chunk(2, dim=-1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.h, self.kv, self.hd = a.heads, a.kv_heads, a.dim // a.heads
        self.kind, self.repeat, self.rope = a.attn, a.gqa == "repeat", a.arch != "simple"
        if self.kind == "flex":
            prepare_flex()
        self.q = nn.Linear(a.dim, a.dim, bias=False)
        self.k = nn.Linear(a.dim, self.kv * self.hd, bias=False)
        self.v = nn.Linear(a.dim, self.kv * self.hd, bias=False)
        self.o = nn.Linear(a.dim, a.dim, bias=False)

    def forward(self, x, cos, sin, mask):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.h, self.hd)
        k = self.k(x).view(b, t, self.kv, self.hd)
        v = self.v(x).view(b, t, self.kv, self.hd)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.h != self.kv
        if grouped and self.repeat:
            k = k.repeat_interleave(self.h // self.kv, dim=1)
            v = v.repeat_interleave(self.h // self.kv, dim=1)
            grouped = False
        if self.kind == "flex":
            y = _flex(q, k, v, block_mask=mask, enable_gqa=grouped)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class GeluMLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.l1 = nn.Linear(a.dim, a.hidden, bias=a.arch == "simple")
        self.l2 = nn.Linear(a.hidden, a.dim, bias=a.arch == "simple")

    def forward(self, x):
        return self.l2(F.gelu(self.l1(x), approximate="tanh"))


class SwigluMLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.w1 = nn.Linear(a.dim, a.hidden, bias=False)
        self.w3 = nn.Linear(a.dim, a.hidden, bias=False)
        self.w2 = nn.Linear(a.hidden, a.dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def make_norm(a):
    return nn.LayerNorm(a.dim) if a.arch == "simple" else nn.RMSNorm(a.dim, eps=1e-5)


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.att_norm, self.mlp_norm = make_norm(a), make_norm(a)
        self.att = Attention(a)
        self.mlp = SwigluMLP(a) if a.arch == "llama" else GeluMLP(a)
        self.ckpt = a.ckpt

    def _att(self, x, cos, sin, mask):
        return self.att(self.att_norm(x), cos, sin, mask)

    def _mlp(self, x):
        return self.mlp(self.mlp_norm(x))

    def _body(self, x, cos, sin, mask):
        if self.ckpt in ("attn", "both"):
            x = x + checkpoint(self._att, x, cos, sin, mask, use_reentrant=False)
        else:
            x = x + self._att(x, cos, sin, mask)
        if self.ckpt in ("mlp", "both"):
            x = x + checkpoint(self._mlp, x, use_reentrant=False)
        else:
            x = x + self._mlp(x)
        return x

    def forward(self, x, cos, sin, mask):
        if self.ckpt == "block":
            return checkpoint(self._body, x, cos, sin, mask, use_reentrant=False)
        return self._body(x, cos, sin, mask)


class Transformer(nn.Module):
    def __init__(self, a, act_dtype):
        super().__init__()
        self.emb = nn.Embedding(a.vocab, a.dim)
        self.blocks = nn.ModuleList([Block(a) for _ in range(a.depth)])
        self.norm = make_norm(a)
        self.head = nn.Linear(a.dim, a.vocab, bias=False)
        self.act_dtype = act_dtype
        self.dim = a.dim

    def forward(self, tokens, pe, cos, sin, mask):
        x = self.emb(tokens).to(self.act_dtype)
        if pe is not None:
            x = x + pe
        for blk in self.blocks:
            x = blk(x, cos, sin, mask)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self, zero_head=False):
        for name, p in raw_named_parameters(self):
            leaf = name.rsplit(".", 1)[-1]
            if p.ndim == 1:
                (nn.init.ones_ if leaf == "weight" else nn.init.zeros_)(p)
            elif name.startswith("head"):
                if zero_head:
                    nn.init.zeros_(p)
                else:
                    nn.init.trunc_normal_(p, std=1.0 / math.sqrt(self.dim))
            else:
                nn.init.trunc_normal_(p, std=0.02)


def raw_named_parameters(module):
    """named_parameters without attribute access (so --parallel simple does not gather)."""
    for prefix, mod in module.named_modules():
        for name, p in mod._parameters.items():
            if p is not None:
                yield (prefix + "." if prefix else "") + name, p


def position_inputs(a, device, dtype):
    """(pe, cos, sin, mask): plain tensors, outside the module, so meta init cannot lose them."""
    t = torch.arange(a.seq, dtype=torch.float32, device=device)
    pe = cos = sin = mask = None
    if a.arch == "simple":
        freq = 10000.0 ** (-torch.arange(0, a.dim, 2, dtype=torch.float32, device=device) / a.dim)
        ang = t[:, None] * freq[None, :]
        pe = torch.stack((ang.sin(), ang.cos()), dim=-1).reshape(a.seq, a.dim).to(dtype)
    else:
        hd = a.dim // a.heads
        freq = 500000.0 ** (-torch.arange(0, hd, 2, dtype=torch.float32, device=device) / hd)
        ang = t[:, None] * freq[None, :]
        cos, sin = ang.cos(), ang.sin()
    if a.attn == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, a.seq, a.seq, device=device)
    return pe, cos, sin, mask


# ------------------------------------------------------------------------------------------- flops
def flops(a):
    d, hd, tok = a.dim, a.dim // a.heads, a.bs * a.seq
    p_att = 2 * d * d + 2 * d * a.kv_heads * hd
    p_mlp = (3 if a.arch == "llama" else 2) * d * a.hidden
    p_head = d * a.vocab
    mm = 6 * (a.depth * (p_att + p_mlp) + p_head)
    att_half = 6 * a.depth * d * a.seq
    re = 0.0  # recomputed forward flops per token, attention counted causal
    if a.ckpt in ("attn", "both", "block"):
        re += a.depth * (2 * p_att + 2 * d * a.seq)
    if a.ckpt in ("mlp", "both", "block"):
        re += a.depth * 2 * p_mlp
    # As written in simple_pytorch main.py (bug kept on purpose), per example.
    g = a.hidden / d
    sp = a.depth * (24 * d * d * a.seq + 6 * d * a.seq * a.seq + 12 * d * g * a.seq) + 6 * a.seq * d * a.vocab
    return {
        "causal": float(mm + att_half) * tok,
        "full": float(mm + 2 * att_half) * tok,
        "hw_causal": float(mm + att_half + re) * tok,
        "simple_pytorch": float(sp) * a.bs,
        "params_matmul": a.depth * (p_att + p_mlp) + p_head,
    }


# ------------------------------------------------------------------------------------- parallelism
def maybe_compile_blocks(a, model):
    """torch.compile each block as its own module; the FSDP hooks then stay outside the graph."""
    if a.compile == "block":
        for i, blk in enumerate(list(model.blocks)):
            model.blocks[i] = torch.compile(blk, mode=a.compile_mode, dynamic=False, fullgraph=not a.allow_breaks)


def build_fsdp2(a, device, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if a.hsdp_replicate > 1:
        mesh = init_device_mesh(
            "cuda", (a.hsdp_replicate, world // a.hsdp_replicate), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    else:
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = Transformer(a, DTYPES[a.param_dtype])
    maybe_compile_blocks(a, model)  # before fully_shard
    mp = MixedPrecisionPolicy(
        param_dtype=DTYPES[a.param_dtype], reduce_dtype=DTYPES[a.reduce_dtype], cast_forward_inputs=False
    )
    kw = dict(mesh=mesh, mp_policy=mp)
    raf = bool(a.reshard_after_forward)
    if a.wrap == "titan":
        fully_shard(model.emb, reshard_after_forward=raf, **kw)
        fully_shard([model.norm, model.head], reshard_after_forward=False, **kw)
    if a.wrap in ("titan", "block"):
        for blk in model.blocks:
            fully_shard(blk, reshard_after_forward=raf, **kw)
    fully_shard(model, **(kw if a.wrap != "root" else dict(kw, reshard_after_forward=raf)))
    model.to_empty(device=device)
    model.init_weights(a.zero_head)
    if a.prefetch > 0 and a.wrap == "titan":
        n, blks = a.prefetch, list(model.blocks)
        order = [model.emb, *blks, model.head]
        for i, m in enumerate(order[:-1]):
            m.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + n])
        if a.emb_bwd_gather:
            back = order[::-1]
        else:  # an embedding's backward needs no weight: skip that all-gather
            model.emb.set_unshard_in_backward(False)
            back = order[:0:-1]
        for i, m in enumerate(back[:-1]):
            m.set_modules_to_backward_prefetch(back[i + 1 : i + 1 + n])
    return model


def build_fsdp1(a, device):
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with device:
        model = Transformer(a, DTYPES[a.param_dtype])
    model.init_weights(a.zero_head)  # every rank uses the same seed
    maybe_compile_blocks(a, model)
    return FSDP(
        model,
        auto_wrap_policy=None if a.wrap == "root" else ModuleWrapPolicy({type(model.blocks[0])}),
        sharding_strategy=ShardingStrategy.FULL_SHARD if a.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(
            param_dtype=DTYPES[a.param_dtype],
            reduce_dtype=DTYPES[a.reduce_dtype],
            buffer_dtype=DTYPES[a.param_dtype],
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=a.prefetch > 0,
        limit_all_gathers=True,
        use_orig_params=True,
        device_id=device,
    )


def build_simple(a, device, world):
    """A small SimpleFSDP: sharded DTensor parameters behind gathering properties. Experimental."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Transformer(a, DTYPES[a.param_dtype])
    fwd, bwd = DTYPES[a.param_dtype], DTYPES[a.reduce_dtype]

    def getter(name):
        def get(self):
            p = self._parameters[name]
            full = p.redistribute(placements=[Replicate()], forward_dtype=fwd, backward_dtype=bwd)
            return full.to_local(grad_placements=[Partial("avg")])

        return property(get)

    classes = {}
    for mod in list(model.modules()):
        names = [n for n, p in mod._parameters.items() if p is not None]
        for n in names:
            p = mod._parameters[n]
            small = p.numel() * p.element_size() < a.min_shard_mib * 2**20
            d = distribute_tensor(p.detach(), mesh, [Replicate() if small else Shard(0)])
            mod._parameters[n] = nn.Parameter(d)
        if names:
            key = (type(mod), tuple(names))
            if key not in classes:
                classes[key] = type("Sharded" + type(mod).__name__, (type(mod),), {n: getter(n) for n in names})
            mod.__class__ = classes[key]
    model.to_empty(device=device)
    model.init_weights(a.zero_head)
    maybe_compile_blocks(a, model)
    return model


def build_plain(a, device, local_rank):
    pure = a.amp == "pure"
    with device:
        model = Transformer(a, DTYPES[a.param_dtype])
    model.init_weights(a.zero_head)
    if pure:
        model.to(DTYPES[a.param_dtype])
    maybe_compile_blocks(a, model)
    if a.parallel == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel as DDP

        model = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True, bucket_cap_mb=a.bucket_cap_mb)
        if a.reduce_dtype == "bf16" and not pure:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model


# --------------------------------------------------------------------------------------------- run
def run(a, rank, local_rank, world):
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    if a.sdpa_backend != "auto":
        torch.backends.cuda.enable_flash_sdp(a.sdpa_backend == "flash")
        torch.backends.cuda.enable_cudnn_sdp(a.sdpa_backend == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    torch.manual_seed(a.seed)

    if a.parallel == "fsdp2":
        model = build_fsdp2(a, device, world)
    elif a.parallel == "fsdp1":
        model = build_fsdp1(a, device)
    elif a.parallel == "simple":
        model = build_simple(a, device, world)
    else:
        model = build_plain(a, device, local_rank)
    with torch.device("meta"):
        n_params = sum(p.numel() for p in Transformer(a, torch.bfloat16).parameters())

    params = [p for _, p in raw_named_parameters(model)] if a.parallel == "simple" else list(model.parameters())
    opt = torch.optim.AdamW(params, lr=a.lr, fused=True)

    pos = position_inputs(a, device, DTYPES[a.param_dtype])
    gen = torch.Generator(device=device).manual_seed(a.seed + 1 + rank)
    micro = []
    for _ in range(a.grad_accum):  # one fixed batch per rank and microbatch, made outside the timing
        ids = torch.randint(0, a.vocab, (a.bs, a.seq + 1), device=device, generator=gen)
        x = ids[:, :-1].contiguous()
        micro.append((x, x if a.target == "same" else ids[:, 1:].contiguous()))

    use_autocast = a.parallel in ("none", "ddp") and a.amp == "autocast" and a.param_dtype == "bf16"

    def amp():
        return torch.autocast("cuda", dtype=torch.bfloat16) if use_autocast else contextlib.nullcontext()

    def ce(logits, y):
        if a.ce == "fp32":
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, a.vocab), y.view(-1)) / a.grad_accum

    net = model
    if a.compile == "model":
        net = torch.compile(model, mode=a.compile_mode, dynamic=False)
    if a.compile in ("model", "block"):
        ce = torch.compile(ce, dynamic=False)

    def fwd(x, y):
        with amp():
            logits = net(x, *pos)
        return ce(logits, y)

    def bwd(loss, last):
        loss.backward()
        if last and a.clip == 0:
            opt.step()
        return loss

    if a.compile == "fwdbwd":
        fwd = torch.compile(fwd, mode=a.compile_mode, dynamic=False)
        bwd = torch.compile(bwd, mode=a.compile_mode, dynamic=False)

    def train_step():
        opt.zero_grad(set_to_none=True)
        total = None
        for i, (x, y) in enumerate(micro):
            last = i == a.grad_accum - 1
            ctx = contextlib.nullcontext()
            if a.parallel == "ddp" and not last:
                ctx = model.no_sync()
            elif a.parallel == "fsdp2" and a.grad_accum > 1:
                if a.accum_no_sync:
                    model.set_requires_gradient_sync(last)
                    model.set_is_last_backward(last)
                if not a.reshard_after_forward:  # keep gathered weights between microbatches
                    model.set_reshard_after_backward(last)
            with ctx:
                loss = fwd(x, y)
                bwd(loss, last)
            d = loss.detach()
            total = d if total is None else total + d
        if a.clip > 0:
            if a.parallel == "fsdp1":
                model.clip_grad_norm_(a.clip)
            else:
                torch.nn.utils.clip_grad_norm_(params, a.clip, foreach=True)
            opt.step()
        return total

    gc.collect()
    gc.disable()
    t0 = time.perf_counter()
    first = None
    for i in range(a.warmup):
        out = train_step()
        if i == 0:
            first = out
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - t0
    dist.barrier()
    torch.cuda.synchronize()

    if a.profile:
        acts = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=acts) if rank == 0 else contextlib.nullcontext() as prof:
            for _ in range(3):
                train_step()
            torch.cuda.synchronize()
        if rank == 0:
            prof.export_chrome_trace(a.profile)
    dist.barrier()
    torch.cuda.synchronize()

    # Steady window: CUDA events only, no host synchronisation inside.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(a.steps + 1)]
    peaks, reserved = [], []
    t0 = time.perf_counter()
    events[0].record()
    for i in range(a.steps):
        torch.cuda.reset_peak_memory_stats()  # host-side counters: no sync
        out = train_step()
        events[i + 1].record()
        peaks.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
    torch.cuda.synchronize()
    wall = (time.perf_counter() - t0) / a.steps * 1e3
    times = [events[i].elapsed_time(events[i + 1]) for i in range(a.steps)]

    free, total_mem = torch.cuda.mem_get_info()
    stat = torch.tensor(
        [
            statistics.median(times),
            max(peaks),
            statistics.median(peaks),
            max(reserved),
            total_mem - free,
            wall,
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(stat, op=dist.ReduceOp.MAX)  # slowest rank, largest memory
    losses = torch.stack([first.float(), out.float()])
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    ms = stat[0].item()
    mib = 2.0**20

    fl = flops(a)
    sec = ms / 1e3
    peak = a.peak_tflops * 1e12

    def util(k):
        return round(fl[k] * a.grad_accum / sec / peak * 100, 2)

    tokens = a.bs * a.seq * a.grad_accum
    breaks = sum(torch._dynamo.utils.counters.get("graph_break", {}).values())
    res = {
        "ok": True,
        "tag": a.tag,
        "gpus": world,
        "step_ms": round(ms, 3),
        "step_ms_min": round(min(times), 3),
        "step_ms_max": round(max(times), 3),
        "step_ms_wall_mean": round(stat[5].item(), 3),
        "tok_s": round(tokens * world / sec, 1),
        "tok_s_gpu": round(tokens / sec, 1),
        "peak_alloc_mib": round(stat[1].item() / mib, 1),
        "peak_alloc_median_mib": round(stat[2].item() / mib, 1),
        "reserved_mib": round(stat[3].item() / mib, 1),
        "device_used_mib": round(stat[4].item() / mib, 1),
        "mfu_causal": util("causal"),
        "mfu_full": util("full"),
        "hfu_causal": util("hw_causal"),
        "mfu_simple_pytorch": util("simple_pytorch"),
        "tflops_causal": round(fl["causal"] * a.grad_accum / sec / 1e12, 1),
        "peak_tflops": a.peak_tflops,
        "mfu_formula": "6*Nmm + 6*L*d*T (causal half; full doubles the second term), recompute not counted",
        "loss_first": round(losses[0].item(), 5),
        "loss_last": round(losses[1].item(), 5),
        "params": n_params,
        "params_matmul": fl["params_matmul"],
        "graph_breaks": breaks,
        "warmup_s": round(warm_s, 1),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu": torch.cuda.get_device_name(),
        "args": {k: v for k, v in vars(a).items() if k not in ("tag", "profile")},
    }
    if rank == 0:
        print(json.dumps(res), flush=True)


def main():
    a = parse_args()
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    try:
        run(a, rank, local_rank, world)
    except torch.OutOfMemoryError as e:
        # One line per failing rank; leave hard so that torchrun ends the others.
        print(json.dumps({"ok": False, "error": "OOM", "rank": rank, "tag": a.tag, "detail": str(e)[:300],
                          "args": vars(a)}), flush=True)
        os._exit(3)
    except Exception as e:
        traceback.print_exc()
        print(json.dumps({"ok": False, "error": type(e).__name__, "rank": rank, "tag": a.tag,
                          "detail": str(e)[:300], "args": vars(a)}), flush=True)
        os._exit(4)
    torch._dynamo.reset()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
