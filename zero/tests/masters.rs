//! Master weights of bf16: what is moved by less than bf16 can tell is not lost, under any stage.
#![allow(clippy::unwrap_used)]

mod common;

use common::{ALL, Model, Rank, degrees};
use half::bf16;
use quintet_collectives::World;
use quintet_kernels::Scalar;
use quintet_zero::{Error, Full, Rule, ZeroStage, gather_master, gather_params};

const STEPS: u64 = 60;
const BY: f64 = 1e-4;

/// Parameters before and after steps that do nothing but move one of them, and its master weight.
fn moved<E: Scalar>(model: Model, stage: ZeroStage) -> (Full, Full, Option<Full>) {
    let world = World::new(model.mesh().world()).unwrap();
    let mut ranks = world.go(|comm| {
        let rule = Rule::Sgd { weight_decay: 0.0 };
        let mut rank = Rank::<E>::new(model, comm, stage, rule)?;
        rank.params
            .fill_with(|_, index| E::from_f64(1.0 + index as f64))?;
        rank.optimizer.fill_master(|_, index| 1.0 + index as f64)?;
        let full = |rank: &Rank<E>| gather_params(&rank.device, &[&rank.params], &rank.groups);
        let before = full(&rank)?;
        for step in 1..=STEPS {
            rank.backward(step, 0.3)?;
            for entry in rank.params.layout().clone().entries() {
                if entry.spec.name == "1.bias" {
                    let by = |index: usize| BY * (1.0 + index as f64);
                    rank.optimizer.shift(&mut rank.params, entry, by)?;
                }
            }
            rank.step(0.0, 1.0)?;
        }
        let masters = gather_master(&rank.device, &[&rank.optimizer], &rank.groups)?;
        Ok::<_, Error>((before, full(&rank)?, masters))
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

#[test]
fn small_moves_add_up() {
    let cut = degrees(2, 2, 1, 1, 1);
    for stage in ALL {
        let model = Model::new(cut);
        let (before, after, masters) = moved::<bf16>(model, stage);
        let masters = masters.unwrap();
        for (name, values) in &after {
            for (index, &x) in values.iter().enumerate() {
                let want = match name.as_str() {
                    // 60 moves of a 78th of what bf16 can tell.
                    "1.bias" => before[name][index] * (1.0 + STEPS as f64 * BY),
                    _ => before[name][index],
                };
                let master = masters[name][index];
                assert!((master - want).abs() < 1e-5 * want, "{stage:?} {name}");
                assert_eq!(x, bf16::from_f64(master).to_f64(), "{stage:?} {name}");
            }
        }
        assert!(after["1.bias"][0] > before["1.bias"][0], "{stage:?}");
        let (_, after, masters) = moved::<f32>(model, stage);
        assert!(masters.is_none() && after["1.bias"][0] > 1.0059);
    }
}
