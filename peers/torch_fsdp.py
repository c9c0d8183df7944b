#!/usr/bin/env python3
"""PyTorch's FSDP on what ./train trains, to stand beside it: a JSON line for each row.

  torchrun --standalone --nproc_per_node=2 peers/torch_fsdp.py --preset simple --recompute both --tag depth-4
  torchrun --standalone --nproc_per_node=2 peers/torch_fsdp.py --warm-seconds 20 --rows rows.json
  torchrun --standalone --nproc_per_node=2 peers/torch_fsdp.py --device cpu --compile none --last 20 --log-losses

Options have ./train's names, defaults and meanings; each row begins with ./train's weights and reads its tokens in its
order, so that losses can be compared step by step. Attention is dense. What PyTorch cannot do is refused by
name: {"ok": false, "error": ...}. rows.json: [{"tag": "...", "args": ["--dim", "4096", ...]}, ...], run one after
another in one process group, with options of the command line before their own. A row that is refused is skipped; after
an out-of-memory or any other error all ranks leave at once, and the caller starts again with the rows that are left.

A row: the model is made; steps are run until --warm-seconds have passed since the first one ended; then --last steps
are timed with events and without a synchronisation, of which those from --first on count. The schedule counts all.

How PyTorch is used: --shard full, grad, hybrid:K are FSDP2 (fully_shard); --shard none is DistributedDataParallel in
fp32 or with --autocast bf16, and in bf16 FSDP2 in shard groups of one rank, since DDP has no bf16 copy of fp32
parameters. FSDP2 has no switch for the rate limiter, so --limit-all-gathers needs --parallel fsdp1. Blocks are compiled
before they are sharded; with --wrap sublayer and auto, attention and MLP are. The unit that holds the head, and the
model as one unit, are not resharded after the forward, as in ./train. Tied embeddings belong to the root, which stays
gathered from the embedding to the head; --wrap auto with --parallel fsdp1 is size_based_auto_wrap_policy.
--matmul-dtype fp8 needs torchao, whose float8 replaces the linear layers of the blocks, as ./train does.
"""

import os

# NVLink multicast stays off, as in fsdp.cu (lib/comm/world.cc says why): set before NCCL or torch start.
for _name, _value in (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
):
    os.environ[_name] = _value
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import platform
import statistics
import sys
import time
import traceback

from libraries import require

require("numpy", "torch")

import torch
import torch.distributed as dist

from corpus import CorpusError, Sampler, open_corpus
from model import (
    Attention,
    Block,
    Casting,
    Head,
    MLP,
    Transformer,
    flops_per_token,
    flops_simple_pytorch,
    head_module,
    init_parameter,
    is_among,
    is_frozen,
    our_name,
    parameter_table,
    position_inputs,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIB = 2.0**20
MODEL = ("arch", "dim", "depth", "heads", "kv_heads", "hidden", "vocab", "seq", "batch", "grad_accum")
PRESETS = {
    "tiny": ("rope", 128, 2, 2, 1, 512, 256, 512, 1, 1),
    "simple": ("simple", 4096, 4, 32, 8, 16384, 32768, 4096, 8, 1),
    "rope": ("rope", 4096, 4, 32, 8, 16384, 32768, 4096, 8, 1),
    "class": ("simple", 768, 6, 12, 12, 3072, 32000, 256, 8, 2),
    "m7c": ("rope", 768, 12, 12, 2, 3072, 256, 2048, 1, 1),
    "mlp-1024": ("mlp", 1024, 3, 1, 1, 4096, 32768, 1024, 8, 1),
    "mlp-4096": ("mlp", 4096, 4, 1, 1, 16384, 32768, 4096, 8, 1),
    "llama-1b": ("llama", 2048, 16, 32, 8, 8192, 128256, 4096, 2, 1),
    "llama-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, 8192, 1, 1),
    "llama-47b": ("llama", 8192, 54, 64, 8, 28672, 32768, 2048, 1, 1),
}


class Refused(Exception):
    """PyTorch, or this script, cannot do what the options ask for."""


def refuse_if(condition, text):
    if condition:
        raise Refused(text)


# ------------------------------------------------------------------------------------------------------------ options
class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def make_parser():
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add, switch = p.add_argument, [0, 1]
    g = p.add_argument_group("as ./train has them")
    add = g.add_argument
    add("--preset", choices=list(PRESETS), help="default: tiny on a CPU, m7c on a GPU")
    add("--arch", choices=["simple", "rope", "llama", "mlp"])
    for name in ("dim", "depth", "heads", "kv-heads", "hidden", "vocab", "seq", "batch"):
        add(f"--{name}", type=int, help="default: the preset's")
    add("--head-dim", type=int, default=0, help="default: dim / heads")
    add("--v-head-dim", type=int, default=0, help="default: --head-dim")
    add("--grad-accum", type=int, default=1)
    add("--rope-base", type=float, default=500000.0)
    add("--tie-embeddings", action="store_true")
    add("--freeze", default="", metavar="NAMES")
    add("--data", default="", help="text or token file, or random; default: the built-in synthetic corpus")
    add("--steps", type=int, help="length of the schedule; default: 200 on a GPU, 32 on a CPU")
    add("--lr", type=float, default=3e-4)
    add("--min-lr-ratio", type=float, default=0.1)
    add("--warmup", type=int, default=-1)
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.95)
    add("--eps", type=float, default=1e-8)
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--param-dtype", choices=list(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    add("--reduce-dtype", choices=list(DTYPES), help="default: that of --param-dtype")
    add("--matmul-dtype", choices=["fp8"], help="by torchao, with --parallel fsdp2")
    add("--fp8-scaling", choices=["tensor", "row"], help="torchao's recipe, tensorwise (default) or rowwise")
    add("--gather-dtype", choices=["fp8"], help="torchao's enable_fsdp_float8_all_gather")
    add("--tf32", action="store_true")
    add("--autocast", choices=["bf16"])
    add("--moments", choices=["fp32", "bf16"], default="fp32")
    add("--shard", metavar="MODE", help="full, grad, none, hybrid:K; default: full, with --parallel ddp and none: none")
    add("--wrap", choices=["block", "sublayer", "auto", "single"])
    add("--wrap-min-params", type=int)
    add("--bucket-mb", type=int)
    add("--reshard-after-forward", type=int, choices=switch)
    add("--limit-all-gathers", choices=["on", "off"], help="--parallel fsdp1 only")
    add("--forward-prefetch", type=int, help="units to gather ahead; 0: as far ahead as the host is; default: 1")
    add("--backward-prefetch", choices=["pre", "post", "none"], default="pre")
    add("--accum-sync", choices=["every", "last"], default="every")
    add("--replicate-below", type=int, default=0, metavar="BYTES")
    add("--optimizer-in-backward", type=int, choices=switch, default=0)
    add("--meta-init", type=int, choices=switch)
    add("--recompute", choices=["none", "mlp", "attn", "both", "block"], default="none")
    add("--keep-attention", type=int, choices=switch, default=0)
    add("--device", choices=["auto", "cpu", "gpu"], default="auto")
    g = p.add_argument_group("PyTorch's own")
    add = g.add_argument
    add(
        "--parallel",
        choices=["fsdp2", "fsdp1", "ddp", "none"],
        help="default: by --shard; none: one process, no wrapper",
    )
    add("--attn", choices=["sdpa", "flex"], default="sdpa")
    add("--sdpa-backend", choices=["auto", "flash", "cudnn"], default="auto")
    add("--gqa", choices=["native", "repeat"], help="default: native; repeat for fp32, whose kernels know no groups")
    add("--ce", choices=["fp32", "model"], default="fp32", help="type in which the loss reads the logits")
    add("--compile", choices=["none", "block", "model", "fwdbwd"], default="block")
    add("--compile-mode", help="e.g. max-autotune-no-cudagraphs")
    g = p.add_argument_group("the run")
    add = g.add_argument
    add("--first", type=int, default=5, help="steps from this one, counted from 1 after the warm-up, count")
    add("--last", type=int, default=24)
    add("--warm-seconds", type=float, default=0.0, metavar="S")
    add("--peak-tflops", type=float, help="of a GPU, for MFU; default: 989.5 on H100, H200 and GH200")
    add("--log-losses", action="store_true", help="losses of all steps, those of the warm-up too; else the window's")
    add("--profile", default="", metavar="FILE", help="write a Chrome trace of three more steps of rank 0")
    add("--tag", default="")
    add("--rows", default="", metavar="FILE")
    return p


def resolve(a, world):
    """Fills in what is left open, and refuses what cannot be. Leaves nothing that would be ignored."""
    a.device = a.device if a.device != "auto" else "gpu" if torch.cuda.is_available() else "cpu"
    refuse_if(a.device == "gpu" and not torch.cuda.is_available(), "--device gpu: PyTorch finds no GPU")
    gpu = a.device == "gpu"
    resolve_model(a, gpu)
    resolve_parallel(a, world)
    resolve_numbers(a, gpu)
    resolve_units(a, world)
    resolve_fp8(a, gpu)
    check_memory(a)
    check_run(a)
    a.steps = a.steps or (200 if gpu else 32)
    a.warmup = a.warmup if a.warmup >= 0 else min(100, a.steps // 10)
    return a


def resolve_model(a, gpu):
    a.preset = a.preset or ("m7c" if gpu else "tiny")
    preset = dict(zip(MODEL, PRESETS[a.preset]))
    if a.batch is None and a.grad_accum == 1:
        a.grad_accum = preset["grad_accum"]
    if a.dim and not a.hidden:
        a.hidden = preset["hidden"] * a.dim // preset["dim"]
    for name in MODEL:
        if getattr(a, name) is None:
            setattr(a, name, preset[name])
        refuse_if(name != "arch" and getattr(a, name) < 1, f"--{name.replace('_', '-')}: must be at least 1")
    refuse_if(
        a.arch != "mlp" and not a.head_dim and a.dim % a.heads, f"--dim {a.dim} is not divisible by --heads {a.heads}"
    )
    refuse_if(a.arch == "mlp" and (a.head_dim or a.v_head_dim), "--head-dim: architecture mlp has no attention")
    if a.arch != "mlp":
        a.head_dim = a.head_dim or a.dim // a.heads
        a.v_head_dim = a.v_head_dim or a.head_dim
    refuse_if(
        a.arch != "mlp" and a.heads % a.kv_heads, f"--heads {a.heads} is not divisible by --kv-heads {a.kv_heads}"
    )
    names = [p.name for p in parameter_table(a)]
    for some in filter(None, a.freeze.split(",")):
        refuse_if(
            not any(is_among(n, some) for n in names),
            f"--freeze {some}: no parameter and no module has that name",
        )
    refuse_if(all(is_frozen(a, n) for n in names), f"--freeze {a.freeze}: nothing is left to train")


def resolve_parallel(a, world):
    wide = bool(a.autocast) or a.param_dtype == "fp32" or (a.device == "cpu" and a.param_dtype is None)
    if a.parallel is None:
        a.parallel = "ddp" if a.shard == "none" and wide else "fsdp2"
    plain = a.parallel in ("ddp", "none")
    a.shard = a.shard or ("none" if plain else "full")
    kind, _, ranks = a.shard.partition(":")
    refuse_if(kind not in ("full", "grad", "none", "hybrid"), f"--shard {a.shard}: choose full, grad, none or hybrid:K")
    refuse_if(
        plain and a.shard != "none", f"--parallel {a.parallel} shards nothing; --shard {a.shard} needs fsdp2 or fsdp1"
    )
    refuse_if(a.parallel == "none" and world > 1, "--parallel none is for one process")
    refuse_if(a.parallel == "fsdp1" and a.shard == "none", "--parallel fsdp1 --shard none: use --parallel ddp or fsdp2")
    refuse_if(
        kind == "hybrid" and (not ranks.isdigit() or int(ranks) == 0 or world % int(ranks)),
        f"--shard {a.shard}: K must be a number of ranks that divides {world}",
    )
    a.shard_ranks = int(ranks) if kind == "hybrid" else 1 if a.shard == "none" else world
    refuse_if(plain and a.meta_init == 1, f"--meta-init 1: --parallel {a.parallel} has the full model on every rank")
    torn = a.parallel == "fsdp1" and a.tie_embeddings  # FSDP1 makes each module's parameters anew
    refuse_if(torn and a.meta_init == 1, "--meta-init 1: FSDP1 cannot make tied embeddings from the meta device")
    a.meta_init = (0 if plain or torn else 1) if a.meta_init is None else a.meta_init


def resolve_numbers(a, gpu):
    plain = a.parallel in ("ddp", "none")
    refuse_if(
        a.autocast and a.param_dtype == "bf16", "--autocast bf16 gathers parameters in fp32; drop --param-dtype bf16"
    )
    if a.param_dtype is None:
        a.param_dtype = "fp32" if a.autocast or not gpu else "bf16"
    refuse_if(
        plain and a.param_dtype == "bf16",
        f"--parallel {a.parallel} has no bf16 copy of fp32 parameters; use --autocast bf16, --param-dtype fp32, fsdp2",
    )
    refuse_if(a.parallel == "none" and a.reduce_dtype, "--reduce-dtype: --parallel none reduces nothing")
    a.reduce_dtype = a.reduce_dtype or a.param_dtype
    refuse_if(
        a.moments == "bf16", "--moments bf16: torch.optim.AdamW keeps its moments in the type of the parameters, fp32"
    )
    if a.gqa is None:
        a.gqa = "native" if a.param_dtype == "bf16" or a.autocast else "repeat"
    refuse_if(
        a.optimizer_in_backward and a.clip > 0,
        "--optimizer-in-backward 1 needs --clip 0: the global norm is known only after the last reduction",
    )
    refuse_if(
        a.optimizer_in_backward and a.parallel not in ("fsdp2", "none"),
        f"--optimizer-in-backward 1: --parallel {a.parallel} has no hook after a gradient's reduction; use fsdp2",
    )


def resolve_units(a, world):
    plain = a.parallel in ("ddp", "none")
    for name in ("wrap", "reshard_after_forward", "forward_prefetch"):
        given = getattr(a, name) is not None
        refuse_if(plain and given, f"--{name.replace('_', '-')}: --parallel {a.parallel} has no units to gather")
    refuse_if(plain and a.backward_prefetch != "pre", f"--backward-prefetch: --parallel {a.parallel} gathers nothing")
    refuse_if(
        a.limit_all_gathers and a.parallel != "fsdp1",
        "--limit-all-gathers: FSDP2 has no such switch, it frees memory by stream order; use --parallel fsdp1",
    )
    refuse_if(
        a.parallel == "fsdp2" and a.backward_prefetch != "pre",
        f"--backward-prefetch {a.backward_prefetch}: FSDP2 always gathers before a gradient is computed; use fsdp1",
    )
    refuse_if(
        a.wrap != "auto" and (a.wrap_min_params is not None or a.bucket_mb is not None),
        "--wrap-min-params and --bucket-mb need --wrap auto",
    )
    refuse_if(a.parallel == "fsdp1" and a.bucket_mb, "--bucket-mb: FSDP1's auto-wrap knows no upper limit")
    keeps = a.shard in ("grad", "none")
    refuse_if(
        keeps and a.reshard_after_forward == 1, f"--shard {a.shard} keeps parameters; drop --reshard-after-forward 1"
    )
    if not plain:
        a.wrap = a.wrap or "block"
        if a.wrap == "auto":
            a.wrap_min_params = 100000000 if a.wrap_min_params is None else a.wrap_min_params
            a.bucket_mb = a.bucket_mb or 0
        if a.reshard_after_forward is None:
            a.reshard_after_forward = 0 if keeps else 1
        a.forward_prefetch = 1 if a.forward_prefetch is None else a.forward_prefetch
    if a.parallel == "fsdp1":
        a.limit_all_gathers = a.limit_all_gathers or "on"
        refuse_if(a.forward_prefetch > 1, "--forward-prefetch: FSDP1 gathers 0 or 1 units ahead")
        refuse_if(a.tie_embeddings and a.wrap != "single", "--tie-embeddings: FSDP1 needs --wrap single for it")
        refuse_if(a.device == "cpu" and a.reduce_dtype == "bf16", "--reduce-dtype bf16: FSDP1 on a CPU reduces in fp32")
    refuse_if(a.replicate_below and a.parallel != "fsdp2", "--replicate-below needs --parallel fsdp2")
    refuse_if(
        a.replicate_below and a.grad_accum > 1 and a.accum_sync == "every",
        "--replicate-below: what FSDP2 ignores is reduced once a step here; use --accum-sync last",
    )
    refuse_if(
        a.replicate_below and a.optimizer_in_backward,
        "--optimizer-in-backward 1: what FSDP2 ignores (--replicate-below) is reduced after the backward",
    )


def resolve_fp8(a, gpu):
    for name in ("fp8_scaling", "gather_dtype"):
        given = getattr(a, name) is not None
        refuse_if(given and not a.matmul_dtype, f"--{name.replace('_', '-')} needs --matmul-dtype fp8")
    if not a.matmul_dtype:
        return
    a.fp8_scaling = a.fp8_scaling or "tensor"
    refuse_if(a.parallel != "fsdp2", f"--matmul-dtype fp8 needs --parallel fsdp2, not {a.parallel}")
    refuse_if(
        a.replicate_below, "--matmul-dtype fp8: torchao's linear layers cannot cast what --replicate-below leaves in fp32"
    )
    refuse_if(
        a.gather_dtype and a.fp8_scaling == "row", "--gather-dtype fp8: torchao gathers in fp8 with a scale per tensor only"
    )
    refuse_if(
        gpu and torch.cuda.get_device_capability() < (8, 9), "--matmul-dtype fp8 needs a GPU of compute capability 8.9"
    )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as e:
        raise Refused(f"--matmul-dtype fp8 needs torchao ({e}); install it with pip install torchao") from e


def check_memory(a):
    attends = a.arch != "mlp"
    refuse_if(not attends and a.recompute == "attn", "--recompute attn: architecture mlp has no attention")
    refuse_if(not attends and a.attn != "sdpa", f"--attn {a.attn}: architecture mlp has no attention")
    refuse_if(not attends and a.keep_attention, "--keep-attention 1: architecture mlp has no attention")
    refuse_if(
        a.keep_attention and a.recompute not in ("attn", "both", "block"),
        "--keep-attention 1 needs --recompute attn, both or block",
    )
    refuse_if(
        a.keep_attention and a.attn == "flex",
        "--keep-attention 1: selective checkpointing is set up here for scaled_dot_product_attention; use --attn sdpa",
    )
    refuse_if(a.attn == "flex" and a.device == "cpu", "--attn flex needs a GPU")
    refuse_if(a.attn == "flex" and a.sdpa_backend != "auto", "--sdpa-backend is for --attn sdpa")


def check_run(a):
    refuse_if(not 1 <= a.first <= a.last, f"--first {a.first} --last {a.last}: 1 <= FIRST <= LAST")
    refuse_if(a.compile_mode and a.compile == "none" and a.attn != "flex", "--compile-mode needs --compile")
    refuse_if(a.profile and a.device == "cpu", "--profile needs a GPU")
    refuse_if(a.sdpa_backend != "auto" and a.device == "cpu", "--sdpa-backend needs a GPU")


# --------------------------------------------------------------------------------------------------------------- world
class World:
    """This process among the others, and its device."""

    def __init__(self, device):
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29555")
        self.gpu = device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        extra = {"device_id": self.device} if self.gpu else {}
        dist.init_process_group("nccl" if self.gpu else "gloo", rank=self.rank, world_size=self.size, **extra)

    def synchronize(self):
        if self.gpu:
            torch.cuda.synchronize()

    def mib(self, what):
        """torch.cuda.NAME() in MiB; nothing on a CPU."""
        return getattr(torch.cuda, what)() / MIB if self.gpu else None

    def reset_peak(self):
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()

    def gathered(self, value):
        """The values of all ranks, on each."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def emit(self, line):
        """One line on standard output, with one write: other ranks may write, too."""
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


# --------------------------------------------------------------------------------------------------------- parallelism
def initialize(model, a):
    """./train's initial weights, into whatever each parameter is by now."""
    specs = {p.name: p for p in parameter_table(a)}
    for name, p in model.named_parameters():
        init_parameter(p, specs[our_name(name)], a.seed)


def sublayers(model):
    """Modules in the order of the forward pass, by block: [[embedding], [attention, MLP], ..., [head]]."""
    inner = [[getattr(b, n) for n in ("attention", "mlp") if hasattr(b, n)] for b in model.block]
    return [[model.embedding], *inner, [model.head]]


def compile_parts(a, model):
    """Each block as its own module, or its sublayers where hooks of FSDP come between them."""
    if a.compile != "block":
        return
    compiled = functools.partial(torch.compile, mode=a.compile_mode, dynamic=False, fullgraph=True)
    for i, block in enumerate(model.block):
        if a.wrap in ("sublayer", "auto"):
            for name in ("attention", "mlp"):
                if hasattr(block, name):
                    setattr(block, name, compiled(getattr(block, name)))
        else:
            model.block[i] = compiled(block)


def merged_by_size(modules, sizes, a):
    """--wrap auto, as wrap() in model/config.cu: a large module alone, small neighbours together."""
    groups, size = [], 0  # size: of the group that small modules are being put into; 0: none is open
    limit = (a.bucket_mb << 20) // DTYPES[a.param_dtype].itemsize
    for module, own in zip(modules, sizes):
        small = own < a.wrap_min_params
        begins = not small or size == 0 or (limit > 0 and size + own > limit)
        size = 0 if not small else own if begins else size + own
        if size >= a.wrap_min_params:
            size = 0
        if begins:
            groups.append([])
        groups[-1].append(module)
    return groups


def units(a, model):
    """Lists of modules that are gathered at once, in the order of the forward pass; what is in none is the root's."""
    modules = [m for block in sublayers(model) for m in block]
    if a.wrap == "single":
        return []
    if a.wrap == "block":
        groups = [[model.embedding], *([b] for b in model.block), [model.head]]
    elif a.wrap == "sublayer":
        groups = [[m] for m in modules]
    else:
        sizes = [0] * (head_module(a) + 1)
        for p in parameter_table(a):
            sizes[p.module] += p.numel
        groups = merged_by_size(modules, sizes, a)
    if a.tie_embeddings:
        groups = [g for g in groups if model.embedding not in g and model.head not in g]
    return groups


def replicated_parameters(a, model):
    """Those below --replicate-below; what ./train makes in one product counts together."""
    if not a.replicate_below:
        return []
    least, small, run = -(-a.replicate_below // DTYPES[a.param_dtype].itemsize), set(), []
    for p in [*parameter_table(a), None]:
        if p is None or not p.joined:
            if sum(q.numel for q in run) < least:
                small.update(q.name for q in run)
            run = []
        run.append(p)
    return [p for name, p in model.named_parameters() if our_name(name) in small]


def use_fp8(a, model, world):
    """Puts torchao's layers in place of the blocks' linear ones. A CPU has no such products: it rounds and multiplies."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(f"{a.fp8_scaling}wise"),
        enable_fsdp_float8_all_gather=bool(a.gather_dtype),
        emulate=not world.gpu,
    )
    convert_to_float8_training(model.block, config=config)


def build_fsdp2(a, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, names = (world.size,), ("shard",)
    if a.shard_ranks < world.size:
        shape, names = (world.size // a.shard_ranks, a.shard_ranks), ("replicate", "shard")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    with torch.device("meta" if a.meta_init else world.device):
        model = Transformer(a)
    if not a.meta_init:
        initialize(model, a)
    replicated = replicated_parameters(a, model)
    for m in model.modules():
        if isinstance(m, Casting):
            m.cast = bool(replicated) and a.param_dtype == "bf16"
    if a.matmul_dtype:
        use_fp8(a, model, world)
    compile_parts(a, model)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[a.param_dtype] if a.param_dtype != "fp32" else None,
        reduce_dtype=DTYPES[a.reduce_dtype],
        cast_forward_inputs=False,
    )
    how = dict(mesh=mesh, mp_policy=policy)
    if replicated:
        how["ignored_params"] = set(replicated)
    ignored = {id(p) for p in replicated}
    groups = [g for g in units(a, model) if any(id(p) not in ignored for m in g for p in m.parameters())]
    refuse_if(
        a.wrap == "auto" and a.recompute == "block" and any(len(g) > 1 for g in groups),
        "--recompute block: FSDP2 cannot recompute a part of the modules that --wrap auto puts together; use both",
    )
    for g in groups:
        reshard = bool(a.reshard_after_forward) and model.head not in g
        fully_shard(g if len(g) > 1 else g[0], reshard_after_forward=reshard, **how)
    fully_shard(model, **how)
    if a.meta_init:
        model.to_empty(device=world.device)
        model.tie()
        initialize(model, a)
    prefetch(a, [g[0] for g in groups])
    return model


def prefetch(a, order):
    """Units gathered ahead by name; without that FSDP2 gathers as far ahead as the host is, and one in the backward."""
    n = a.forward_prefetch
    for i, module in enumerate(order[:-1]):
        if n > 0:
            module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + n])
    back = order[::-1]
    for i, module in enumerate(back[:-1]):
        module.set_modules_to_backward_prefetch([back[i + 1]])


def fsdp1_policy(a, model):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if a.wrap == "single":
        return None
    if a.wrap == "auto":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=a.wrap_min_params)
    parts = {Block} if a.wrap == "block" else {Attention, MLP}
    if a.compile == "block":
        parts = {torch._dynamo.eval_frame.OptimizedModule}
    return ModuleWrapPolicy({type(model.embedding), Head, *parts})


def build_fsdp1(a, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    specs = {p.name: p for p in parameter_table(a)}
    with torch.device("meta" if a.meta_init else world.device):
        model = Transformer(a)
    if not a.meta_init:
        initialize(model, a)
    compile_parts(a, model)
    names = {m: prefix for prefix, m in model.named_modules()}

    def make(module):  # one that is on the meta device, without its children
        module.to_empty(device=world.device, recurse=False)
        for name, p in module.named_parameters(recurse=False):
            init_parameter(p, specs[our_name(f"{names[module]}.{name}")], a.seed)

    mesh, zero3 = None, bool(a.reshard_after_forward)
    strategy = ShardingStrategy.FULL_SHARD if zero3 else ShardingStrategy.SHARD_GRAD_OP
    if a.shard_ranks < world.size:
        mesh = init_device_mesh(
            world.device.type, (world.size // a.shard_ranks, a.shard_ranks), mesh_dim_names=("replicate", "shard")
        )
        strategy = ShardingStrategy.HYBRID_SHARD if zero3 else ShardingStrategy._HYBRID_SHARD_ZERO2
    dtype = DTYPES[a.param_dtype] if a.param_dtype != "fp32" else None
    when = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    return FSDP(
        model,
        auto_wrap_policy=fsdp1_policy(a, model),
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(
            param_dtype=dtype,
            reduce_dtype=DTYPES[a.reduce_dtype],
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        param_init_fn=make if a.meta_init else None,
        backward_prefetch=when[a.backward_prefetch],
        forward_prefetch=a.forward_prefetch > 0,
        limit_all_gathers=a.limit_all_gathers == "on",
        use_orig_params=True,
        device_id=world.device,
        device_mesh=mesh,
    )


def build_plain(a, world):
    with world.device:
        model = Transformer(a)
    initialize(model, a)
    compile_parts(a, model)
    if a.parallel == "none":
        return model
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        model, device_ids=[world.device] if world.gpu else None, gradient_as_bucket_view=True
    )
    if a.reduce_dtype == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model


def build(a, world):
    if a.parallel == "fsdp2":
        return build_fsdp2(a, world)
    return build_fsdp1(a, world) if a.parallel == "fsdp1" else build_plain(a, world)


# ----------------------------------------------------------------------------------------------------------- optimizer
def is_sharded(p):
    return hasattr(p, "to_local")


def parameter_groups(a, model):
    """Matrices are decayed, the rest is not; FSDP2's parameters and those that it ignores are stepped separately."""
    groups = {}
    shapes = {p.name: p.shape for p in parameter_table(a)}  # FSDP1's parameters are flat
    for name, p in model.named_parameters():
        if p.requires_grad:
            decay = len(shapes[our_name(name)]) > 1
            groups.setdefault((decay, is_sharded(p)), []).append(p)
    return [
        {"params": params, "weight_decay": a.weight_decay if decay else 0.0} for (decay, _), params in groups.items()
    ]


def make_optimizers(a, model, world, may_step):
    """One; or, with --optimizer-in-backward, one for each parameter, stepped behind its gradient's reduction."""
    compiled = a.compile == "fwdbwd" and a.clip == 0
    lr = torch.tensor(a.lr, device=world.device) if compiled else a.lr  # as a number it would be compiled in
    adamw = functools.partial(torch.optim.AdamW, lr=lr, betas=(a.beta1, a.beta2), eps=a.eps, fused=True)
    groups = parameter_groups(a, model)
    if not a.optimizer_in_backward:
        return [adamw(groups)]
    optimizers = {p: adamw([p], weight_decay=g["weight_decay"]) for g in groups for p in g["params"]}

    def step(p):
        if may_step():
            optimizers[p].step()
            optimizers[p].zero_grad(set_to_none=True)

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def learning_rate(a, step):
    """Linear warm-up, then half a cosine; step counts from 1. learning_rate() in train.cu."""
    if step <= a.warmup:
        return a.lr * step / a.warmup
    progress = min(1.0, (step - a.warmup) / max(1, a.steps - a.warmup))
    return a.lr * (a.min_lr_ratio + (1 - a.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_gradients(a, model, trained):
    if a.parallel == "fsdp1":
        model.clip_grad_norm_(a.clip)
        return
    norms, groups = [], [[p for p in trained if is_sharded(p) == sharded] for sharded in (True, False)]
    for group in filter(None, groups):
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], foreach=True)
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in filter(None, groups):
        torch.nn.utils.clip_grads_with_norm_(group, a.clip, norm, foreach=True)


# ------------------------------------------------------------------------------------------------------------ training
class Training:
    """A model, its optimizer and its data; step() runs a step and returns its loss on this rank, on the device."""

    def __init__(self, a, world):
        self.a, self.world, self.steps_run, self.last_micro_batch = a, world, 0, True
        self.model = build(a, world)
        gc.collect()  # what was made on the way
        self.memory = {"init_mib": world.mib("memory_allocated")}
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.ignored = [p for p in self.trained if not is_sharded(p)] if a.replicate_below else []
        self.optimizers = make_optimizers(a, self.model, world, lambda: self.last_micro_batch)
        self.inputs = position_inputs(a, world.device)
        self.sampler = Sampler(open_corpus(a.data, a.vocab, a.seq, a.seed), a.seq, a.seed)
        self.net = self.model
        self.compile()
        self.memory["before_step_mib"] = world.mib("memory_allocated")

    def compile(self):
        a, compiled = self.a, functools.partial(torch.compile, mode=self.a.compile_mode, dynamic=False)
        if a.compile == "model":
            self.net = compiled(self.model)
        if a.compile in ("model", "block"):
            self.loss_of = torch.compile(self.loss_of, dynamic=False)
        if a.compile == "fwdbwd":
            self.forward, self.backward = compiled(self.forward), compiled(self.backward)

    def loss_of(self, logits, targets):
        if self.a.ce == "fp32":
            logits = logits.float()
        return torch.nn.functional.cross_entropy(logits.view(-1, self.a.vocab), targets.view(-1)) / self.a.grad_accum

    def forward(self, tokens, targets):
        autocast = torch.autocast(self.world.device.type, torch.bfloat16, enabled=bool(self.a.autocast))
        with autocast:
            logits = self.net(tokens, *self.inputs)
        return self.loss_of(logits, targets)

    def backward(self, loss, last):
        """And, where nothing comes between, the optimizer.

        Dynamo must not trace the hooks of FSDP in the backward. It would do so on a CPU alone, where the backward has
        no thread of its own.
        """
        torch._dynamo.disable(loss.backward)()
        if last and self.a.clip == 0 and not self.ignored and not self.a.optimizer_in_backward:
            self.optimizers[0].step()

    def load(self):
        batch = self.sampler.batch(self.steps_run, self.world.rank, self.world.size, self.a.grad_accum, self.a.batch)
        tensors = [torch.from_numpy(x) for x in batch]
        if self.world.gpu:
            tensors = [x.pin_memory().to(self.world.device, non_blocking=True) for x in tensors]
        return tensors

    def synchronizing(self, last):
        """Sets FSDP2 up for a micro-batch; a context for the others."""
        a = self.a
        if a.grad_accum == 1:
            return contextlib.nullcontext()
        if a.parallel == "fsdp2":
            self.model.set_is_last_backward(last)
            if a.accum_sync == "last":
                self.model.set_requires_gradient_sync(last)
            if not a.reshard_after_forward:  # gathered parameters serve all micro-batches
                self.model.set_reshard_after_backward(last)
        elif a.parallel in ("ddp", "fsdp1") and a.accum_sync == "last" and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def set_learning_rate(self):
        lr = learning_rate(self.a, self.steps_run)
        for group in (g for o in self.optimizers for g in o.param_groups):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def reduce_ignored(self):
        """The mean of the gradients that FSDP2 does not see, in one all-reduce."""
        flat = torch.cat([p.grad.view(-1) for p in self.ignored]).to(DTYPES[self.a.reduce_dtype])
        dist.all_reduce(flat)
        flat = flat.float() / self.world.size
        for p, mean in zip(self.ignored, flat.split([p.numel() for p in self.ignored])):
            p.grad.copy_(mean.view_as(p))

    def find_scales(self):
        """Of all the weights that are gathered in fp8, with one all-reduce; without it each gather has its own."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.model)

    def step(self):
        a = self.a
        self.steps_run += 1
        self.set_learning_rate()
        tokens, targets = self.load()
        total = None
        for i in range(a.grad_accum):
            self.last_micro_batch = last = i == a.grad_accum - 1
            with self.synchronizing(last):
                loss = self.forward(tokens[i], targets[i])
                self.backward(loss, last)
            total = loss.detach() if total is None else total + loss.detach()
        if self.ignored:
            self.reduce_ignored()
        if a.clip > 0:
            clip_gradients(a, self.model, self.trained)
        if a.clip > 0 or self.ignored:
            self.optimizers[0].step()
        if a.gather_dtype:
            self.find_scales()
        for o in self.optimizers:
            o.zero_grad(set_to_none=True)
        return total.float()


# ---------------------------------------------------------------------------------------------------------- measurement
class Clock:
    """Times at which steps end: events on a GPU, which nothing waits for; the host's on a CPU."""

    def __init__(self, world):
        self.world, self.marks = world, []
        world.synchronize()
        self.unix = time.time()
        self.mark()

    def mark(self):
        if not self.world.gpu:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def ms(self, i, j):
        a, b = self.marks[i], self.marks[j]
        return a.elapsed_time(b) if self.world.gpu else (b - a) * 1e3


def warm_up(training, world, seconds):
    """The first steps. Rank 0 decides how many, so that all ranks run the same number."""
    losses, seen, begin = [], {}, None
    while True:
        world.reset_peak()
        losses.append(training.step())
        world.synchronize()
        if begin is None:
            begin, seen["first_step_unix"] = time.perf_counter(), time.time()
        if len(losses) <= 2:
            seen["first_peak_mib" if len(losses) == 1 else "second_peak_mib"] = world.mib("max_memory_allocated")
        more = torch.tensor([float(time.perf_counter() - begin < seconds)], device=world.device)
        dist.broadcast(more, 0)
        if more.item() == 0:
            return losses, seen


def timed_steps(training, world, losses, seen, n, first):
    """n steps; without a warm-up the very first ones are among them."""
    dist.barrier()
    clock = Clock(world)
    for i in range(1, n + 1):
        if i == first or training.steps_run < 2:
            world.reset_peak()
        losses.append(training.step())
        clock.mark()
        if training.steps_run == 1:
            world.synchronize()
            seen["first_step_unix"] = time.time()
        if training.steps_run <= 2:
            name = "first_peak_mib" if training.steps_run == 1 else "second_peak_mib"
            seen[name] = world.mib("max_memory_allocated")
    seen["peak_mib"], seen["reserved_mib"] = world.mib("max_memory_allocated"), world.mib("max_memory_reserved")
    world.synchronize()
    return clock


def write_profile(training, world, path):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    recorded = torch.profiler.profile(activities=activities) if world.rank == 0 else contextlib.nullcontext()
    with recorded as profile:
        for _ in range(3):
            training.step()
        world.synchronize()
    if world.rank == 0:
        profile.export_chrome_trace(path)


def largest(values):
    """Of all ranks, by key; None where no rank has a value."""
    return {k: max((v[k] for v in values if v[k] is not None), default=None) for k in values[0]}


def peak_tflops(a, world):
    if a.peak_tflops or not world.gpu:
        return a.peak_tflops
    name = torch.cuda.get_device_name()
    return 989.5 if any(chip in name for chip in ("H100", "H200", "GH200")) else None


def speeds(a, world, ms):
    tokens_per_sec = a.batch * a.seq * a.grad_accum * world.size / ms * 1e3
    causal, full = flops_per_token(a)
    peak = peak_tflops(a, world)

    def mfu(flops):
        return flops * tokens_per_sec / (peak * 1e12 * world.size) if peak and flops else None

    return {
        "tokens_per_sec": tokens_per_sec,
        "mfu": mfu(causal),
        "mfu_full": mfu(full),
        "mfu_simple_pytorch": mfu(flops_simple_pytorch(a)),
    }


def versions():
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "torchao": sys.modules["torchao"].__version__ if "torchao" in sys.modules else None,
    }


def parameter_count(a):
    """The table's, which is ./train's; the modules must have as many."""
    with torch.device("meta"):
        made = {our_name(name): tuple(p.shape) for name, p in Transformer(a).named_parameters()}
    table = {p.name: p.shape for p in parameter_table(a)}
    assert made == table, f"the model's parameters are not those of the table: {set(made.items()) ^ set(table.items())}"
    return sum(p.numel for p in parameter_table(a))


def set_numerics(a):
    torch.set_float32_matmul_precision("high" if a.tf32 else "highest")
    one = a.sdpa_backend != "auto"
    torch.backends.cuda.enable_flash_sdp(not one or a.sdpa_backend == "flash")
    torch.backends.cuda.enable_cudnn_sdp(not one or a.sdpa_backend == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(not one)
    torch.backends.cuda.enable_math_sdp(not one)


def measure(a, world):
    """A row, from nothing to its line."""
    set_numerics(a)
    torch._dynamo.utils.counters.clear()
    params = parameter_count(a)
    left_mib = world.mib("memory_allocated")
    training = Training(a, world)
    losses, seen = warm_up(training, world, a.warm_seconds) if a.warm_seconds > 0 else ([], {})
    warm = len(losses)
    clock = timed_steps(training, world, losses, seen, a.last, a.first)
    if a.profile:
        write_profile(training, world, a.profile)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    losses = (mean / world.size).tolist()
    first_step_unix = seen.pop("first_step_unix")
    steps = [clock.ms(i, i + 1) for i in range(a.last)]
    slowest = max(world.gathered(steps), key=lambda s: statistics.median(s[a.first - 1 :]))
    window = slowest[a.first - 1 :]
    ms = statistics.median(window)
    return {
        "ok": True,
        "tag": a.tag,
        "who": "PyTorch",
        "result": {
            "step_ms": ms,
            "step_ms_min": min(window),
            "step_ms_max": max(window),
            **speeds(a, world, ms),
            **largest(world.gathered({**training.memory, **seen})),
            "last_loss": losses[-1],
            "best_loss": min(losses),
        },
        "steps_ms": slowest,
        "warm_steps": warm,
        "losses": losses if a.log_losses else losses[warm + a.first - 1 :],
        "window": [a.first, a.last],
        "window_unix": [clock.unix + clock.ms(0, i) / 1e3 for i in (a.first - 1, a.last)],
        "first_step_unix": first_step_unix,
        "args": {k: v for k, v in vars(a).items() if k not in ("tag", "rows", "shard_ranks")},
        "versions": versions(),
        "hardware": {
            "name": torch.cuda.get_device_name() if world.gpu else platform.processor() or platform.machine(),
            "gpus": world.size if world.gpu else 0,
        },
        "ranks": world.size,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "params": params,
        "left_mib": left_mib,
    }


# ---------------------------------------------------------------------------------------------------------------- rows
def free_everything(world, mode):
    """Between rows. What was compiled stays, unless it holds memory."""
    gc.collect()
    if world.gpu:
        torch.cuda.empty_cache()
    holds = world.gpu and torch.cuda.memory_allocated() > 64 * MIB
    if holds or mode in ("reduce-overhead", "max-autotune"):  # CUDA graphs keep their pools
        torch._dynamo.reset()
        gc.collect()
        if world.gpu:
            torch.cuda.empty_cache()
    world.reset_peak()


def rows_of(argv):
    """(tag, arguments) of each row; the command line alone is one."""
    a = make_parser().parse_args(argv)
    if not a.rows:
        return a, [(a.tag, argv)]
    try:
        with open(a.rows) as f:
            rows = [(r["tag"], argv + [str(x) for x in r["args"]]) for r in json.load(f)]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Refused(f"--rows {a.rows}: {type(e).__name__}: {e}") from e
    return a, rows


def leave(world, tag, error, settings):
    """One rank tells of the failure; all leave, for some may still wait in a collective."""
    line = {"ok": False, "tag": tag, "who": "PyTorch", "error": error, "rank": world.rank, "args": settings}
    first = True
    with contextlib.suppress(Exception):
        first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    if first:
        world.emit(line)
    else:
        time.sleep(2)  # before torchrun ends the one who tells it
    os._exit(3)


def run_row(world, tag, argv):
    settings = {}
    try:
        a = make_parser().parse_args(argv)
        a.tag = tag
        settings = vars(a)
        resolve(a, world.size)
        refuse_if((a.device == "gpu") != world.gpu, f"--device {a.device}: all rows share the first one's")
        line = measure(a, world)
    except (Refused, CorpusError) as e:  # the same on all ranks, before anything is made
        line = {"ok": False, "tag": tag, "who": "PyTorch", "error": str(e), "args": settings}
    except torch.OutOfMemoryError as e:
        leave(world, tag, "OOM: " + str(e).split("\n")[0][:300], settings)
    except Exception as e:
        traceback.print_exc()
        leave(world, tag, f"{type(e).__name__}: " + (str(e).strip().split("\n") or [""])[0][:300], settings)
    if world.rank == 0:
        world.emit(line)
    return line["ok"]


def main():
    try:
        a, rows = rows_of(sys.argv[1:])
    except Refused as e:
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"ok": False, "tag": "", "who": "PyTorch", "error": str(e)}), flush=True)
        sys.exit(2)
    world = World(a.device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    gc.disable()  # collected between rows, not within a step
    good = True
    for tag, argv in rows:
        good = run_row(world, tag, argv) and good
        free_everything(world, a.compile_mode)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
