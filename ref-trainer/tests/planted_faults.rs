//! Would the suite notice? Faults of the kinds that users of other frameworks have reported are
//! planted into sound ranks, and the general suite's own draws, in their order, must meet each: a
//! fault counts as caught by nothing that was written for it.
//!
//! ```text
//! for each draw     the oracle, the twin and the sound layout run once, and hold
//!   each fault that it touches and that no draw has caught yet
//!                   the layout runs again with it; where `suite::holds` fails, it is caught
//! ```
//!
//! Nothing here changes product code: a rank's parts are public, and are rebuilt from a changed
//! ledger, partition, schedule or group before the first step. Faults in code: `faults.rs`.

mod common;
mod planted;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use common::suite::{self, Held};
use common::{Deal, Draw};
use planted::{Fault, all};
use quintet_collectives::transport::local::World;
use quintet_ref_trainer::failure::Failure;
use quintet_ref_trainer::job::Dtype;
use quintet_ref_trainer::rank::Begin;
use quintet_ref_trainer::record::{Record, record_within};
use quintet_ref_trainer::verify::{Evidence, evidence};

/// The draws that the suite always runs in f64: `equals_one_device.rs`.
const DRAWS: u32 = 600;

/// A rank that a fault leaves waiting is given up after so long.
const DEADLINE: Duration = Duration::from_secs(30);

/// How a fault was caught.
struct Caught {
    draw: u32,
    /// How many draws that it touches it took.
    touched: u32,
    /// The comparisons in which it shows.
    by: String,
}

#[test]
fn every_fault_in_data_is_met_by_the_general_suite() {
    let deal = Deal::new(Dtype::F64, DRAWS);
    let asked = std::env::var("QUINTET_FAULT").unwrap_or_default();
    let faults: Vec<Fault> = all()
        .into_iter()
        .filter(|f| f.what.contains(&asked))
        .collect();
    let mut open: Vec<(Fault, u32)> = faults.iter().map(|fault| (*fault, 0)).collect();
    let mut caught = BTreeMap::new();
    for number in deal.numbers.clone() {
        let draw = deal.draw(number);
        if open.is_empty() {
            break;
        }
        if !open.iter().any(|(fault, _)| (fault.touches)(&draw.job)) {
            continue;
        }
        let clean = evidence(&draw.job, &draw.samples()).expect("a proof");
        let sound = suite::holds(&draw, &suite::outcome(&draw, clean.clone()));
        assert!(sound.is_ok(), "draw {number}, nothing planted: {sound:?}");
        open.retain_mut(|(fault, touched)| {
            if !(fault.touches)(&draw.job) {
                return true;
            }
            *touched += 1;
            let Err(by) = with(fault, &draw, &clean) else {
                return true;
            };
            let (draw, touched) = (number, *touched);
            println!("draw {draw} meets: {}", fault.what);
            caught.insert(fault.what, Caught { draw, touched, by });
            false
        });
    }
    println!("{}", table(&faults, &caught));
    let survive: Vec<_> = open
        .iter()
        .map(|(fault, touched)| (fault.what, touched))
        .collect();
    assert!(
        survive.is_empty(),
        "not caught in {DRAWS} draws, of which so many have it: {survive:?}"
    );
    assert!(
        faults.len() >= 30 || !asked.is_empty(),
        "{} faults",
        faults.len()
    );
}

/// Runs a draw with a fault.
///
/// # Errors
/// By what the suite fails, if it does.
fn with(fault: &Fault, draw: &Draw, clean: &Evidence) -> Result<Held, String> {
    let ours = planted(fault, draw).map_err(|e| format!("refused: {e}"))?;
    let outcome = suite::outcome(
        draw,
        Evidence {
            ours,
            ..clean.clone()
        },
    );
    suite::holds(draw, &outcome).map_err(|_| outcome.found().join(", "))
}

fn planted(fault: &Fault, draw: &Draw) -> Result<Record, Failure> {
    let world = World::new(draw.job.layout.world())?;
    let samples = draw.samples();
    record_within::<f64>(
        &world,
        DEADLINE,
        &draw.job,
        &samples,
        Begin::Random,
        fault.plant,
    )
}

fn table(faults: &[Fault], caught: &BTreeMap<&str, Caught>) -> String {
    let mut text = format!("{:<66}{:>6}{:>10}  by\n", "fault", "draw", "touched");
    for fault in faults {
        let Some(Caught { draw, touched, by }) = caught.get(fault.what) else {
            let _ = writeln!(text, "{:<66}  SURVIVES", fault.what);
            continue;
        };
        let by: String = by.chars().take(70).collect();
        let _ = writeln!(text, "{:<66}{draw:>6}{touched:>10}  {by}", fault.what);
    }
    text
}
