//! The oracle against another's model: Hugging Face's Flax Llama in f64, differentiated by JAX.
//! The numbers are printed by `assets/oracle_golden.py`.

use super::super::*;
use quintet_parallel_layers::Architecture;

const LOSS: f64 = 3.089474455089004;

/// Of each gradient g: sum of g[i] cos(i).
const GRADIENTS: &[(&str, f64)] = &[
    ("lm_head.weight", -0.6445749731318423),
    ("model.embed_tokens.weight", 1.6100030091074697),
    ("model.layers.0.input_layernorm.weight", 1.0921852111820654),
    ("model.layers.0.mlp.down_proj.weight", -0.21982478913021652),
    ("model.layers.0.mlp.gate_proj.weight", -0.20229182758048436),
    ("model.layers.0.mlp.up_proj.weight", -0.03149195381115254),
    (
        "model.layers.0.post_attention_layernorm.weight",
        -0.0946732567285071,
    ),
    (
        "model.layers.0.self_attn.k_proj.weight",
        -0.30826057675003754,
    ),
    (
        "model.layers.0.self_attn.o_proj.weight",
        -0.8127295473396242,
    ),
    ("model.layers.0.self_attn.q_proj.weight", 1.1227098152168762),
    ("model.layers.0.self_attn.v_proj.weight", 0.5043481603738983),
    ("model.layers.1.input_layernorm.weight", 0.03354599018258579),
    ("model.layers.1.mlp.down_proj.weight", 0.10607345521251131),
    ("model.layers.1.mlp.gate_proj.weight", 0.9477094694673741),
    ("model.layers.1.mlp.up_proj.weight", 0.9047547179417736),
    (
        "model.layers.1.post_attention_layernorm.weight",
        -0.030956058358777447,
    ),
    (
        "model.layers.1.self_attn.k_proj.weight",
        0.21827563506048925,
    ),
    ("model.layers.1.self_attn.o_proj.weight", -0.500584007749557),
    (
        "model.layers.1.self_attn.q_proj.weight",
        0.24669162547329815,
    ),
    ("model.layers.1.self_attn.v_proj.weight", 0.7796574148001674),
    ("model.norm.weight", 0.04194542036947316),
];

#[test]
fn hugging_face_computes_the_same() {
    let config = ModelConfig {
        vocab: 13,
        hidden: 24,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 15,
        rope_theta: 100.0,
        norm_eps: 1e-5,
        tied: false,
        moe: None,
        window: None,
        dropout: 0.0,
        architecture: Architecture::LLAMA,
    };
    let mut params = Params::new();
    for (k, (name, shape)) in param_shapes(&config).into_iter().enumerate() {
        let wave = (0..shape.iter().product()).map(|i: usize| ((i * i + k) as f64).sin());
        let values = match shape.len() {
            1 => wave.map(|x| 1.0 + 0.2 * x).collect(),
            _ => wave.map(|x| 0.4 * x).collect(),
        };
        params.insert(name, values);
    }
    let sample = |s: u32| Sample {
        tokens: (0..10).map(|t| (5 * t * t + 3 * t + s) % 13).collect(),
        mask: (0..9).map(|t| !(t + s).is_multiple_of(4)).collect(),
        documents: vec![],
    };
    let result = step(&config, &params, &[sample(0), sample(1)]).unwrap();
    assert!((result.loss - LOSS).abs() < 1e-12, "{}", result.loss);
    assert_eq!(result.grads.len(), GRADIENTS.len());
    for (name, expected) in GRADIENTS {
        let waved = result.grads[*name].iter().enumerate();
        let got: f64 = waved.map(|(i, g)| g * (i as f64).cos()).sum();
        assert!((got - expected).abs() < 1e-11, "{name} {got} {expected}");
    }
}
