//! Draws by number: number n of a seed is the same job on every machine, whatever was drawn before.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use quintet_ref_trainer::job::Dtype;

use super::{Draw, draws};

/// The numbers to draw: those that always run, or as the environment asks.
///
/// ```text
/// QUINTET_CASES=500   so many            QUINTET_SEED=7   of another seed than 0
/// QUINTET_DRAW=41     number 41 alone
/// ```
#[derive(Debug, Clone)]
pub struct Deal {
    /// The type of every draw.
    pub dtype: Dtype,
    /// The seed.
    pub seed: u64,
    /// The numbers, in order.
    pub numbers: std::ops::Range<u32>,
    /// Whether these are the ones that always run.
    pub fixed: bool,
}

impl Deal {
    /// `count` draws of seed 0, unless the environment asks for others.
    pub fn new(dtype: Dtype, count: u32) -> Self {
        let asked = |name| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
        let (cases, seed) = (asked("QUINTET_CASES"), asked("QUINTET_SEED"));
        let numbers = match asked("QUINTET_DRAW") {
            Some(number) => number as u32..number as u32 + 1,
            None => 0..cases.map_or(count, |n| n as u32),
        };
        Self {
            fixed: seed.is_none() && numbers == (0..count),
            seed: seed.unwrap_or(0),
            dtype,
            numbers,
        }
    }

    /// Draw `number`.
    pub fn draw(&self, number: u32) -> Draw {
        let (strategy, mut runner) = (draws(self.dtype), self.runner(number));
        strategy.new_tree(&mut runner).expect("a draw").current()
    }

    /// Tries `holds` on draw `number`; where it does not hold, it is tried on ever smaller ones.
    ///
    /// # Errors
    /// Why it does not hold of the smallest, and that.
    pub fn check(
        &self,
        number: u32,
        holds: impl Fn(&Draw) -> Result<(), String>,
    ) -> Result<(), (String, Box<Draw>)> {
        let (strategy, mut runner) = (draws(self.dtype), self.runner(number));
        let tree = strategy.new_tree(&mut runner).expect("a draw");
        match runner.run_one(tree, |draw| holds(&draw).map_err(TestCaseError::fail)) {
            Ok(_) => Ok(()),
            Err(TestError::Fail(why, draw)) => Err((why.to_string(), Box::new(draw))),
            Err(TestError::Abort(why)) => panic!("gave up: {why}"),
        }
    }

    fn runner(&self, number: u32) -> TestRunner {
        let config = Config {
            failure_persistence: None,
            max_shrink_iters: if first_only() { 0 } else { 400 },
            ..Config::default()
        };
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed.to_le_bytes());
        seed[8..12].copy_from_slice(&number.to_le_bytes());
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed))
    }
}

/// Whether a run ends at the first failure, which is not made small: `QUINTET_SHRINK=0`, for faults
/// that are planted on purpose.
pub fn first_only() -> bool {
    std::env::var("QUINTET_SHRINK").is_ok_and(|v| v == "0")
}
