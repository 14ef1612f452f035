//! One decoder block.
//!
//! ```text
//! x ---> norm -> q, k, v -> rope(q, k) -> attention -> o --> + = mid ---> norm -> gate, up -> swiglu -> down --> + = out
//!  \________________________________________________________/      \___________________________________________/
//! ```

use quintet_planner::config::ModelConfig;

use super::ops::{
    Turn, add, attention, attention_backward, linear, linear_backward, rms_norm, rms_norm_backward,
    rope, swiglu, swiglu_backward,
};
use super::sight::Sight;
use super::{OracleError, Params, gradient, value};

/// What forward leaves for backward; q and k are rotated.
pub(super) struct Saved {
    x_td: Vec<f64>,
    a_td: Vec<f64>,
    q_the: Vec<f64>,
    k_ske: Vec<f64>,
    v_ske: Vec<f64>,
    p_hts: Vec<f64>,
    o_the: Vec<f64>,
    mid_td: Vec<f64>,
    b_td: Vec<f64>,
    gate_tf: Vec<f64>,
    up_tf: Vec<f64>,
    act_tf: Vec<f64>,
}

/// Name of a block's parameter, such as `mlp.up_proj`.
pub(super) fn name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

/// The residual stream after block `layer`, from that before it.
pub(super) fn forward(
    config: &ModelConfig,
    params: &Params,
    layer: usize,
    sight: &Sight,
    x_td: &[f64],
) -> Result<(Vec<f64>, Saved), OracleError> {
    let w = |part: &str| value(params, &name(layer, part));
    let (d, f, e) = (config.hidden, config.ffn, config.head_dim);
    let (q_len, kv_len) = (config.heads * e, config.kv_heads * e);
    let positions = &sight.positions;

    let a_td = rms_norm(x_td, w("input_layernorm")?, config.norm_eps);
    let mut q_the = linear(&a_td, w("self_attn.q_proj")?, d, q_len);
    let mut k_ske = linear(&a_td, w("self_attn.k_proj")?, d, kv_len);
    let v_ske = linear(&a_td, w("self_attn.v_proj")?, d, kv_len);
    rope(&mut q_the, positions, e, config.rope_theta, Turn::Forward);
    rope(&mut k_ske, positions, e, config.rope_theta, Turn::Forward);
    let (o_the, p_hts) = attention(config, &sight.first, &q_the, &k_ske, &v_ske);
    let mut mid_td = linear(&o_the, w("self_attn.o_proj")?, q_len, d);
    add(&mut mid_td, x_td);

    let b_td = rms_norm(&mid_td, w("post_attention_layernorm")?, config.norm_eps);
    let gate_tf = linear(&b_td, w("mlp.gate_proj")?, d, f);
    let up_tf = linear(&b_td, w("mlp.up_proj")?, d, f);
    let act_tf = swiglu(&gate_tf, &up_tf);
    let mut out_td = linear(&act_tf, w("mlp.down_proj")?, f, d);
    add(&mut out_td, &mid_td);

    let saved = Saved {
        x_td: x_td.to_vec(),
        a_td,
        q_the,
        k_ske,
        v_ske,
        p_hts,
        o_the,
        mid_td,
        b_td,
        gate_tf,
        up_tf,
        act_tf,
    };
    Ok((out_td, saved))
}

/// Gradient of the residual stream before block `layer`, from that after it; the gradients of its
/// parameters are added into `grads`. The lines of [`forward`], from the last to the first.
pub(super) fn backward(
    config: &ModelConfig,
    params: &Params,
    grads: &mut Params,
    layer: usize,
    (sight, saved): (&Sight, &Saved),
    dout_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let (d, f, e) = (config.hidden, config.ffn, config.head_dim);
    let (q_len, kv_len) = (config.heads * e, config.kv_heads * e);
    let positions = &sight.positions;
    let mut back = |part: &str, dy: &[f64], x: &[f64], i: usize, o: usize| {
        let name = name(layer, part);
        let w = value(params, &name)?;
        let dw = gradient(grads, &name)?;
        Ok(if part.ends_with("layernorm") {
            rms_norm_backward(dy, x, w, dw, config.norm_eps)
        } else {
            linear_backward(dy, x, w, dw, i, o)
        })
    };

    let dact_tf = back("mlp.down_proj", dout_td, &saved.act_tf, f, d)?;
    let (dgate_tf, dup_tf) = swiglu_backward(&dact_tf, &saved.gate_tf, &saved.up_tf);
    let mut db_td = back("mlp.up_proj", &dup_tf, &saved.b_td, d, f)?;
    add(
        &mut db_td,
        &back("mlp.gate_proj", &dgate_tf, &saved.b_td, d, f)?,
    );
    let mut dmid_td = back("post_attention_layernorm", &db_td, &saved.mid_td, d, d)?;
    add(&mut dmid_td, dout_td);

    let do_the = back("self_attn.o_proj", &dmid_td, &saved.o_the, q_len, d)?;
    let qkv = (&saved.q_the[..], &saved.k_ske[..], &saved.v_ske[..]);
    let (mut dq_the, mut dk_ske, dv_ske) =
        attention_backward(config, &sight.first, &do_the, qkv, &saved.p_hts);
    rope(&mut dk_ske, positions, e, config.rope_theta, Turn::Back);
    rope(&mut dq_the, positions, e, config.rope_theta, Turn::Back);
    let mut da_td = back("self_attn.v_proj", &dv_ske, &saved.a_td, d, kv_len)?;
    add(
        &mut da_td,
        &back("self_attn.k_proj", &dk_ske, &saved.a_td, d, kv_len)?,
    );
    add(
        &mut da_td,
        &back("self_attn.q_proj", &dq_the, &saved.a_td, d, q_len)?,
    );
    let mut dx_td = back("input_layernorm", &da_td, &saved.x_td, d, d)?;
    add(&mut dx_td, &dmid_td);
    Ok(dx_td)
}
