//! Where a parameter of ours lies in the files of its family, and under which name.
//!
//! ```text
//! ours                                        Llama, Qwen2    GPT-2 (old files lack "transformer.")
//! model.embed_tokens.weight         [v, d]    the same        transformer.wte.weight
//! model.embed_positions.weight      [p, d]                    transformer.wpe.weight
//! model.layers.N.self_attn.q_proj   [o, i]    the same        transformer.h.N.attn.c_attn  [i, 3 o], first third
//!                           k_proj, v_proj    the same                          the second, the third
//! model.layers.N.mlp.up_proj        [o, i]    the same        transformer.h.N.mlp.c_fc     [i, o]
//!
//! model.layers.N.mlp.               each expert alone                            all experts fused
//!   experts.gate_proj [e, f, d]     mlp.experts.E.gate_proj (Mixtral: w1) [f, d]  mlp.experts.gate_up_proj [e, 2 f, d],
//!   experts.up_proj   [e, f, d]                   up_proj           (w3) [f, d]  first half, second half
//!   experts.down_proj [e, d, f]                   down_proj         (w2) [d, f]  mlp.experts.down_proj    [e, d, f]
//! ```
//!
//! GPT-2 stores matrices `[in, out]` (its Conv1D), and q, k and v as one. Mixtral's published files
//! say `block_sparse_moe` for `mlp`. Published files have experts alone; models in memory have them
//! fused since transformers 5, and files may, too: both are read, the first is written.

use std::ops::Range;

use quintet_parallel_layers::Positions;
use quintet_parallel_layers::moe::Score;
use quintet_planner::config::ModelConfig;

use crate::model_config::Family;

/// How the experts of a block lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Experts {
    /// Each has tensors of its own.
    Alone,
    /// All are one tensor, gate and up too.
    Fused,
}

/// A part of a stored tensor that is a parameter of ours, or one expert of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Name in the file, in its newest spelling ([`canonical`]).
    pub name: String,
    /// A matrix that lies `[in, out]` in the file and `[out, in]` here.
    pub transposed: bool,
    /// Outputs lie in the file as so many equal parts, of which ours is one: `(place, parts)`.
    pub part: (usize, usize),
    /// The only expert that is there; all of ours where absent.
    pub expert: Option<usize>,
}

impl Stored {
    fn whole(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            transposed: false,
            part: (0, 1),
            expert: None,
        }
    }

    /// The shape of the tensor in the file, from ours.
    #[must_use]
    pub fn shape(&self, ours: &[usize]) -> Vec<usize> {
        let mut shape = ours[usize::from(self.expert.is_some())..].to_vec();
        let outputs = shape.len().saturating_sub(2);
        if let Some(outputs) = shape.get_mut(outputs) {
            *outputs *= self.part.1;
        }
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// The elements of ours that are there.
    #[must_use]
    pub fn range(&self, ours: &[usize]) -> Range<usize> {
        let len: usize = ours.iter().product();
        match (self.expert, ours) {
            (Some(expert), [experts, ..]) => {
                let each = len / experts;
                expert * each..(expert + 1) * each
            }
            _ => 0..len,
        }
    }

    /// Where element `index` of ours, one of [`Stored::range`], lies in the file's tensor.
    #[must_use]
    pub fn at(&self, ours: &[usize], index: usize) -> usize {
        let (outputs, inputs) = match *ours {
            [.., outputs, inputs] => (outputs, inputs),
            _ => (ours.iter().product(), 1),
        };
        let (place, parts) = self.part;
        let index = index - self.range(ours).start;
        let (expert, index) = (index / (outputs * inputs), index % (outputs * inputs));
        let (o, i) = (place * outputs + index / inputs, index % inputs);
        let rows = outputs * parts;
        if self.transposed {
            i * rows + o
        } else {
            (expert * rows + o) * inputs + i
        }
    }
}

/// Where a parameter lies: one tensor, or one for each expert.
#[must_use]
pub fn stored(model: &ModelConfig, name: &str, experts: Experts) -> Vec<Stored> {
    if let Positions::Learned(_) = model.architecture.positions {
        return vec![gpt2(name)];
    }
    let Some((start, part)) = name.split_once(".mlp.experts.") else {
        return vec![Stored::whole(name)];
    };
    let part = part.trim_end_matches(".weight");
    match experts {
        Experts::Alone => {
            let count = model.moe.map_or(0, |moe| moe.experts);
            let alone = |expert| Stored {
                expert: Some(expert),
                ..Stored::whole(format!("{start}.mlp.experts.{expert}.{part}.weight"))
            };
            (0..count).map(alone).collect()
        }
        Experts::Fused => {
            let (theirs, part) = match part {
                "gate_proj" => ("gate_up_proj", (0, 2)),
                "up_proj" => ("gate_up_proj", (1, 2)),
                other => (other, (0, 1)),
            };
            vec![Stored {
                part,
                ..Stored::whole(format!("{start}.mlp.experts.{theirs}"))
            }]
        }
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
        transposed: matrix && kind == "weight",
        part,
        ..Stored::whole(format!("transformer.h.{layer}.{theirs}.{kind}"))
    }
}

/// What Mixtral's files say for names of ours within an expert.
const MIXTRAL: [(&str, &str); 3] = [
    (".w1.weight", ".gate_proj.weight"),
    (".w2.weight", ".down_proj.weight"),
    (".w3.weight", ".up_proj.weight"),
];

/// A name as the newest code of the family spells it.
#[must_use]
pub fn canonical(model: &ModelConfig, name: &str) -> String {
    let gpt2 = matches!(model.architecture.positions, Positions::Learned(_));
    let old = ["wte.", "wpe.", "ln_f.", "h."];
    if gpt2 && old.iter().any(|start| name.starts_with(start)) {
        return format!("transformer.{name}");
    }
    if model.moe.is_none() {
        return name.to_string();
    }
    let name = name.replace(".block_sparse_moe.", ".mlp.");
    let within = name.contains(".mlp.experts.");
    for (theirs, ours) in MIXTRAL {
        if let Some(start) = name.strip_suffix(theirs)
            && within
        {
            return format!("{start}{ours}");
        }
    }
    name
}

/// The same as the family's published files spell it.
#[must_use]
pub fn published(family: Family, canonical: &str) -> String {
    if family != Family::Mixtral {
        return canonical.to_string();
    }
    let Some((start, rest)) = canonical.split_once(".mlp.") else {
        return canonical.to_string();
    };
    let mut name = format!("{start}.block_sparse_moe.{rest}");
    for (theirs, ours) in MIXTRAL {
        if let Some(start) = name.strip_suffix(ours) {
            name = format!("{start}{theirs}");
        }
    }
    name
}

/// Whether a file may hold this beside the parameters: tables that other code keeps, the head of a
/// tied model, which is its embedding, and blocks after the last that predict tokens further on
/// (Glm4Moe's), which other code does not read either.
#[must_use]
pub fn beside(model: &ModelConfig, name: &str) -> bool {
    let table = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
    let block = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
        .and_then(|(layer, _)| layer.parse::<usize>().ok());
    let further = model.moe.is_some_and(|moe| moe.score == Score::Sigmoid)
        && block.is_some_and(|layer| layer >= model.layers);
    table.iter().any(|end| name.ends_with(end))
        || (model.tied && name == "lm_head.weight")
        || further
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_config::Model;
    use quintet_parallel_layers::Architecture;

    #[test]
    fn a_third_of_a_transposed_matrix() {
        let model = ModelConfig {
            architecture: Architecture::gpt2(8),
            ..crate::job::Job::default().model
        };
        let one = |name: &str| stored(&model, name, Experts::Alone).remove(0);
        let k = one("model.layers.3.self_attn.k_proj.weight");
        assert_eq!(k.name, "transformer.h.3.attn.c_attn.weight");
        assert_eq!(k.shape(&[2, 5]), [5, 6]);
        // Output 1, input 4 of k: row 4 of the file, column 2 + 1.
        assert_eq!(k.at(&[2, 5], 9), 4 * 6 + 3);
        let bias = one("model.layers.3.self_attn.v_proj.bias");
        assert_eq!((bias.shape(&[2]), bias.at(&[2], 1)), (vec![6], 5));
        assert_eq!(
            canonical(&model, "h.0.ln_1.bias"),
            "transformer.h.0.ln_1.bias"
        );
    }

    #[test]
    fn experts_alone_and_fused() {
        let model = Model::tiny_moe().config;
        let (name, ours) = ("model.layers.1.mlp.experts.up_proj.weight", [8, 3, 2]);
        let alone = stored(&model, name, Experts::Alone);
        assert_eq!(alone.len(), 8);
        assert_eq!(alone[5].name, "model.layers.1.mlp.experts.5.up_proj.weight");
        assert_eq!(alone[5].shape(&ours), [3, 2]);
        assert_eq!(alone[5].range(&ours), 30..36);
        assert_eq!(alone[5].at(&ours, 33), 3);
        let fused = stored(&model, name, Experts::Fused);
        assert_eq!(fused.len(), 1);
        assert_eq!(fused[0].name, "model.layers.1.mlp.experts.gate_up_proj");
        assert_eq!(fused[0].shape(&ours), [8, 6, 2]);
        // Expert 5, output 1, input 1: past 5 experts of 6 rows and the 3 rows of its gate.
        assert_eq!(fused[0].at(&ours, 33), (5 * 6 + 3 + 1) * 2 + 1);
    }

    #[test]
    fn mixtral_has_names_of_its_own() {
        let model = Model::tiny_moe().config;
        for (theirs, ours) in [
            ("block_sparse_moe.experts.3.w1", "mlp.experts.3.gate_proj"),
            ("block_sparse_moe.experts.3.w2", "mlp.experts.3.down_proj"),
            ("block_sparse_moe.experts.3.w3", "mlp.experts.3.up_proj"),
            ("block_sparse_moe.gate", "mlp.gate"),
            ("self_attn.q_proj", "self_attn.q_proj"),
        ] {
            let (theirs, ours) = (
                format!("model.layers.0.{theirs}.weight"),
                format!("model.layers.0.{ours}.weight"),
            );
            assert_eq!(canonical(&model, &theirs), ours);
            assert_eq!(canonical(&model, &ours), ours);
            assert_eq!(published(Family::Mixtral, &ours), theirs);
            assert_eq!(published(Family::Qwen3Moe, &ours), ours);
        }
    }
}
