#!/usr/bin/env python3
"""Makes the model beside it: a tiny random Llama as transformers saves it, and what transformers finds in it.

  python3 test/hf-llama/make.py

expected.json: tokens (T), and for some positions the log-probabilities of every next token, in fp32 and in bf16 of the
same weights. Grouped heads, Llama 3's scaling with a length well below T, weights in bf16, two files with an index.
"""

import json
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
config = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=3e-4, rope_theta=10000.0, initializer_range=0.15,
    rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)  # fmt: skip
torch.manual_seed(18)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    for name, p in model.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is skipped
            p.uniform_(0.5, 1.5)
model.to(torch.bfloat16).save_pretrained(here, max_shard_size="100KB")
tokens = torch.randint(0, config.vocab_size, (48,))
positions = [0, 1, 7, 15, 30, 47]
expected = {"tokens": tokens.tolist(), "positions": positions}
with torch.no_grad():
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        # Read back, since .to() would round the angles of positions too.
        logits = LlamaForCausalLM.from_pretrained(here, dtype=dtype).eval()(tokens[None]).logits[0, positions].double()
        expected[name] = [[round(x, 7) for x in row] for row in logits.log_softmax(-1).tolist()]
with open(os.path.join(here, "expected.json"), "w") as f:
    json.dump(expected, f)
    f.write("\n")
