//! Published models, as their `config.json` gives them.

use alloc::string::String;

use quintet_parallel_layers::Architecture;
use quintet_parallel_layers::moe::Score;

use super::{Latent, Shape};
use crate::ModelConfig;
use crate::config::MoeConfig;

/// The models known by name.
pub const NAMES: [&str; 14] = [
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "qwen2.5-7b",
    "qwen2.5-72b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v3",
    "gpt3-175b",
];

/// Vocabulary, width, layers; heads, KV heads, their width; width of the MLP.
type Widths = ([usize; 3], [usize; 3], usize);

pub(super) fn named(name: &str) -> Option<Shape> {
    let (widths, max_positions): (Widths, usize) = match name {
        "llama2-7b" => (([32_000, 4096, 32], [32, 32, 128], 11_008), 4096),
        "llama3-8b" => (([128_256, 4096, 32], [32, 8, 128], 14_336), 8192),
        "llama3-70b" => (([128_256, 8192, 80], [64, 8, 128], 28_672), 8192),
        "llama3-405b" => (([128_256, 16_384, 126], [128, 8, 128], 53_248), 131_072),
        "qwen2.5-7b" => (([152_064, 3584, 28], [28, 4, 128], 18_944), 131_072),
        "qwen2.5-72b" => (([152_064, 8192, 80], [64, 8, 128], 29_568), 131_072),
        "qwen3-8b" => (([151_936, 4096, 36], [32, 8, 128], 12_288), 40_960),
        "qwen3-32b" => (([151_936, 5120, 64], [64, 8, 128], 25_600), 40_960),
        "qwen3-30b-a3b" => (([151_936, 2048, 48], [32, 4, 128], 6144), 40_960),
        "qwen3-235b-a22b" => (([151_936, 4096, 94], [64, 4, 128], 12_288), 40_960),
        "mixtral-8x7b" => (([32_000, 4096, 32], [32, 8, 128], 14_336), 32_768),
        "mixtral-8x22b" => (([32_000, 6144, 56], [48, 8, 128], 16_384), 65_536),
        "deepseek-v3" => (([129_280, 7168, 61], [128, 128, 160], 18_432), 163_840),
        // Brown et al. 2020, with Megatron's padded vocabulary.
        "gpt3-175b" => (([51_200, 12_288, 96], [96, 96, 128], 49_152), 2048),
        _ => return None,
    };
    let ([vocab, hidden, layers], [heads, kv_heads, head_dim], ffn) = widths;
    let architecture = match name {
        "gpt3-175b" => Architecture::gpt2(max_positions),
        _ => Architecture {
            qkv_bias: name.starts_with("qwen2"),
            qk_norm: name.starts_with("qwen3"),
            ..Architecture::LLAMA
        },
    };
    let config = ModelConfig {
        vocab,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tied: name == "gpt3-175b",
        moe: experts(name),
        window: None,
        dropout: 0.0,
        architecture,
    };
    let latent = (name == "deepseek-v3").then_some(Latent {
        q_rank: Some(1536),
        kv_rank: 512,
        nope_dim: 128,
        rope_dim: 64,
        value_dim: 128,
    });
    Some(Shape {
        name: String::from(name),
        config,
        latent,
        max_positions,
    })
}

fn experts(name: &str) -> Option<MoeConfig> {
    Some(match name {
        "qwen3-30b-a3b" => MoeConfig::new(128, 8, 768),
        "qwen3-235b-a22b" => MoeConfig::new(128, 8, 1536),
        "mixtral-8x7b" => MoeConfig::new(8, 2, 14_336),
        "mixtral-8x22b" => MoeConfig::new(8, 2, 16_384),
        "deepseek-v3" => MoeConfig {
            score: Score::Sigmoid,
            scale: 2.5,
            selection_bias: true,
            shared_ffn: 2048,
            first_dense: 3,
            ..MoeConfig::new(256, 8, 2048)
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of parameters that the published checkpoints hold (Hugging Face's safetensors
    /// index of each), and what the models' cards call active.
    #[test]
    fn parameters_are_those_of_the_checkpoints() {
        for (name, all) in [
            ("llama2-7b", 6_738_415_616),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-32b", 32_762_123_264),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("mixtral-8x7b", 46_702_792_704),
            ("mixtral-8x22b", 140_620_634_112),
            // Without the module that predicts a second token, which the checkpoint adds.
            ("deepseek-v3", 671_026_419_200),
        ] {
            assert_eq!(Shape::named(name).unwrap().parameters(), all, "{name}");
        }
        for (name, billions) in [
            ("mixtral-8x7b", 12.9),
            ("qwen3-30b-a3b", 3.3),
            ("qwen3-235b-a22b", 22.0),
            ("deepseek-v3", 37.5),
            ("llama3-8b", 8.03),
        ] {
            let active = Shape::named(name).unwrap().active() as f64 / 1e9;
            assert!((active / billions - 1.0).abs() < 0.03, "{name} {active}");
        }
    }

    #[test]
    fn every_name_is_a_model_and_no_other() {
        for name in super::super::NAMES {
            let shape = Shape::named(name).unwrap();
            assert_eq!(shape.name, name);
            assert!(shape.config.heads.is_multiple_of(shape.config.kv_heads));
            if let Some(latent) = shape.latent {
                assert_eq!(shape.config.head_dim, latent.mean_dim());
            }
        }
        assert_eq!(Shape::named("llama4"), None);
    }

    /// A latent cache cannot be cut by heads: each of 8 tensor parallel ranks keeps all of it, and
    /// 8 data parallel ranks an eighth of the tokens each.
    #[test]
    fn a_latent_cache_is_on_every_rank() {
        let (v3, llama) = (named("deepseek-v3").unwrap(), named("llama3-70b").unwrap());
        assert_eq!(v3.cache_bytes(1, 2), 61 * 576 * 2);
        assert_eq!(v3.cache_bytes(8, 2), v3.cache_bytes(1, 2));
        assert_eq!(llama.cache_bytes(8, 2) * 8, llama.cache_bytes(1, 2));
        assert_eq!(llama.cache_bytes(16, 2), llama.cache_bytes(8, 2));
    }
}
