"""Makes the numbers of the oracle's test `hugging_face_computes_the_same`.

Another's Llama (transformers' Flax one), differentiated by JAX, on parameters from a formula. Its source holds
float32 and the rotary base as constants; they are replaced by float64 and the config's base, and nothing else is.
Run by hand: pip install 'transformers==4.46.3' 'jax[cpu]==0.4.35' 'flax==0.10.2'
"""

import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
from transformers import LlamaConfig

NAME = "transformers.models.llama.modeling_flax_llama"
source = importlib.util.find_spec(NAME).loader.get_source(NAME)
source = source.replace("float32", "float64").replace("(10000 **", "(100.0 **")
llama = types.ModuleType(NAME)
llama.__package__ = NAME.rpartition(".")[0]
sys.modules[NAME] = llama
exec(compile(source, NAME, "exec"), llama.__dict__)

jax.config.update("jax_enable_x64", True)
config = LlamaConfig(
    vocab_size=13, hidden_size=24, intermediate_size=15, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=100.0, max_position_embeddings=16,
)
d, kv, f, v = 24, 12, 15, 13
shapes = {"model.embed_tokens.weight": (v, d)}
for layer in range(2):
    for part, shape in [
        ("input_layernorm", (d,)), ("self_attn.q_proj", (d, d)), ("self_attn.k_proj", (kv, d)),
        ("self_attn.v_proj", (kv, d)), ("self_attn.o_proj", (d, d)), ("post_attention_layernorm", (d,)),
        ("mlp.gate_proj", (f, d)), ("mlp.up_proj", (f, d)), ("mlp.down_proj", (d, f)),
    ]:
        shapes[f"model.layers.{layer}.{part}.weight"] = shape
shapes["model.norm.weight"] = (d,)
shapes["lm_head.weight"] = (v, d)


def value(k, shape):
    """Element i of parameter k: sin(i^2 + k), around 1 for a norm."""
    i = jnp.arange(int(jnp.prod(jnp.array(shape))), dtype=jnp.float64)
    x = jnp.sin(i * i + k).reshape(shape)
    return 0.4 * x if len(shape) == 2 else 1 + 0.2 * x


def tree(params):
    """Flax keeps [in, out], and names the leaves of norms, tables and matrices differently."""
    out = {}
    for name, w in params.items():
        *path, _ = name.split(".")
        at = out
        for key in path[:-1]:
            at = at.setdefault(key, {})
        leaf = "embedding" if "embed" in name else "kernel" if w.ndim == 2 else "weight"
        at[path[-1]] = {leaf: w.T if leaf == "kernel" else w}
    return {"params": out}


module = llama.FlaxLlamaForCausalLMModule(config, dtype=jnp.float64)
tokens = jnp.array([[(5 * t * t + 3 * t + s) % v for t in range(10)] for s in range(2)])
mask = jnp.array([[(t + s) % 4 != 0 for t in range(9)] for s in range(2)])


def loss(params):
    inputs = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(9), inputs.shape)
    logits = module.apply(tree(params), inputs, jnp.ones_like(inputs), positions).logits
    logp = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    return -(picked * mask).sum() / mask.sum()


params = {name: value(k, shape) for k, (name, shape) in enumerate(shapes.items())}
total, grads = jax.value_and_grad(loss)(params)
print("loss", repr(float(total)))
for name, g in grads.items():
    weights = jnp.cos(jnp.arange(g.size, dtype=jnp.float64))
    print(f'("{name}", {float((g.reshape(-1) * weights).sum())!r}),')
