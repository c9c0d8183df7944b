#!/usr/bin/env python3
"""A Llama with random weights made by transformers goes into ./train, trains, comes out, and is read by transformers.

  python3 peers/hf_round_trip.py --work DIR                                    a tiny one, 2 ranks on the CPU
  python3 peers/hf_round_trip.py --work DIR --size 1b --ranks 2 --batch 4      the shape of Llama 3.2 1B, on GPUs

Prints the loss that ./train said after the last step and the one that transformers finds in the exported model on the
same tokens, and what lies between them; ends with status 1 if that is more than --most. In fp32 they agree to 1e-5 or
so; in bf16 the program rounds activations and transformers is asked in fp32, so that --most is a matter of rounding.
"""

import argparse
import json
import os
import subprocess
import sys

from libraries import require

require("numpy", "torch", "transformers")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {
    "tiny": dict(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=512, original=32, rope_theta=10000.0, tie=False,
    ),
    "1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, original=8192, rope_theta=500000.0, tie=True,
    ),
}  # fmt: skip


def make_model(args, path):
    """Random weights of transformers' own making, in its own format."""
    sizes = dict(SIZES[args.size])
    rope = SCALING | {"original_max_position_embeddings": sizes.pop("original"), "rope_theta": sizes["rope_theta"]}
    tie = sizes.pop("tie")
    config = LlamaConfig(**sizes, rope_scaling=rope, tie_word_embeddings=tie, rms_norm_eps=1e-5)
    torch.manual_seed(args.seed)
    LlamaForCausalLM(config).to(torch.bfloat16 if args.dtype == "bf16" else torch.float32).save_pretrained(path)
    return config.vocab_size


def make_tokens(path, vocab, count, seed):
    """Something to learn: each token follows from the one before, most of the time."""
    rng = np.random.default_rng(seed)
    follows, noise = rng.permutation(vocab), rng.integers(0, vocab, count)
    tokens = np.empty(count, dtype="<u4")
    tokens[0] = 0
    surprise = rng.random(count) < 0.2
    for i in range(1, count):
        tokens[i] = noise[i] if surprise[i] else follows[tokens[i - 1]]
    with open(path, "wb") as f:
        f.write(b"TOKENS01" + np.array([4, vocab], dtype="<u4").tobytes() + np.array([count], dtype="<u8").tobytes())
        tokens.tofile(f)
    return tokens.astype(np.int64)


def train(args, work, sequences):
    """Returns the loss of the validation behind the last step."""
    log = os.path.join(work, "log.jsonl")
    command = ["mpirun", *args.mpirun_flags.split(), "-np", str(args.ranks), "./train"]
    options = {
        "init": os.path.join(work, "made"), "export": os.path.join(work, "trained"), "export-dtype": "fp32",
        "data": os.path.join(work, "train.bin"), "val-data": os.path.join(work, "val.bin"), "log": log,
        "val-every": args.steps, "val-batches": 1, "steps": args.steps, "seq": args.seq,
        "global-batch": sequences, "batch": args.batch, "lr": args.lr, "param-dtype": args.dtype,
    }  # fmt: skip
    options["grad-accum"] = -(-sequences // (args.batch * args.ranks))
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    command += args.more.split()
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)
    with open(log) as f:
        return [r["val_loss"] for r in map(json.loads, f) if r.get("val_loss") is not None][-1]


@torch.no_grad()
def loss_in_transformers(args, path, tokens, sequences):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(args.device)
    total = 0.0
    for i in range(sequences):
        window = torch.from_numpy(tokens[i * args.seq : (i + 1) * args.seq + 1]).to(args.device)
        logits = model(window[None, :-1]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, window[1:]).item()
    return total / sequences


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True, help="directory for models, tokens and the log; must not be there")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank's micro-batch")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights that go in, and to train in")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=1e-4, help="the largest difference of the two losses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of transformers")
    parser.add_argument("--mpirun-flags", default=os.environ.get("MPIRUN_FLAGS", ""))
    parser.add_argument("--more", default="", help="more options of ./train")
    args = parser.parse_args()
    os.makedirs(args.work)
    sequences = 2 * args.batch * args.ranks  # of a step, and of the validation
    vocab = make_model(args, os.path.join(args.work, "made"))
    make_tokens(os.path.join(args.work, "train.bin"), vocab, 4 * sequences * args.seq * args.steps + 1, args.seed)
    tokens = make_tokens(os.path.join(args.work, "val.bin"), vocab, sequences * args.seq + 1, args.seed)
    ours = train(args, args.work, sequences)
    theirs = loss_in_transformers(args, os.path.join(args.work, "trained"), tokens, sequences)
    print(f"loss of ./train {ours:.7f}, of transformers {theirs:.7f}, difference {abs(ours - theirs):.1e}")
    sys.exit(0 if abs(ours - theirs) <= args.most else 1)


if __name__ == "__main__":
    main()
