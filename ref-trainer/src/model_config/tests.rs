use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::{Architecture, Positions};

fn good() -> Map<String, Value> {
    let text = r#"{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
        "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02
    }"#;
    serde_json::from_str(text).unwrap()
}

fn parse(keys: &Map<String, Value>) -> Result<Model, ModelError> {
    Model::from_json("m/config.json", &Value::from(keys.clone()).to_string())
}

/// What is said of the good file with one key changed.
fn said(key: &str, value: Value) -> String {
    let mut keys = good();
    keys.insert(key.into(), value);
    parse(&keys).unwrap_err().to_string()
}

#[test]
fn a_llama_file_is_read() {
    let model = parse(&good()).unwrap();
    let expected = ModelConfig {
        vocab: 32000,
        hidden: 2048,
        layers: 22,
        heads: 32,
        kv_heads: 4,
        head_dim: 64,
        ffn: 5632,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tied: false,
        moe: None,
        window: None,
        dropout: 0.0,
        architecture: Architecture::LLAMA,
    };
    assert_eq!((model.config, model.seq), (expected, 1024));
    assert_eq!(model.max_positions, 2048);
}

#[test]
fn absent_keys_take_hugging_faces_defaults() {
    let mut keys = good();
    for key in [
        "num_key_value_heads",
        "tie_word_embeddings",
        "max_position_embeddings",
    ] {
        keys.remove(key);
    }
    keys.insert("head_dim".into(), Value::Null);
    let config = parse(&keys).unwrap().config;
    assert_eq!(
        (config.kv_heads, config.head_dim, config.tied),
        (32, 64, false)
    );
    keys.insert("head_dim".into(), json!(128));
    assert_eq!(parse(&keys).unwrap().config.head_dim, 128);
    keys.insert(
        "rope_parameters".into(),
        json!({"rope_theta": 5e5, "rope_type": "default"}),
    );
    assert_eq!(parse(&keys).unwrap().config.rope_theta, 5e5);
    keys.insert("rope_theta".into(), json!(5e5));
    assert_eq!(parse(&keys).unwrap().config.rope_theta, 5e5);
    keys.insert("rope_theta".into(), json!(1e4));
    assert!(
        parse(&keys)
            .unwrap_err()
            .to_string()
            .contains("they must agree")
    );
}

#[test]
fn presets_are_models_and_survive_their_own_json() {
    for (name, params) in [
        ("tiny", 200_000),
        ("bench-s", 3_200_000),
        ("bench-m", 26_000_000),
    ] {
        let model = Model::named(name).unwrap();
        let shapes = crate::oracle::param_shapes(&model.config).into_iter();
        let count: usize = shapes
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        assert!(count.abs_diff(params) < params / 10, "{name} {count}");
        let batch = quintet_planner::config::Batch {
            seq: model.seq,
            micro_batch: 1,
            global_batch: model.global_batch,
        };
        let single = quintet_planner::config::Layout::single();
        quintet_planner::config::validate(&model.config, &single, &batch).unwrap();
        let again = Model::from_json(name, &model.to_json().unwrap()).unwrap();
        assert_eq!((again.config, again.seq), (model.config, model.seq));
    }
}

#[test]
fn what_we_would_compute_wrongly_is_refused() {
    for (key, value, expected) in [
        (
            "model_type",
            json!("mistral"),
            "model_type is \"mistral\"; computed here are llama",
        ),
        (
            "architectures",
            json!(["Qwen3ForCausalLM"]),
            "architectures is [\"Qwen3ForCausalLM\"]",
        ),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("attention_bias", json!(true), "attention_bias is true"),
        ("partial_rotary_factor", json!(0.5), "whole heads"),
        ("mlp_bias", json!(true), "mlp_bias is true"),
        ("num_local_experts", json!(8), "has no experts"),
        ("num_experts", json!(8), "mixtral, qwen3_moe and glm4_moe"),
        (
            "quantization_config",
            json!({"bits": 4}),
            "quantization_config is given",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0}),
            "rope_scaling has",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
            "unscaled rotary positions",
        ),
        (
            "rope_parameters",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor is 0.5",
        ),
        (
            "rope_parameters",
            json!("default"),
            "must be an object or null",
        ),
    ] {
        let said = said(key, value);
        assert!(
            said.starts_with("model m/config.json: ") && said.contains(expected),
            "{said}"
        );
    }
    let mut keys = good();
    keys.remove("model_type");
    assert!(parse(&keys).is_ok());
    keys.remove("architectures");
    assert!(
        parse(&keys)
            .unwrap_err()
            .to_string()
            .contains("neither model_type nor")
    );
}

#[test]
fn missing_mistyped_and_absurd_values_are_refused() {
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ] {
        for value in [
            json!(0),
            json!(-4),
            json!(64.5),
            json!("64"),
            json!(u64::MAX),
            json!([64]),
        ] {
            let said = said(key, value);
            assert!(
                said.contains(&format!("{key} is ")) && said.contains("whole number"),
                "{said}"
            );
        }
        assert!(said(key, Value::Null).contains(&format!("{key} is missing")));
    }
    for (key, value, expected) in [
        ("rms_norm_eps", Value::Null, "rms_norm_eps is missing"),
        ("rms_norm_eps", json!("1e-5"), "it must be a number"),
        ("rms_norm_eps", json!(0), "between 0 and 1"),
        ("rope_theta", json!(-1), "must be above 1"),
        (
            "num_key_value_heads",
            json!(5),
            "does not divide num_attention_heads 32",
        ),
        (
            "num_attention_heads",
            json!(36),
            "36 heads do not divide a width of 2048",
        ),
        ("head_dim", json!(63), "odd"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        ("max_position_embeddings", json!(0), "whole number"),
    ] {
        let said = said(key, value);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn files_and_names_that_are_none_are_refused() {
    let said = |name: &str| Model::named(name).unwrap_err().to_string();
    assert!(said("bench-xl").contains("no such preset or file"));
    let text = |text: &str| Model::from_json("c", text).unwrap_err().to_string();
    assert!(text("").contains("not JSON"));
    assert!(text("{\"hidden_size\": 4").contains("not JSON"));
    assert!(text("[]").contains("not a JSON object"));
    assert!(text(&"[".repeat(100_000)).contains("not JSON"));

    let folder = std::env::temp_dir().join(format!("quintet-model-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let name = folder.to_str().unwrap();
    assert!(said(name).contains("no such preset or file"));
    std::fs::write(folder.join("config.json"), Model::tiny().to_json().unwrap()).unwrap();
    assert_eq!(Model::named(name).unwrap().config, Model::tiny().config);
    std::fs::write(folder.join("config.json"), [0xFF, 0xFE]).unwrap();
    assert!(said(name).contains("cannot be read"));
    std::fs::remove_dir_all(&folder).unwrap();
}

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// A published Mixtral, Qwen3-MoE and Glm4Moe, in older and in newer keys.
fn with_experts() -> [(&'static str, [Map<String, Value>; 2]); 3] {
    let shape = json!({
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 100, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096,
        "tie_word_embeddings": false, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        "output_router_logits": false, "attention_dropout": 0.0,
    });
    let of = |more: Value| {
        let mut keys = object(shape.clone());
        keys.extend(object(more));
        keys
    };
    let mixtral = of(json!({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 112,
        "num_local_experts": 8, "rope_theta": 1e6, "sliding_window": null,
    }));
    let qwen3 = of(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 96,
        "moe_intermediate_size": 24, "num_experts": 16, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [1, 0], "head_dim": 16, "rope_theta": 5e6, "use_sliding_window": false,
        "sliding_window": null, "max_window_layers": 5, "rope_scaling": null, "attention_bias": false,
    }));
    let glm4 = of(json!({
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "intermediate_size": 96,
        "moe_intermediate_size": 24, "n_routed_experts": 16, "n_shared_experts": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 3, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "head_dim": 22, "partial_rotary_factor": 0.2728, "rope_theta": 1e5, "use_qk_norm": true,
        "attention_bias": true, "num_nextn_predict_layers": 1,
    }));
    let newer = |keys: &Map<String, Value>| {
        let mut keys = keys.clone();
        let mut rope = object(json!({"rope_type": "default"}));
        for key in ["rope_theta", "partial_rotary_factor"] {
            rope.extend(keys.remove(key).map(|value| (key.to_string(), value)));
        }
        keys.insert("rope_parameters".into(), Value::Object(rope));
        for key in ["num_experts", "n_routed_experts"] {
            let spelt = keys.remove(key);
            keys.extend(spelt.map(|value| ("num_local_experts".to_string(), value)));
        }
        keys
    };
    [
        ("mixtral", mixtral),
        ("qwen3_moe", qwen3),
        ("glm4_moe", glm4),
    ]
    .map(|(name, older)| (name, [older.clone(), newer(&older)]))
}

#[test]
fn models_with_experts_are_read_in_older_and_newer_keys() {
    let config = |heads: usize, ffn, rope_theta, moe, architecture| ModelConfig {
        vocab: 100,
        hidden: 64,
        layers: 5,
        heads: 8,
        kv_heads: 2,
        head_dim: heads,
        ffn,
        rope_theta,
        norm_eps: 1e-6,
        tied: false,
        moe: Some(moe),
        window: None,
        dropout: 0.0,
        architecture,
    };
    let (qk_norm, qkv_bias) = (true, true);
    let expected = [
        config(8, 112, 1e6, MoeConfig::new(8, 2, 112), Architecture::LLAMA),
        config(
            16,
            96,
            5e6,
            MoeConfig {
                first_dense: 2,
                ..MoeConfig::new(16, 2, 24)
            },
            Architecture {
                qk_norm,
                ..Architecture::LLAMA
            },
        ),
        config(
            22,
            96,
            1e5,
            MoeConfig {
                score: Score::Sigmoid,
                scale: 2.5,
                selection_bias: true,
                shared_ffn: 48,
                first_dense: 3,
                ..MoeConfig::new(16, 2, 24)
            },
            Architecture {
                qk_norm,
                qkv_bias,
                positions: Positions::PartRotary(6),
                ..Architecture::LLAMA
            },
        ),
    ];
    for ((name, spelt), config) in with_experts().into_iter().zip(expected) {
        for keys in spelt {
            let model = parse(&keys).unwrap();
            assert_eq!(model.config, config, "{name}");
            assert_eq!(model.family().unwrap().model_type(), name);
            let again = Model::from_json(name, &model.to_json().unwrap()).unwrap();
            assert_eq!(again, model, "{name}");
        }
    }
}

#[test]
fn experts_that_we_would_compute_wrongly_are_refused() {
    let cases = [
        (
            0,
            "num_experts_per_tok",
            json!(9),
            "more than the 8 experts",
        ),
        (0, "num_experts_per_tok", Value::Null, "is missing"),
        (0, "num_key_value_heads", Value::Null, "is missing"),
        (0, "num_local_experts", Value::Null, "is missing"),
        (0, "num_local_experts", json!(0), "whole number"),
        (0, "num_experts", json!(4), "must agree"),
        (0, "router_jitter_noise", json!(0.1), "router_jitter_noise"),
        (
            0,
            "output_router_logits",
            json!(true),
            "--moe-aux-loss-coeff",
        ),
        (0, "partial_rotary_factor", json!(0.5), "whole heads"),
        (
            1,
            "decoder_sparse_step",
            json!(2),
            "decoder_sparse_step is 2",
        ),
        (1, "mlp_only_layers", json!([1]), "must list the first"),
        (1, "mlp_only_layers", json!([0, 2]), "must list the first"),
        (1, "mlp_only_layers", json!(3), "must list the first"),
        (1, "mlp_only_layers", json!(["0"]), "must list the first"),
        (1, "use_sliding_window", json!(true), "use_sliding_window"),
        (1, "attention_bias", json!(true), "only false"),
        (1, "moe_intermediate_size", Value::Null, "is missing"),
        (2, "n_group", json!(8), "n_group is 8"),
        (2, "topk_group", json!(2), "topk_group is 2"),
        (2, "n_shared_experts", json!(0), "n_shared_experts is 0"),
        (2, "routed_scaling_factor", json!(-1), "from 0"),
        (2, "first_k_dense_replace", json!(-1), "whole number"),
        (2, "partial_rotary_factor", json!(0.25), "odd"),
        (2, "partial_rotary_factor", json!(1.5), "at most 1"),
        (2, "norm_topk_prob", json!(1), "true or false"),
    ];
    for (family, key, value, expected) in cases {
        let mut keys = with_experts()[family].1[0].clone();
        keys.insert(key.into(), value);
        let said = parse(&keys).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
}

/// A file that says less than the model is worse than none.
#[test]
fn what_no_file_says_is_not_written() {
    let no = |change: fn(&mut ModelConfig)| {
        let mut model = Model::tiny_moe();
        change(&mut model.config);
        model.to_json().unwrap_err().to_string()
    };
    fn moe(config: &mut ModelConfig) -> &mut MoeConfig {
        config.moe.as_mut().unwrap()
    }
    let cases: [(fn(&mut ModelConfig), &str); 6] = [
        (
            |c| moe(c).capacity_factor = Some(1.5),
            "mixtral comes nearest, and cannot say a capacity",
        ),
        (
            |c| (moe(c).shared_ffn, moe(c).shared_gate) = (8, true),
            "the shared experts, a gate of the shared experts",
        ),
        (|c| moe(c).selection_bias = true, "how the router scores"),
        (|c| moe(c).first_dense = 1, "the dense blocks"),
        (
            |c| (c.moe, c.window) = (None, Some(5)),
            "llama comes nearest, and cannot say a window",
        ),
        (
            |c| (c.moe, c.architecture.qk_norm) = (None, true),
            "its norms, MLP, positions and biases",
        ),
    ];
    for (change, expected) in cases {
        let said = no(change);
        assert!(said.contains(expected), "{said}");
    }
    let mut windowed = Model::tiny_moe();
    windowed.config.window = Some(5);
    let again = Model::from_json("x", &windowed.to_json().unwrap()).unwrap();
    assert_eq!(again.config.window, Some(5));
    let mut capped = Model::tiny();
    capped.config.architecture.softcap = Some(50.0);
    let text = capped.to_json().unwrap();
    assert!(text.contains("\"attn_logit_softcapping\": 50.0"), "{text}");
    let again = Model::from_json("x", &text).unwrap();
    assert_eq!(again.config.architecture.softcap, Some(50.0));
    let refused = Model::from_json("x", &text.replace("50.0", "0.0")).unwrap_err();
    assert!(refused.to_string().contains("must be above 0"), "{refused}");
}

proptest! {
    /// Whatever a key holds, a file is a model that the planner takes on one rank, or is refused.
    #[test]
    fn any_value_of_any_key_is_read_or_refused(
        key in proptest::sample::select(
            with_experts().iter().flat_map(|(_, [older, newer])| older.keys().chain(newer.keys()))
                .chain(good().keys()).cloned().collect::<Vec<_>>()
        ),
        value in proptest::sample::select(vec![
            json!(null), json!(true), json!(0), json!(1), json!(3), json!(-1), json!(1e300), json!(u64::MAX),
            json!("x"), json!(""), json!([]), json!({}), json!({"rope_type": 3}), json!([null]),
        ]),
    ) {
        let all = with_experts().into_iter().flat_map(|(_, spelt)| spelt);
        for mut keys in all.chain([good()]) {
            keys.insert(key.clone(), value.clone());
            let Ok(model) = parse(&keys) else { continue };
            let batch = quintet_planner::config::Batch { seq: model.seq, micro_batch: 1, global_batch: 8 };
            let single = quintet_planner::config::Layout::single();
            prop_assert!(quintet_planner::config::validate(&model.config, &single, &batch).is_ok());
        }
    }
}
