//! The oracle judged by what needs no second model: differences, symmetries, closed forms.

use quintet_parallel_layers::Architecture;
use quintet_parallel_layers::philox::Stream;

use super::*;

mod golden;
mod moe;

/// GQA, heads * head_dim other than hidden, an odd width, a vocabulary that is no power of two.
fn small(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab: 13,
        hidden: 10,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 15,
        rope_theta: 100.0,
        norm_eps: 1e-5,
        tied,
        moe: None,
        window: None,
        dropout: 0.0,
        architecture: Architecture::LLAMA,
    }
}

/// Samples of different lengths, some predictions masked out, the last sample wholly so.
fn batch(vocab: usize) -> Vec<Sample> {
    let draws = Stream::new(3, "tokens");
    let sample = |index: u64, seq: u64, masked: f64| Sample {
        tokens: (0..=seq)
            .map(|i| draws.below(index * 100 + i, vocab as u64) as u32)
            .collect(),
        mask: (0..seq)
            .map(|i| draws.uniform(1000 + index * 100 + i) >= masked)
            .collect(),
        documents: vec![],
    };
    vec![
        sample(0, 7, 0.3),
        sample(1, 5, 0.0),
        sample(2, 7, 0.5),
        sample(3, 4, 1.0),
    ]
}

fn largest_difference(a: &Params, b: &Params) -> f64 {
    assert!(a.keys().eq(b.keys()));
    let pairs = a.values().flatten().zip(b.values().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn gradients_are_central_differences() {
    for tied in [false, true] {
        let mut config = small(tied);
        config.architecture.softcap = tied.then_some(0.5);
        let samples = batch(config.vocab);
        let params = init_random(&config, 5);
        let result = step(&config, &params, &samples).unwrap();
        let loss = |name: &str, i: usize, by: f64| {
            let mut moved = params.clone();
            moved.get_mut(name).unwrap()[i] += by;
            let (sum, count) = forward_loss(&config, &moved, &samples).unwrap();
            sum / count as f64
        };
        for (name, shape) in param_shapes(&config) {
            let len = shape.iter().product::<usize>() as u64;
            let picks = Stream::new(11, &name);
            for pick in 0..8 {
                let (i, h) = (picks.below(pick, len) as usize, 1e-5);
                let difference = (loss(&name, i, h) - loss(&name, i, -h)) / (2.0 * h);
                let gradient = result.grads[&name][i];
                assert!(
                    (difference - gradient).abs() <= 1e-8 + 1e-7 * gradient.abs(),
                    "{name}[{i}], tied {tied}: {gradient} by hand, {difference} by difference"
                );
            }
        }
    }
}

#[test]
fn gradients_under_dropout_are_central_differences() {
    let config = ModelConfig {
        dropout: 0.3,
        ..small(true)
    };
    let (samples, params) = (batch(config.vocab), init_random(&config, 5));
    let of = |params: &Params, run| step_of(&config, params, &samples, 2, run).unwrap();
    let run = Some((7, 3));
    let result = of(&params, run);
    for (name, gradient) in &result.grads {
        let (h, last) = (1e-5, gradient.len() - 1);
        for i in [0, last / 3, last / 2, last] {
            let moved = |by: f64| {
                let mut moved = params.clone();
                moved.get_mut(name).unwrap()[i] += by;
                of(&moved, run).loss
            };
            let (difference, gradient) = ((moved(h) - moved(-h)) / (2.0 * h), gradient[i]);
            assert!(
                (difference - gradient).abs() <= 1e-8 + 1e-7 * gradient.abs(),
                "{name}[{i}]: {gradient} by hand, {difference} by difference"
            );
        }
    }
    // Evaluation lets nothing go; another step, another seed and other numbers of samples let other
    // elements go.
    let none = of(&params, None);
    assert_eq!(none, step_in(&small(true), &params, &samples, 2).unwrap());
    for other in [None, Some((7, 4)), Some((8, 3)), Some((7, 3 + (1 << 32)))] {
        assert!((of(&params, other).loss - result.loss).abs() > 1e-3);
    }
    // Samples are counted in the step, however they are put into microbatches.
    let alone = step_of(&config, &params, &samples, 1, run).unwrap();
    assert!((alone.loss - result.loss).abs() < 1e-12);
}

#[test]
fn every_gradient_of_random_parameters_is_felt() {
    for tied in [false, true] {
        let config = small(tied);
        let result = step(&config, &init_random(&config, 5), &batch(config.vocab)).unwrap();
        for (name, gradient) in &result.grads {
            let rms = (gradient.iter().map(|g| g * g).sum::<f64>() / gradient.len() as f64).sqrt();
            assert!((1e-3..10.0).contains(&rms), "{name} {rms}");
        }
    }
}

#[test]
fn nothing_counted_is_loss_zero_and_gradient_zero() {
    let config = small(true);
    let result = step(&config, &init_random(&config, 1), &batch(13)[3..]).unwrap();
    assert_eq!((result.loss, result.loss_sum, result.count), (0.0, 0.0, 0));
    assert!(result.grads.values().flatten().all(|g| *g == 0.0));
    assert_eq!(
        step(&config, &init_random(&config, 1), &[]).unwrap(),
        result
    );
}

#[test]
fn twice_the_loss_is_twice_the_gradient() {
    let (config, samples) = (small(false), batch(13));
    let params = init_random(&config, 2);
    let scaled = |scale| {
        let mut grads = step(&config, &params, &[]).unwrap().grads;
        let rounding = Rounding::none();
        let sight = Sight::new(&samples, config.window, &rounding);
        let saved = forward(&config, &params, &samples, &sight).unwrap();
        let part = (&samples[..], &sight);
        backward(&config, &params, part, saved, (scale, 1.0), &mut grads).unwrap();
        grads
    };
    let (once, mut twice) = (scaled(0.25), scaled(0.5));
    twice.values_mut().flatten().for_each(|g| *g *= 0.5);
    assert_eq!(once, twice);
}

#[test]
fn order_and_repetition_of_samples_change_nothing() {
    let (config, samples) = (small(false), batch(13));
    let params = init_random(&config, 2);
    let result = step(&config, &params, &samples).unwrap();
    let reversed: Vec<Sample> = samples.iter().rev().cloned().collect();
    let repeated = [samples.clone(), samples].concat();
    for other in [reversed, repeated] {
        let other = step(&config, &params, &other).unwrap();
        assert!((other.loss - result.loss).abs() < 1e-12);
        assert!(largest_difference(&other.grads, &result.grads) < 1e-12);
    }
}

#[test]
fn a_prediction_sees_nothing_behind_it() {
    let (config, mut sample) = (small(false), batch(13)[1].clone());
    let params = init_random(&config, 2);
    sample.mask = vec![true, true, false, false, false];
    let before = forward_loss(&config, &params, std::slice::from_ref(&sample)).unwrap();
    for token in &mut sample.tokens[3..] {
        *token = (*token + 1) % 13;
    }
    assert_eq!(forward_loss(&config, &params, &[sample]).unwrap(), before);
}

/// With no block writing to the stream, the loss is that of a table looked up twice.
#[test]
fn a_model_of_silent_blocks_is_its_embedding_and_head() {
    let (config, samples) = (small(false), batch(13));
    let mut params = init_random(&config, 2);
    for (name, values) in &mut params {
        if name.contains("o_proj") || name.contains("down_proj") {
            values.fill(0.0);
        }
    }
    let mut expected = 0.0;
    for sample in &samples {
        for (t, _) in sample.mask.iter().enumerate().filter(|(_, valid)| **valid) {
            let x_d = &params[EMBEDDING][sample.tokens[t] as usize * 10..][..10];
            let rms = (x_d.iter().map(|x| x * x).sum::<f64>() / 10.0 + 1e-5).sqrt();
            let logit = |v: usize| -> f64 {
                (0..10)
                    .map(|d| x_d[d] / rms * params[FINAL_NORM][d] * params[HEAD][v * 10 + d])
                    .sum()
            };
            let sum: f64 = (0..13).map(|v| logit(v).exp()).sum();
            expected += sum.ln() - logit(sample.tokens[t + 1] as usize);
        }
    }
    let (sum, _) = forward_loss(&config, &params, &samples).unwrap();
    assert!((sum - expected).abs() < 1e-12, "{sum} {expected}");
}

/// Two query heads on one KV head are two heads whose KV weights are equal; the gradient of the
/// shared head is the sum.
#[test]
fn shared_kv_heads_are_repeated_kv_heads() {
    let (config, samples) = (small(false), batch(13));
    let params = init_random(&config, 2);
    let wide = ModelConfig {
        kv_heads: 4,
        ..config.clone()
    };
    let kv = |name: &str| name.contains("k_proj") || name.contains("v_proj");
    let head = 6 * 10;
    let mut repeated = params.clone();
    for (_, values) in repeated.iter_mut().filter(|(name, _)| kv(name)) {
        let heads = values.chunks_exact(head);
        *values = heads.flat_map(|w| [w, w].concat()).collect();
    }
    let mut result = step(&wide, &repeated, &samples).unwrap();
    for (_, values) in result.grads.iter_mut().filter(|(name, _)| kv(name)) {
        let pairs = values.chunks_exact(2 * head);
        *values = pairs
            .flat_map(|w| (0..head).map(|i| w[i] + w[head + i]).collect::<Vec<_>>())
            .collect();
    }
    let expected = step(&config, &params, &samples).unwrap();
    assert!(largest_difference(&result.grads, &expected.grads) < 1e-12);
}

#[test]
fn rope_knows_only_distances() {
    let stream = Stream::new(4, "qk");
    let draw = |from: u64| -> Vec<f64> { (from..from + 8).map(|i| stream.normal(i)).collect() };
    let score = |at_q: usize, at_k: usize| -> f64 {
        let (mut q_e, mut k_e) = (draw(0), draw(8));
        ops::rope(&mut q_e, &[at_q], (8, 8), 500.0, ops::Turn::Forward);
        ops::rope(&mut k_e, &[at_k], (8, 8), 500.0, ops::Turn::Forward);
        q_e.iter().zip(&k_e).map(|(q, k)| q * k).sum()
    };
    for (q, k) in [(0, 0), (5, 2), (9, 9), (3, 8)] {
        assert!((score(q, k) - score(q + 41, k + 41)).abs() < 1e-12);
    }
    assert!((score(5, 2) - score(5, 3)).abs() > 1e-3);

    // Element j is paired with j + e/2 and turned by position * theta^(-2j/e); back undoes it.
    let mut x_e = [1.0, 0.0, 0.0, 2.0];
    ops::rope(&mut x_e, &[3], (4, 4), 100.0, ops::Turn::Forward);
    let expected = [
        3f64.cos(),
        -2.0 * 0.3f64.sin(),
        3f64.sin(),
        2.0 * 0.3f64.cos(),
    ];
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-15);
    assert!(close(&x_e, &expected), "{x_e:?}");
    ops::rope(&mut x_e, &[3], (4, 4), 100.0, ops::Turn::Back);
    assert!(close(&x_e, &[1.0, 0.0, 0.0, 2.0]), "{x_e:?}");
}

/// m = 0.05 then 0.02; v = 0.0025 then 0.0031; divided by 1 - b^t: 1/2, 2/19 and 1/4, 31/199.
#[test]
fn adamw_follows_two_steps_by_hand() {
    let config = small(true);
    let mut params = init(&config, 1, 0.02);
    let all = |g: f64| -> Params {
        let shapes = param_shapes(&config).into_iter();
        shapes
            .map(|(name, shape)| (name, vec![g; shape.iter().product()]))
            .collect()
    };
    let mut adamw = AdamW::new(&config, (0.9, 0.99), 0.1, 0.2);
    params.get_mut(EMBEDDING).unwrap()[7] = 1.0;
    adamw.step(&mut params, &all(0.5), 0.1).unwrap();
    let w = 0.98 - 0.1 * 0.5 / (0.5 + 0.1);
    assert!((params[EMBEDDING][7] - w).abs() < 1e-15);
    adamw.step(&mut params, &all(-0.25), 0.1).unwrap();
    let w = w * 0.98 - 0.1 * (2.0 / 19.0) / ((31.0f64 / 199.0).sqrt() + 0.1);
    assert!((params[EMBEDDING][7] - w).abs() < 1e-15);
    assert!((w - 0.857_454_651_984_456_9).abs() < 1e-15);
    // A norm starts at 1 too, and does not decay.
    let norm = 1.0 - 0.1 / 1.2 - 0.1 * (2.0 / 19.0) / ((31.0f64 / 199.0).sqrt() + 0.1);
    assert!((params[FINAL_NORM][0] - norm).abs() < 1e-14);
    assert!(
        adamw.second[EMBEDDING]
            .iter()
            .all(|v| (v - 0.0031).abs() < 1e-15)
    );
}

#[test]
fn sgd_and_clip_follow_their_formulas() {
    let config = small(true);
    let mut params = init(&config, 1, 0.02);
    let (table, norm) = (params[EMBEDDING][0], params[FINAL_NORM][0]);
    let mut grads: Params = params
        .iter()
        .map(|(name, w)| (name.clone(), vec![0.0; w.len()]))
        .collect();
    grads.get_mut(EMBEDDING).unwrap()[0] = 3.0;
    grads.get_mut(FINAL_NORM).unwrap()[0] = -4.0;
    assert_eq!(clip(&mut grads.clone(), 6.0), (5.0, 1.0));
    assert_eq!(clip(&mut grads, 2.0), (5.0, 2.0 / 5.000_001));
    assert!((grad_norm(&grads) - 2.0).abs() < 1e-6);
    Sgd::new(&config, 0.5)
        .step(&mut params, &grads, 0.1)
        .unwrap();
    let (g, dn) = (grads[EMBEDDING][0], grads[FINAL_NORM][0]);
    assert!((params[EMBEDDING][0] - (table - 0.1 * (g + 0.5 * table))).abs() < 1e-15);
    assert!((params[FINAL_NORM][0] - (norm - 0.1 * dn)).abs() < 1e-15);
    grads.remove(EMBEDDING);
    let refused = Sgd::new(&config, 0.0).step(&mut params, &grads, 0.1);
    assert_eq!(refused, Err(OracleError::Missing(EMBEDDING.into())));
}

#[test]
fn training_begins_at_log_vocab_and_goes_down() {
    let config = small(true);
    let mut params = init(&config, 9, 0.02);
    let o_proj = &params["model.layers.0.self_attn.o_proj.weight"];
    let first = Stream::new(9, "model.layers.0.self_attn.o_proj.weight").normal(0);
    assert_eq!(o_proj[0], 0.02 / 2.0 * first);
    let samples = batch(config.vocab);
    let mut adamw = AdamW::new(&config, (0.9, 0.95), 1e-8, 0.1);
    let start = step(&config, &params, &samples).unwrap().loss;
    assert!((start - 13f64.ln()).abs() < 0.1, "{start}");
    for _ in 0..60 {
        let mut result = step(&config, &params, &samples).unwrap();
        clip(&mut result.grads, 1.0);
        adamw.step(&mut params, &result.grads, 0.02).unwrap();
    }
    let end = step(&config, &params, &samples).unwrap().loss;
    assert!(end < 0.5 * start, "{start} {end}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let (config, samples) = (small(true), batch(13));
    let good = init(&config, 1, 0.02);
    let fails = |config: &ModelConfig, params: &Params, samples: &[Sample]| {
        step(config, params, samples).unwrap_err().to_string()
    };
    let mut params = good.clone();
    params.get_mut(FINAL_NORM).unwrap().pop();
    assert_eq!(
        fails(&config, &params, &samples),
        "oracle: model.norm.weight has 9 elements, the config gives it 10"
    );
    params.remove(FINAL_NORM);
    assert!(fails(&config, &params, &samples).contains("no value for parameter model.norm"));
    let mut wrong = samples.clone();
    wrong[1].tokens[2] = 13;
    assert!(fails(&config, &good, &wrong).contains("token 13 of sample 1"));
    wrong[1].tokens.clear();
    assert!(fails(&config, &good, &wrong).contains("0 tokens for 5"));
    for kv_heads in [0, 3] {
        let odd = ModelConfig {
            kv_heads,
            ..config.clone()
        };
        assert!(fails(&odd, &good, &samples).starts_with("oracle: "));
    }
}

/// Documents side by side in one sample are samples of their own.
#[test]
fn packed_documents_are_samples() {
    let (config, samples) = (small(false), batch(13));
    let params = init_random(&config, 2);
    let (a, b) = (&samples[0], &samples[1]);
    let (last, next) = (a.tokens.len(), b.mask.len());
    let packed = Sample {
        tokens: [&a.tokens[..], &b.tokens].concat(),
        // What a's last token says of b's first does not count.
        mask: [&a.mask[..], &[false], &b.mask].concat(),
        documents: [vec![4; last], vec![5; next]].concat(),
    };
    for window in [None, Some(3)] {
        let config = ModelConfig {
            window,
            ..config.clone()
        };
        let apart = step(&config, &params, &[a.clone(), b.clone()]).unwrap();
        let packed = step(&config, &params, std::slice::from_ref(&packed)).unwrap();
        assert_eq!(packed.count, apart.count);
        assert!((packed.loss_sum - apart.loss_sum).abs() < 1e-12);
        assert!(largest_difference(&packed.grads, &apart.grads) < 1e-12);
    }
}

/// A window as long as the sample is none; under a window of 2 in one block, a token two places
/// back is not seen.
#[test]
fn a_window_hides_what_lies_before_it() {
    let (config, samples) = (small(false), batch(13));
    let params = init_random(&config, 2);
    let loss = |window, sample: &Sample| {
        let config = ModelConfig {
            window,
            layers: 1,
            ..config.clone()
        };
        forward_loss(&config, &params, std::slice::from_ref(sample)).unwrap()
    };
    assert_eq!(loss(Some(7), &samples[0]), loss(None, &samples[0]));
    let mut sample = samples[1].clone();
    sample.mask = vec![false, false, true, false, false];
    let mut other = sample.clone();
    other.tokens[0] = (other.tokens[0] + 1) % 13;
    assert_eq!(loss(Some(2), &sample), loss(Some(2), &other));
    assert_ne!(loss(Some(3), &sample), loss(Some(3), &other));
}
