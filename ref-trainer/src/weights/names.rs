//! Where a parameter of ours lies in the files of its family, and under which name.
//!
//! ```text
//! ours                                        Llama, Qwen2    GPT-2 (old files lack "transformer.")
//! model.embed_tokens.weight         [v, d]    the same        transformer.wte.weight
//! model.embed_positions.weight      [p, d]                    transformer.wpe.weight
//! model.layers.N.self_attn.q_proj   [o, i]    the same        transformer.h.N.attn.c_attn  [i, 3 o], first third
//!                           k_proj, v_proj    the same                          the second, the third
//! model.layers.N.mlp.up_proj        [o, i]    the same        transformer.h.N.mlp.c_fc     [i, o]
//! ```
//!
//! GPT-2 stores matrices `[in, out]` (its Conv1D), and q, k and v as one.

use quintet_parallel_layers::Positions;
use quintet_planner::config::ModelConfig;

/// A part of a stored tensor that is a parameter of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Name in the file, in its newest spelling ([`canonical`]).
    pub name: String,
    /// A matrix that lies `[in, out]` in the file and `[out, in]` here.
    pub transposed: bool,
    /// Outputs lie in the file as so many equal parts, of which ours is one: `(place, parts)`.
    pub part: (usize, usize),
}

impl Stored {
    fn whole(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            transposed: false,
            part: (0, 1),
        }
    }

    /// The shape of the tensor in the file, from ours.
    #[must_use]
    pub fn shape(&self, ours: &[usize]) -> Vec<usize> {
        let mut shape = ours.to_vec();
        if let Some(outputs) = shape.first_mut() {
            *outputs *= self.part.1;
        }
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Where element `index` of ours lies in the file's tensor.
    #[must_use]
    pub fn at(&self, ours: &[usize], index: usize) -> usize {
        let (outputs, inputs) = match *ours {
            [outputs, inputs] => (outputs, inputs),
            _ => (ours.iter().product(), 1),
        };
        let (place, parts) = self.part;
        let (o, i) = (place * outputs + index / inputs, index % inputs);
        if self.transposed {
            i * outputs * parts + o
        } else {
            o * inputs + i
        }
    }
}

/// Where a parameter lies.
#[must_use]
pub fn stored(model: &ModelConfig, name: &str) -> Stored {
    match model.architecture.positions {
        Positions::Learned(_) => gpt2(name),
        Positions::Rotary | Positions::PartRotary(_) => Stored::whole(name),
    }
}

fn gpt2(name: &str) -> Stored {
    let Some((layer, rest)) = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
    else {
        return Stored::whole(match name {
            "model.embed_tokens.weight" => "transformer.wte.weight",
            "model.embed_positions.weight" => "transformer.wpe.weight",
            "model.norm.weight" => "transformer.ln_f.weight",
            "model.norm.bias" => "transformer.ln_f.bias",
            other => other,
        });
    };
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, ""));
    let (theirs, matrix, part) = match part {
        "input_layernorm" => ("ln_1", false, (0, 1)),
        "post_attention_layernorm" => ("ln_2", false, (0, 1)),
        "self_attn.q_proj" => ("attn.c_attn", true, (0, 3)),
        "self_attn.k_proj" => ("attn.c_attn", true, (1, 3)),
        "self_attn.v_proj" => ("attn.c_attn", true, (2, 3)),
        "self_attn.o_proj" => ("attn.c_proj", true, (0, 1)),
        "mlp.up_proj" => ("mlp.c_fc", true, (0, 1)),
        "mlp.down_proj" => ("mlp.c_proj", true, (0, 1)),
        other => (other, false, (0, 1)),
    };
    Stored {
        name: format!("transformer.h.{layer}.{theirs}.{kind}"),
        transposed: matrix && kind == "weight",
        part,
    }
}

/// A name as the newest files of the family spell it.
#[must_use]
pub fn canonical(model: &ModelConfig, name: &str) -> String {
    let gpt2 = matches!(model.architecture.positions, Positions::Learned(_));
    let old = ["wte.", "wpe.", "ln_f.", "h."];
    if gpt2 && old.iter().any(|start| name.starts_with(start)) {
        return format!("transformer.{name}");
    }
    name.to_string()
}

/// Whether a file may hold this beside the parameters: tables that other code keeps, and the
/// head of a tied model, which is its embedding.
#[must_use]
pub fn beside(model: &ModelConfig, name: &str) -> bool {
    let table = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
    table.iter().any(|end| name.ends_with(end)) || (model.tied && name == "lm_head.weight")
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_parallel_layers::Architecture;

    #[test]
    fn a_third_of_a_transposed_matrix() {
        let model = ModelConfig {
            architecture: Architecture::gpt2(8),
            ..crate::job::Job::default().model
        };
        let k = stored(&model, "model.layers.3.self_attn.k_proj.weight");
        assert_eq!(k.name, "transformer.h.3.attn.c_attn.weight");
        assert_eq!(k.shape(&[2, 5]), [5, 6]);
        // Output 1, input 4 of k: row 4 of the file, column 2 + 1.
        assert_eq!(k.at(&[2, 5], 9), 4 * 6 + 3);
        let bias = stored(&model, "model.layers.3.self_attn.v_proj.bias");
        assert_eq!((bias.shape(&[2]), bias.at(&[2], 1)), (vec![6], 5));
        assert_eq!(
            canonical(&model, "h.0.ln_1.bias"),
            "transformer.h.0.ln_1.bias"
        );
    }
}
