#!/usr/bin/env python3
"""A model that ./train --export DIR wrote under names of its own, run forward in PyTorch: its mean loss on a token file.

  python3 peers/read_export.py DIR FILE --seq 256 --sequences 8

FILE is what --val-data takes: a token file or a text. Its first --sequences windows of --seq tokens are read in their
order, as a validation of ./train reads them, so that this is its val_loss but for rounding: everything here is fp32.
All architectures and both kinds of attention, written to be read: Native Sparse Attention is a loop over queries.
A llama with dense attention is exported in Hugging Face's names, and read by transformers.
"""

import argparse
import json
import math
import os

from libraries import require

require("numpy", "torch")

import numpy as np
import torch
import torch.nn.functional as F

from corpus import Sampler, open_corpus

BRANCHES = ("compressed", "selected", "window")


# ------------------------------------------------------------------------------------------------------------ reading
def read_safetensors(path):
    """Name -> tensor in fp32."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8 : 8 + length].tobytes())
    tensors = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in t["data_offsets"])
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[t["dtype"]]
        tensors[name] = torch.frombuffer(bytearray(raw[begin:end]), dtype=dtype).view(t["shape"]).float()
    return tensors


def read_folder(path):
    """config.json and all weights."""
    with open(os.path.join(path, "config.json")) as f:
        config = json.load(f)
    if config["model_type"] != "fsdp.cu":
        raise SystemExit(f"{path}: model type {config['model_type']} is for transformers, not for this reader")
    if config["arch"] != "mlp":  # older exports do not say how wide heads are
        config.setdefault("head_dim", config["dim"] // config["heads"])
        config.setdefault("v_head_dim", config["head_dim"])
    index = os.path.join(path, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as f:
            files = sorted(set(json.load(f)["weight_map"].values()))
    weights = {}
    for name in files:
        weights.update(read_safetensors(os.path.join(path, name)))
    return config, weights


# ---------------------------------------------------------------------------------------------------------- positions
def rotary_angles(c, size):
    """(T, D/2)"""
    angle = c["rope_base"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if c["rope_scaling"] != "none":
        factor, low, high, length = (float(x) for x in c["rope_scaling"].split(":")[1:])
        kept = ((length * angle / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        angle = angle * (kept + (1 - kept) / factor)
    return torch.arange(c["seq"], dtype=torch.float64)[:, None] * angle


def rotate(x, angles):
    """Pairs (i, i + D/2) of x (T, heads, D)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def added_positions(c):
    """(T, C): even channels sine, odd channels cosine."""
    angle = 10000.0 ** (-torch.arange(0, c["dim"], 2, dtype=torch.float64) / c["dim"])
    angle = torch.arange(c["seq"], dtype=torch.float64)[:, None] * angle
    return torch.stack((angle.sin(), angle.cos()), dim=-1).reshape(c["seq"], c["dim"]).float()


# ---------------------------------------------------------------------------------------------------------- attention
def attend(q, k, v):
    """One query of a group of heads, q (heads, D), to keys and values (n, D); zeros where there are none."""
    if len(k) == 0:
        return q.new_zeros(len(q), v.shape[-1])
    return (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v


def dense(q, k, v):
    """q (T, H, D), k and v (T, HKV, D) -> (T, H, D)"""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def compress(c, x, w, of):
    """Blocks of keys, or of values, x (T, HKV, D) -> (K, HKV, D), each of them phi of nsa_block tokens."""
    T, groups, size = x.shape
    out = []
    for start in range(0, T - c["nsa_block"] + 1, c["nsa_stride"]):
        block = x[start : start + c["nsa_block"]].transpose(0, 1)  # (HKV, block, D)
        if c["nsa_phi"] == "mean":
            out.append(block.mean(1))
            continue
        block = block + w[of + ".position"].view(groups, c["nsa_block"], size)
        y = torch.einsum("gi,goi->go", block.flatten(1), w[of + ".w1"].view(groups, -1, c["nsa_block"] * size))
        if c["nsa_phi"] == "mlp":
            y = torch.einsum("gi,goi->go", F.gelu(y, approximate="tanh"), w[of + ".w2"].view(groups, size, -1))
        out.append(y)
    return torch.stack(out) if out else x[:0]


def selected_blocks(c, q, k, t):
    """Blocks that query t of one group selects. q (heads, D), k: the compressed keys that it sees (n, D)."""
    n, own = c["nsa_selected"], t // c["nsa_select_block"]
    if own < n:
        return list(range(own + 1))
    p = (q @ k.T / math.sqrt(q.shape[-1])).softmax(-1).sum(0)  # over the group's heads
    scores = []
    for j in range(1, own - 1):
        begin, end = j * c["nsa_select_block"], (j + 1) * c["nsa_select_block"]
        score = 0.0
        for i in range(len(k)):  # a compressed key counts for the strides that it has in the block
            first = i * c["nsa_stride"]
            shared = min(first + c["nsa_block"], end) - max(first, begin)
            score += max(shared, 0) // c["nsa_stride"] * p[i].item()
        scores.append((-score, j))
    return [0] + sorted(j for _, j in sorted(scores)[: n - 3]) + [own - 1, own]


def sparse(c, q, k, v, gates, w):
    """Native Sparse Attention. q (T, H, D), k and v of each branch (T, HKV, D), gates (T, 3, H) -> as v, of H heads"""
    T, heads, _ = q.shape
    groups = c["kv_heads"]
    each = heads // groups
    keys, values = compress(c, k["compressed"], w, "phi_k"), compress(c, v["compressed"], w, "phi_v")
    out = q.new_zeros(T, heads, values.shape[-1])
    for t in range(T):
        seen = max(0, (t + 1 - c["nsa_block"]) // c["nsa_stride"] + 1)
        first = max(0, t + 1 - c["nsa_window"])
        for g in range(groups):
            own = slice(g * each, (g + 1) * each)
            blocks = selected_blocks(c, q[t, own], keys[:seen, g], t)
            at = torch.cat([torch.arange(j * c["nsa_select_block"], (j + 1) * c["nsa_select_block"]) for j in blocks])
            at = at[at <= t]
            o = (
                attend(q[t, own], keys[:seen, g], values[:seen, g]),
                attend(q[t, own], k["selected"][at, g], v["selected"][at, g]),
                attend(q[t, own], k["window"][first : t + 1, g], v["window"][first : t + 1, g]),
            )
            out[t, own] = sum(gates[t, i, own, None].sigmoid() * o[i] for i in range(3))
    return out


def gates_of(c, w, n):
    """(T, 3, H), before the sigmoid; rows past 3 H are padding."""
    if c["nsa_gate"] == "linear":
        g = n @ w["gate"].T + w["gate.bias"]
    else:
        g = F.silu(n @ w["gate.w1"].T + w["gate.w1.bias"]) @ w["gate.w2"].T + w["gate.w2.bias"]
    return g[:, : 3 * c["heads"]].view(-1, 3, c["heads"])


# -------------------------------------------------------------------------------------------------------------- model
def norm(c, w, name, x):
    if c["arch"] in ("simple", "mlp"):
        return F.layer_norm(x, (c["dim"],), w[name], w[name + ".bias"], c["norm_eps"])
    return F.rms_norm(x, (c["dim"],), w[name], c["norm_eps"])


def attention(c, w, n, angles):
    def project(name, positions):
        x = (n @ w[name].T).unflatten(-1, (-1, c["v_head_dim" if name[0] == "v" else "head_dim"]))
        return rotate(x, angles) if positions and angles is not None else x

    q = project("q", True)
    if c["attn"] == "dense":
        o = dense(q, project("k", True), project("v", False))
    else:
        k, v = ({b: project(f"{kind}_{b}", kind == "k") for b in BRANCHES} for kind in "kv")
        o = sparse(c, q, k, v, gates_of(c, w, n), w)
    return o.flatten(1) @ w["o"].T


def mlp(c, w, n):
    if c["arch"] == "llama":
        return (F.silu(n @ w["mlp.gate"].T) * (n @ w["mlp.up"].T)) @ w["mlp.down"].T
    h = F.gelu(F.linear(n, w["mlp.up"], w.get("mlp.up.bias")), approximate="tanh")
    return F.linear(h, w["mlp.down"], w.get("mlp.down.bias"))


def forward(c, weights, tokens):
    """tokens (T) -> logits (T, V)"""
    x = weights["embedding.weight"][tokens]
    angles = rotary_angles(c, c["head_dim"]) if c["arch"] in ("rope", "llama") else None
    if c["arch"] == "simple":
        x = x + added_positions(c)
    for i in range(c["depth"]):
        start = f"block.{i}."
        w = {name[len(start) :]: t for name, t in weights.items() if name.startswith(start)}
        of = {name[len("attention.") :]: t for name, t in w.items() if name.startswith("attention.")}
        if c["arch"] != "mlp":
            x = x + attention(c, of, norm(c, w, "norm1", x), angles)
        x = x + mlp(c, w, norm(c, w, "norm2", x) if c["arch"] != "mlp" else x)
    return norm(c, weights, "head.norm", x) @ weights["embedding.weight" if c["tie_embeddings"] else "head.weight"].T


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory that --export wrote")
    parser.add_argument("data", help="a token file or a text, as --val-data takes it")
    parser.add_argument("--seq", type=int, help="tokens a sequence (default: the model's max_positions)")
    parser.add_argument("--sequences", type=int, default=8, help="windows from the data's beginning (default: 8)")
    args = parser.parse_args()
    config, weights = read_folder(args.model)
    config["seq"] = args.seq or config["max_positions"]
    sampler = Sampler(open_corpus(args.data, config["vocab"], config["seq"], 0), config["seq"], 0)
    count = min(args.sequences, sampler.windows)
    total = 0.0
    for i in range(count):
        tokens = torch.from_numpy(sampler.corpus.read(i * config["seq"], config["seq"] + 1))
        total += F.cross_entropy(forward(config, weights, tokens[:-1]).double(), tokens[1:]).item()
    print(f"loss {total / count:.7f} over {count} sequences of {config['seq']} tokens")


if __name__ == "__main__":
    main()
