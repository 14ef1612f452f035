//! Linear layers and norms by name: their parameters found, their biases added where the
//! architecture has them.

use quintet_parallel_layers::norm::NormKind;
use quintet_planner::config::ModelConfig;

use super::block::name;
use super::ops::{
    add, layer_norm, layer_norm_backward, linear, linear_backward, rms_norm, rms_norm_backward,
};
use super::{OracleError, Params, gradient, value};

/// A linear layer: its name, its shape `[out, in]`, whether it has a bias.
pub(super) struct Dense {
    name: String,
    outputs: usize,
    inputs: usize,
    bias: bool,
}

impl Dense {
    /// A part of block `layer`, such as `mlp.up_proj`.
    pub(super) fn of(config: &ModelConfig, layer: usize, part: &str) -> Self {
        let (d, f, e) = (config.hidden, config.ffn, config.head_dim);
        let (q_len, kv_len) = (config.heads * e, config.kv_heads * e);
        let has = config.architecture;
        let (outputs, inputs, bias) = match part {
            "self_attn.q_proj" => (q_len, d, has.qkv_bias),
            "self_attn.k_proj" | "self_attn.v_proj" => (kv_len, d, has.qkv_bias),
            "self_attn.o_proj" => (d, q_len, has.out_bias),
            "mlp.down_proj" => (d, f, has.out_bias),
            // gate_proj and up_proj
            _ => (f, d, has.out_bias),
        };
        Self {
            name: name(layer, part),
            outputs,
            inputs,
            bias,
        }
    }

    pub(super) fn weight(&self) -> String {
        format!("{}.weight", self.name)
    }

    /// The bias's name, where there is one.
    pub(super) fn bias(&self) -> Option<String> {
        self.bias.then(|| format!("{}.bias", self.name))
    }

    /// `[out, in]`.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// `y[t,o] = sum_i x[t,i] w[o,i] + b[o]`.
    pub(super) fn forward(&self, params: &Params, x: &[f64]) -> Result<Vec<f64>, OracleError> {
        let weight = value(params, &self.weight())?;
        let mut y = linear(x, weight, self.inputs, self.outputs);
        if let Some(bias) = self.bias() {
            let bias = value(params, &bias)?;
            y.chunks_exact_mut(self.outputs)
                .for_each(|row| add(row, bias));
        }
        Ok(y)
    }

    /// Gradient of x; those of weight and bias are added.
    pub(super) fn backward(
        &self,
        params: &Params,
        grads: &mut Params,
        dy: &[f64],
        x: &[f64],
    ) -> Result<Vec<f64>, OracleError> {
        if let Some(bias) = self.bias() {
            let db = gradient(grads, &bias)?;
            dy.chunks_exact(self.outputs).for_each(|row| add(db, row));
        }
        let weight = self.weight();
        let (w, dw) = (value(params, &weight)?, gradient(grads, &weight)?);
        Ok(linear_backward(dy, x, w, dw, self.inputs, self.outputs))
    }
}

/// Names of a norm's parameters, from the name of the norm.
pub(super) fn norm_params(config: &ModelConfig, norm: &str) -> Vec<String> {
    let weight = format!("{norm}.weight");
    match config.architecture.norm {
        NormKind::Rms => vec![weight],
        NormKind::Layer => vec![weight, format!("{norm}.bias")],
    }
}

/// The norm of that name over rows of `hidden`.
pub(super) fn norm(
    config: &ModelConfig,
    params: &Params,
    name: &str,
    x_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let weight = value(params, &format!("{name}.weight"))?;
    Ok(match config.architecture.norm {
        NormKind::Rms => rms_norm(x_td, weight, config.norm_eps),
        NormKind::Layer => {
            let bias = value(params, &format!("{name}.bias"))?;
            layer_norm(x_td, weight, bias, config.norm_eps)
        }
    })
}

/// Gradient of what [`norm`] was given; those of its parameters are added.
pub(super) fn norm_backward(
    config: &ModelConfig,
    params: &Params,
    grads: &mut Params,
    name: &str,
    dy_td: &[f64],
    x_td: &[f64],
) -> Result<Vec<f64>, OracleError> {
    let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
    let (w, eps) = (value(params, &weight)?, config.norm_eps);
    Ok(match config.architecture.norm {
        NormKind::Rms => rms_norm_backward(dy_td, x_td, w, gradient(grads, &weight)?, eps),
        NormKind::Layer => {
            let mut dw = std::mem::take(gradient_vec(grads, &weight)?);
            let db = gradient(grads, &bias)?;
            let dx = layer_norm_backward(dy_td, x_td, w, (&mut dw, db), eps);
            *gradient_vec(grads, &weight)? = dw;
            dx
        }
    })
}

fn gradient_vec<'a>(grads: &'a mut Params, name: &str) -> Result<&'a mut Vec<f64>, OracleError> {
    let found = grads.get_mut(name);
    found.ok_or_else(|| OracleError::Missing(name.into()))
}
