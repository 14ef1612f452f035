use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;
use quintet_parallel_layers::Architecture;

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
        let again = Model::from_json(name, &model.to_json()).unwrap();
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
            "partial_rotary_factor 0.5",
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
    std::fs::write(folder.join("config.json"), Model::tiny().to_json()).unwrap();
    assert_eq!(Model::named(name).unwrap().config, Model::tiny().config);
    std::fs::write(folder.join("config.json"), [0xFF, 0xFE]).unwrap();
    assert!(said(name).contains("cannot be read"));
    std::fs::remove_dir_all(&folder).unwrap();
}

proptest! {
    /// Whatever a key holds, a file is a model that the planner takes on one rank, or is refused.
    #[test]
    fn any_value_of_any_key_is_read_or_refused(
        key in proptest::sample::select(good().keys().cloned().collect::<Vec<_>>()),
        value in proptest::sample::select(vec![
            json!(null), json!(true), json!(0), json!(1), json!(3), json!(-1), json!(1e300), json!(u64::MAX),
            json!("x"), json!(""), json!([]), json!({}), json!({"rope_type": 3}), json!([null]),
        ]),
    ) {
        let mut keys = good();
        keys.insert(key, value);
        if let Ok(model) = parse(&keys) {
            let batch = quintet_planner::config::Batch { seq: model.seq, micro_batch: 1, global_batch: 8 };
            let single = quintet_planner::config::Layout::single();
            prop_assert!(quintet_planner::config::validate(&model.config, &single, &batch).is_ok());
        }
    }
}
