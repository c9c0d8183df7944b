"""The models of model.h in PyTorch: the same parameters, initial weights and arithmetic; the same count of FLOPs.

parameter_table() is the one place for names, shapes and initial weights; it follows all_parameters() in model/config.cu, whose
order numbers the parameters for the generator. Attention is dense. q, k and v are three layers, as people write them.
"""

import functools
import math
import re
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Param(NamedTuple):
    name: str
    shape: tuple
    mean: float
    std: float
    module: int  # in the order of the forward pass: embedding, (attention, MLP) of each block, head
    id: int
    joined: bool  # to the one before: ./train makes them in one product, and replicates them together

    @property
    def numel(self):
        return math.prod(self.shape)


def head_module(a):
    return a.depth * (1 if a.arch == "mlp" else 2) + 1


def parameter_table(a):
    params = []
    small = math.sqrt(2 / (5 * a.dim))
    into_stream = small / math.sqrt(2 * a.depth)
    biases, layer_norm = a.arch == "simple", a.arch in ("simple", "mlp")
    module = 0

    def add(name, shape, mean, std, joined=False):
        params.append(Param(name, shape, mean, std, module, len(params), joined))

    def norm(name):
        add(name, (a.dim,), 1.0, 0.0)
        if layer_norm:
            add(name + ".bias", (a.dim,), 0.0, 0.0)

    add("embedding.weight", (a.vocab, a.dim), 0.0, 1.0 if layer_norm and not a.tie_embeddings else small)
    for i in range(a.depth):
        block = f"block.{i}."
        if a.arch != "mlp":
            module += 1
            add(block + "attention.q", (a.heads * a.head_dim, a.dim), 0.0, small)
            add(block + "attention.k", (a.kv_heads * a.head_dim, a.dim), 0.0, small, joined=True)
            add(block + "attention.v", (a.kv_heads * a.v_head_dim, a.dim), 0.0, small, joined=True)
            add(block + "attention.o", (a.dim, a.heads * a.v_head_dim), 0.0, into_stream)
            norm(block + "norm1")
        module += 1
        if a.arch == "llama":
            add(block + "mlp.gate", (a.hidden, a.dim), 0.0, small)
        add(block + "mlp.up", (a.hidden, a.dim), 0.0, small, joined=a.arch == "llama")
        add(block + "mlp.down", (a.dim, a.hidden), 0.0, into_stream)
        if a.arch != "mlp":
            norm(block + "norm2")
        if biases:
            add(block + "mlp.up.bias", (a.hidden,), 0.0, 0.0)
            add(block + "mlp.down.bias", (a.dim,), 0.0, 0.0)
    module += 1
    if not a.tie_embeddings:
        add("head.weight", (a.vocab, a.dim), 0.0, small)
    norm("head.norm")
    return params


def our_name(name):
    """A parameter's name in ./train, from its name in the module, whatever wrappers have added to that."""
    name = re.sub(r"(_orig_mod|_fsdp_wrapped_module|module)\.", "", name)
    name = name.replace("attention.norm.", "norm1.").replace("mlp.norm.", "norm2.")
    return name if name in ("embedding.weight", "head.weight") else name.removesuffix(".weight")


def is_among(name, some):
    """Is the parameter called `some`, or in the module of that name?"""
    return (name + ".").startswith(some + ".")


def is_frozen(a, name):
    return any(is_among(name, some) for some in a.freeze.split(",") if some)


# ------------------------------------------------------------------------------------------------------------ weights
def philox(counters, tensor, seed):
    """Philox 4x32-10 of counters (n) in int64, as four tensors of 32-bit words."""
    low = 0xFFFFFFFF
    c = [counters & low, counters >> 32, torch.full_like(counters, tensor), torch.zeros_like(counters)]
    key0, key1 = seed & low, seed >> 32
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # wraps around, which leaves all 64 bits right
        c = [((b >> 32) & low) ^ c[1] ^ key0, b & low, ((a >> 32) & low) ^ c[3] ^ key1, a & low]
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return c


@torch.no_grad()
def init_normal(out, seed, tensor, first, mean, std):
    """out (n), contiguous: elements first .. first + n of a tensor, as ops::init_normal makes them."""
    flat, piece = out.view(-1), 1 << 22
    for at in range(0, flat.numel(), piece):
        n = min(piece, flat.numel() - at)
        begin = first + at
        q = torch.arange(begin // 4, (begin + n - 1) // 4 + 1, device=out.device)
        u = philox(q, tensor, seed)
        normals = []
        for pair in (0, 2):
            radius = (-2 * (u[pair].float() * 2.0**-32 + 2.0**-33).log()).sqrt()
            angle = 6.28318531 * (u[pair + 1].float() * 2.0**-32)
            normals += [radius * angle.cos(), radius * angle.sin()]
        x = torch.stack(normals, dim=1).view(-1)[begin % 4 : begin % 4 + n]
        flat[at : at + n] = mean + std * x.clamp(-3, 3)


@torch.no_grad()
def init_parameter(p, spec, seed):
    """p: a plain tensor, or a DTensor sharded along its rows, of which each rank makes its own."""
    local, first = p, 0
    if hasattr(p, "to_local"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local = p.to_local()
        shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        assert tuple(shape) == tuple(local.shape) and not any(offset[1:])
        first = offset[0] * (p.numel() // p.shape[0])
        local = getattr(local, "_tensor", local)  # torchao's, of a weight that is gathered in fp8
    if local.numel() == 0:
        return
    if spec.std == 0:
        local.fill_(spec.mean)
    else:
        init_normal(local, seed, spec.id, first, spec.mean, spec.std)


# ------------------------------------------------------------------------------------------------------------ modules
ATTENTION_OPS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
]


def keep_attention_policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(f, a, *args):
    extra = {}
    if a.keep_attention:
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_attention_policy)
    return checkpoint(f, *args, use_reentrant=False, **extra)


class Casting:
    """What FSDP does not manage stays fp32 and is cast where it is used; see --replicate-below."""

    cast = False

    def take(self, p, x):
        return p.to(x.dtype) if self.cast and p is not None else p


class Linear(Casting, nn.Linear):
    def forward(self, x):
        return F.linear(x, self.take(self.weight, x), self.take(self.bias, x))


class LayerNorm(Casting, nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.take(self.weight, x), self.take(self.bias, x), self.eps)


class RMSNorm(Casting, nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.take(self.weight, x), self.eps)


def make_norm(a):
    return LayerNorm(a.dim, eps=1e-5) if a.arch in ("simple", "mlp") else RMSNorm(a.dim, eps=1e-5)


def rotate(x, cos, sin):
    """Rotary positions by halves on (B, T, heads, D), in fp32."""
    low, high = x.float().chunk(2, dim=-1)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


@functools.cache
def compiled_flex(mode):
    """Compiled on its own, so that it is fused inside a checkpointed region and in an eager model, too."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, mode=mode)


class Attention(nn.Module):
    """x + Wo attention(norm(x))"""

    def __init__(self, a):
        super().__init__()
        self.a = a
        widths = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
        self.norm = make_norm(a)
        self.q, self.k, self.v = (Linear(a.dim, n, bias=False) for n in widths)
        self.o = Linear(a.heads * a.v_head_dim, a.dim, bias=False)

    def attend(self, q, k, v, mask):
        a, grouped = self.a, self.a.heads != self.a.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if a.attn == "flex":
            mode = a.compile_mode if a.compile_mode == "max-autotune-no-cudagraphs" else None
            return compiled_flex(mode)(q, k, v, block_mask=mask, enable_gqa=grouped)
        if grouped and a.gqa == "repeat":
            k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def run(self, x, cos, sin, mask):
        a, n = self.a, self.norm(x)
        q = self.q(n).unflatten(-1, (a.heads, a.head_dim))
        k, v = (f(n).unflatten(-1, (a.kv_heads, -1)) for f in (self.k, self.v))
        if a.arch != "simple":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return x + self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))

    def forward(self, x, cos, sin, mask):
        if self.a.recompute in ("attn", "both"):
            return recomputed(self.run, self.a, x, cos, sin, mask)
        return self.run(x, cos, sin, mask)


class MLP(nn.Module):
    """x + W2 activation(W1 norm(x)); architecture mlp has no norm."""

    def __init__(self, a):
        super().__init__()
        self.a, biases = a, a.arch == "simple"
        self.norm = make_norm(a) if a.arch != "mlp" else nn.Identity()
        if a.arch == "llama":
            self.gate = Linear(a.dim, a.hidden, bias=False)
        self.up, self.down = Linear(a.dim, a.hidden, bias=biases), Linear(a.hidden, a.dim, bias=biases)

    def run(self, x):
        n = self.norm(x)
        h = F.silu(self.gate(n)) * self.up(n) if self.a.arch == "llama" else F.gelu(self.up(n), approximate="tanh")
        return x + self.down(h)

    def forward(self, x):
        if self.a.recompute in ("mlp", "both"):
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        if a.arch != "mlp":
            self.attention = Attention(a)
        self.mlp = MLP(a)

    def run(self, x, cos, sin, mask):
        return self.mlp(self.attention(x, cos, sin, mask) if self.a.arch != "mlp" else x)

    def forward(self, x, cos, sin, mask):
        if self.a.recompute == "block":
            return recomputed(self.run, self.a, x, cos, sin, mask)
        return self.run(x, cos, sin, mask)


class Head(Casting, nn.Module):
    def __init__(self, a):
        super().__init__()
        self.norm = make_norm(a)
        self.weight = nn.Parameter(torch.empty(a.vocab, a.dim))

    def forward(self, x):
        n = self.norm(x)
        return F.linear(n, self.take(self.weight, n))


class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        # Empty, whatever the device: nobody wants nn.Embedding's own initial weights.
        self.embedding = nn.Embedding(a.vocab, a.dim, _weight=torch.empty(a.vocab, a.dim))
        self.block = nn.ModuleList([Block(a) for _ in range(a.depth)])
        self.head = Head(a)
        self.dtype = torch.bfloat16 if a.param_dtype == "bf16" else torch.float32
        self.tied = a.tie_embeddings
        self.tie()
        for name, p in self.named_parameters():
            p.requires_grad = not is_frozen(a, our_name(name))

    def tie(self):
        """Again after whatever makes new parameters of old ones."""
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, positions, cos, sin, mask):
        x = self.embedding(tokens).to(self.dtype)
        if positions is not None:
            x = x + positions
        for block in self.block:
            x = block(x, cos, sin, mask)
        return self.head(x)


def position_inputs(a, device):
    """positions (T, C), cos and sin (T, D/2), mask: what the forward takes beside tokens; None where it has no use."""
    t = torch.arange(a.seq, dtype=torch.float64, device=device)[:, None]
    positions = cos = sin = mask = None
    if a.arch == "simple":
        angle = t * 10000.0 ** (-torch.arange(0, a.dim, 2, dtype=torch.float64, device=device) / a.dim)
        dtype = torch.bfloat16 if a.param_dtype == "bf16" else torch.float32
        positions = torch.stack((angle.sin(), angle.cos()), dim=-1).reshape(a.seq, a.dim).to(dtype)
    elif a.arch != "mlp":
        size = a.head_dim
        angle = t * a.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
        cos, sin = angle.cos().float(), angle.sin().float()
    if a.arch != "mlp" and a.attn == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, a.seq, a.seq, device=device)
    return positions, cos, sin, mask


# -------------------------------------------------------------------------------------------------------------- FLOPs
def flops_per_token(a):
    """(causal attention counted as half, as a whole), forward and backward: flops_per_token() in model/config.cu.

    6 for each weight that multiplies, and 6 L d T for causal attention, d being half of all heads' widths; recomputation
    is not counted, nor what the backward pass leaves out because weights are frozen.
    """
    table, head = parameter_table(a), head_module(a)
    last = min(p.module for p in table if not is_frozen(a, p.name))
    if a.arch != "mlp" and 0 < last < head:
        last -= (last - 1) % 2  # a block is gone through as a whole
    flops = 0.0
    for p in table:
        module = head if p.module == 0 and a.tie_embeddings else p.module
        if len(p.shape) > 1 and module > 0:
            flops += 2 * (1 + (module >= last) + (not is_frozen(a, p.name))) * p.numel
    if a.arch == "mlp":
        return flops, flops
    widths = a.heads * (a.head_dim + a.v_head_dim)
    keys = sum((6 if 1 + 2 * i >= last else 2) * widths * a.seq / 2 for i in range(a.depth))
    return flops + keys, flops + 2 * keys


def flops_simple_pytorch(a):
    """Of a token, as lucasb-eyer/simple_pytorch's main.py counts them: its MLP term lacks a factor of dim."""
    if a.arch == "mlp":
        return None  # has no attention, for which that formula is
    d, t = a.dim, a.seq
    return (a.depth * (24 * d * d * t + 6 * d * t * t + 12 * d * (a.hidden / d) * t) + 6 * t * d * a.vocab) / t
