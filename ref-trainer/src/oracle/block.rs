//! One decoder block, for the tokens of a microbatch, sample after sample.
//!
//! ```text
//! x ---> norm -> q, k, v -> (norm q, k) -> rope(q, k) -> attention -> o --> + = mid ---> norm -> mlp --> + = out
//!  \_______________________________________________________________________/      \___________________/
//!
//! mlp    SwiGLU: gate, up -> swiglu -> down        GELU: up -> gelu -> down
//! ```

use quintet_parallel_layers::MlpKind;
use quintet_planner::config::ModelConfig;

use super::dense::{Dense, norm, norm_backward};
use super::dropout::site;
use super::moe::{self, LayerRouting};
use super::ops::{
    Turn, add, attention, attention_backward, gelu, gelu_backward, rms_norm, rms_norm_backward,
    rope, swiglu, swiglu_backward,
};
use super::sight::Sight;
use super::{OracleError, Params, gradient, value};

/// What forward leaves for backward; q and k are normalised and rotated.
pub(super) struct Saved {
    x_td: Vec<f64>,
    a_td: Vec<f64>,
    /// q and k before their norms.
    raw: [Vec<f64>; 2],
    q_the: Vec<f64>,
    k_ske: Vec<f64>,
    v_ske: Vec<f64>,
    p_hts: Vec<f64>,
    o_the: Vec<f64>,
    mid_td: Vec<f64>,
    b_td: Vec<f64>,
    mlp: Mlp,
}

enum Mlp {
    Dense {
        /// Of SwiGLU alone.
        gate_tf: Vec<f64>,
        up_tf: Vec<f64>,
        act_tf: Vec<f64>,
    },
    Moe(moe::Saved),
}

/// Name of a part of a block, such as `mlp.up_proj`; its weight and bias have it in front.
pub(super) fn name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// The linear layers of block `layer`.
fn dense<'a>(config: &'a ModelConfig, layer: usize) -> impl Fn(&str) -> Dense + 'a {
    move |part| Dense::of(config, layer, part)
}

/// The residual stream after block `layer`, from that before it; `lens` are the tokens of each
/// sample.
pub(super) fn forward(
    config: &ModelConfig,
    params: &Params,
    layer: usize,
    sight: &Sight,
    x_td: &[f64],
) -> Result<(Vec<f64>, Saved, LayerRouting), OracleError> {
    let linear = dense(config, layer);
    let (head, positions) = (head(config), &sight.positions);

    let round = |x: &mut [f64]| sight.rounding.stored(x);
    let mut a_td = norm(config, params, &name(layer, "input_layernorm"), x_td)?;
    round(&mut a_td);
    let mut q_the = linear("self_attn.q_proj").forward(params, &a_td)?;
    let mut k_ske = linear("self_attn.k_proj").forward(params, &a_td)?;
    let mut v_ske = linear("self_attn.v_proj").forward(params, &a_td)?;
    round(&mut q_the);
    round(&mut k_ske);
    round(&mut v_ske);
    let raw = [q_the.clone(), k_ske.clone()];
    for (part, x) in [("q_norm", &mut q_the), ("k_norm", &mut k_ske)] {
        if config.architecture.qk_norm {
            let w_e = value(params, &qk_norm(layer, part))?;
            *x = rms_norm(x, w_e, config.norm_eps);
            round(x);
        }
        rope(x, positions, head, config.rope_theta, Turn::Forward);
        round(x);
    }
    let (mut o_the, mut p_hts) = attention(config, (sight, site(layer, 0)), &q_the, &k_ske, &v_ske);
    round(&mut o_the);
    // In backward they stand for what is rounded there: sums of o times its gradient.
    round(&mut p_hts);
    let mut mid_td = linear("self_attn.o_proj").forward(params, &o_the)?;
    sight
        .dropout
        .apply(site(layer, 1), &mut mid_td, config.hidden);
    round(&mut mid_td);
    add(&mut mid_td, x_td);
    round(&mut mid_td);

    let mut b_td = norm(
        config,
        params,
        &name(layer, "post_attention_layernorm"),
        &mid_td,
    )?;
    round(&mut b_td);
    let (mut out_td, mlp, routing) = if let Some(moe) = config.moe_at(layer) {
        let (out_td, saved, routing) = moe::forward(config, moe, params, (layer, sight), &b_td)?;
        (out_td, Mlp::Moe(saved), routing)
    } else {
        let mut up_tf = linear("mlp.up_proj").forward(params, &b_td)?;
        round(&mut up_tf);
        let (gate_tf, mut act_tf) = match config.architecture.mlp {
            MlpKind::SwiGlu => {
                let mut gate_tf = linear("mlp.gate_proj").forward(params, &b_td)?;
                round(&mut gate_tf);
                let act_tf = swiglu(&gate_tf, &up_tf);
                (gate_tf, act_tf)
            }
            MlpKind::Gelu => (Vec::new(), gelu(&up_tf)),
        };
        round(&mut act_tf);
        let out_td = linear("mlp.down_proj").forward(params, &act_tf)?;
        let mlp = Mlp::Dense {
            gate_tf,
            up_tf,
            act_tf,
        };
        (out_td, mlp, LayerRouting::default())
    };
    sight
        .dropout
        .apply(site(layer, 2), &mut out_td, config.hidden);
    round(&mut out_td);
    add(&mut out_td, &mid_td);
    round(&mut out_td);

    let saved = Saved {
        x_td: x_td.to_vec(),
        a_td,
        raw,
        q_the,
        k_ske,
        v_ske,
        p_hts,
        o_the,
        mid_td,
        b_td,
        mlp,
    };
    Ok((out_td, saved, routing))
}

/// Gradient of the residual stream before block `layer`, from that after it; the gradients of its
/// parameters are added into `grads`. The lines of [`forward`], from the last to the first.
pub(super) fn backward(
    config: &ModelConfig,
    (params, grads): (&Params, &mut Params),
    layer: usize,
    (sight, share): (&Sight, f64),
    saved: &Saved,
    dout_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let linear = dense(config, layer);
    let (head, positions) = (head(config), &sight.positions);
    let round = |x: &mut [f64]| sight.rounding.stored(x);
    let let_go = |part: u32, of: &[f64]| {
        let mut kept = of.to_vec();
        sight
            .dropout
            .apply(site(layer, part), &mut kept, config.hidden);
        round(&mut kept);
        kept
    };

    let dmlp_td = let_go(2, dout_td);
    let mut db_td = match (&saved.mlp, config.moe_at(layer)) {
        (Mlp::Moe(saved), Some(moe)) => {
            let both = (params, &mut *grads);
            let at = (layer, sight.rounding);
            moe::backward(config, moe, both, at, (saved, share), &dmlp_td)?
        }
        (Mlp::Moe(_), None) => return Err(OracleError::Config("a dense block has no experts")),
        (
            Mlp::Dense {
                gate_tf,
                up_tf,
                act_tf,
            },
            _,
        ) => {
            let mut dact_tf = linear("mlp.down_proj").backward(params, grads, &dmlp_td, act_tf)?;
            round(&mut dact_tf);
            match config.architecture.mlp {
                MlpKind::SwiGlu => {
                    let (mut dgate_tf, mut dup_tf) = swiglu_backward(&dact_tf, gate_tf, up_tf);
                    round(&mut dgate_tf);
                    round(&mut dup_tf);
                    let up = linear("mlp.up_proj");
                    let mut db_td = up.backward(params, grads, &dup_tf, &saved.b_td)?;
                    round(&mut db_td);
                    let gate = linear("mlp.gate_proj");
                    let by_gate = gate.backward(params, grads, &dgate_tf, &saved.b_td)?;
                    add(&mut db_td, &by_gate);
                    db_td
                }
                MlpKind::Gelu => {
                    let mut dup_tf = gelu_backward(&dact_tf, up_tf);
                    round(&mut dup_tf);
                    linear("mlp.up_proj").backward(params, grads, &dup_tf, &saved.b_td)?
                }
            }
        }
    };
    let norm2 = name(layer, "post_attention_layernorm");
    round(&mut db_td);
    db_td = norm_backward(config, params, grads, &norm2, &db_td, &saved.mid_td)?;
    let mut dmid_td = db_td;
    add(&mut dmid_td, dout_td);
    round(&mut dmid_td);

    let mut do_the =
        linear("self_attn.o_proj").backward(params, grads, &let_go(1, &dmid_td), &saved.o_the)?;
    round(&mut do_the);
    let qkv = (&saved.q_the[..], &saved.k_ske[..], &saved.v_ske[..]);
    let (mut dq_the, mut dk_ske, mut dv_ske) =
        attention_backward(config, (sight, site(layer, 0)), &do_the, qkv, &saved.p_hts);
    round(&mut dv_ske);
    for (part, dx, raw) in [
        ("q_norm", &mut dq_the, &saved.raw[0]),
        ("k_norm", &mut dk_ske, &saved.raw[1]),
    ] {
        round(dx);
        rope(dx, positions, head, config.rope_theta, Turn::Back);
        round(dx);
        if config.architecture.qk_norm {
            let name = qk_norm(layer, part);
            let (w_e, dw_e) = (value(params, &name)?, gradient(grads, &name)?);
            *dx = rms_norm_backward(dx, raw, w_e, dw_e, config.norm_eps);
            round(dx);
        }
    }
    let mut da_td = linear("self_attn.v_proj").backward(params, grads, &dv_ske, &saved.a_td)?;
    round(&mut da_td);
    for (part, dy) in [("self_attn.k_proj", &dk_ske), ("self_attn.q_proj", &dq_the)] {
        add(
            &mut da_td,
            &linear(part).backward(params, grads, dy, &saved.a_td)?,
        );
        round(&mut da_td);
    }
    let norm1 = name(layer, "input_layernorm");
    let mut dx_td = norm_backward(config, params, grads, &norm1, &da_td, &saved.x_td)?;
    add(&mut dx_td, &dmid_td);
    round(&mut dx_td);
    Ok(dx_td)
}

fn qk_norm(layer: usize, part: &str) -> String {
    format!("{}.weight", name(layer, &format!("self_attn.{part}")))
}

/// Width of a head, and how many of its elements turn.
fn head(config: &ModelConfig) -> (usize, usize) {
    let e = config.head_dim;
    (e, config.architecture.rotary(e))
}
