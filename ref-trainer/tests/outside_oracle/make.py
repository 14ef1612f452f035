#!/usr/bin/env python3
"""Makes the fixtures of the outside oracle: tiny random models, computed by Hugging Face transformers in float64.

    python3 -m venv VENV && VENV/bin/pip install torch transformers safetensors
    VENV/bin/python ref-trainer/tests/outside_oracle/make.py

For each architecture this is written beside this file:

    NAME/config.json             the model's config, as save_pretrained writes it
    NAME/model.safetensors       the parameters, as save_pretrained writes them (float32: their values are exact in it)
    NAME.expected.safetensors    tokens [b, s + 1] and mask [b, s] (int64), loss [1], and the gradient of each parameter
                                 (float64), under the name that the model itself gives it

The models of that package turn to float32 inside norms, rotary positions, routers and softmaxes. Here every such turn leads to
float64 instead, and a dispatch mode looks at each tensor that any operation makes: one of a lower type ends the run.
"""

import contextlib
import json
import os
import sys

import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Glm4MoeConfig, Glm4MoeForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig,
    MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
)

HERE = os.path.dirname(os.path.abspath(__file__))
LOW = (torch.float32, torch.float16, torch.bfloat16)
SAMPLES, POSITIONS = 2, 12

# What all rotary models here share: 4 query heads on 2 KV heads, width 4 each.
SMALL = dict(vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=32, rms_norm_eps=1e-5, attention_dropout=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=None)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=20, head_dim=4, tie_word_embeddings=False)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=20, head_dim=4, tie_word_embeddings=True)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=30, n_positions=16, n_embd=12, n_layer=2, n_head=4, n_inner=20, resid_pdrop=0.0,
                                         embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{**SMALL, "hidden_size": 16}, intermediate_size=20, tie_word_embeddings=True)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, intermediate_size=10, head_dim=4, num_local_experts=6, num_experts_per_tok=2,
                                                  sliding_window=None, tie_word_embeddings=False)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, head_dim=6, intermediate_size=20, moe_intermediate_size=8, num_experts=6,
                                                      num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=1,
                                                      mlp_only_layers=[0], tie_word_embeddings=False)),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig(**SMALL, head_dim=8, partial_rotary_factor=0.5, intermediate_size=20,
                                                   moe_intermediate_size=8, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
                                                   n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
                                                   routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True,
                                                   tie_word_embeddings=False)),
}


class OnlyDouble(TorchDispatchMode):
    """Ends the run at the first tensor of a lower type than float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in LOW:
                raise TypeError(f"{func} made a tensor of {tensor.dtype}")
        return out


@contextlib.contextmanager
def doubled():
    """Every turn to a lower float type leads to float64."""
    def up(dtype):
        return torch.float64 if dtype in LOW else dtype

    def lifted(function):
        def call(*args, **kwargs):
            args = [up(a) if isinstance(a, torch.dtype) else a for a in args]
            kwargs = {k: up(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
            return function(*args, **kwargs)
        return call

    places = [(torch.Tensor, "to"), (torch.Tensor, "type"), (functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"),
              (functional, "log_softmax"), (torch, "zeros"), (torch, "ones"), (torch, "full"), (torch, "arange"), (torch, "tensor"),
              (torch, "zeros_like"), (torch, "empty"), (torch, "full_like"), (torch, "histc"), (torch, "finfo")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    kept.append((torch.Tensor, "float", torch.Tensor.float))
    for owner, name, function in kept[:-1]:
        setattr(owner, name, lifted(function))
    torch.Tensor.float = torch.Tensor.double
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        for owner, name, function in kept:
            setattr(owner, name, function)


def redraw(model, seed):
    """Every parameter at random, norms, biases and the router's selection bias too, with values that float32 holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "e_score_correction_bias" in n]:
            normal = torch.randn(tensor.shape, generator=draw, dtype=torch.float32)
            if "norm" in name and name.endswith("weight") or name.split(".")[-2] in ("ln_1", "ln_2", "ln_f") and name.endswith("weight"):
                normal = 1 + 0.1 * normal
            elif tensor.dim() == 1:
                normal = 0.1 * normal
            else:
                normal = 0.25 * normal
            tensor.copy_(normal.to(torch.float32))


def make(name, kind, config, seed):
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = kind(config)
    redraw(model, seed)
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    model.save_pretrained(folder)
    for extra in ("generation_config.json",):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, extra))
    draw = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, config.vocab_size, (SAMPLES, POSITIONS + 1), generator=draw)
    mask = torch.rand((SAMPLES, POSITIONS), generator=draw) > 0.2
    with doubled():
        model = model.double()
        for module in model.modules():  # frequencies were made in float32; make them again
            if hasattr(module, "inv_freq"):
                again = type(module)(config)
                module.inv_freq = again.inv_freq
                if hasattr(module, "original_inv_freq"):
                    module.original_inv_freq = again.inv_freq
        model.train()
        with OnlyDouble():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            each = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            loss = (each * mask.flatten()).sum() / mask.sum()
            loss.backward()
        expected = {n: p.grad.detach().clone().contiguous() for n, p in model.named_parameters()}
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > 20_000:
        sys.exit(f"{name} has {parameters} parameters; at most 20,000 are stored")
    expected["loss"] = loss.detach().reshape(1)
    expected["tokens"] = tokens
    expected["mask"] = mask.long()
    save_file(expected, f"{folder}.expected.safetensors")
    print(json.dumps({"model": name, "parameters": parameters, "loss": loss.item()}))


if __name__ == "__main__":
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        make(name, kind, config, 100 * seed + 7)
