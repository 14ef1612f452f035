//! `report.html`: one file that shows a run and loads nothing.
//!
//! ```text
//! job, forecast ---.
//! steps, proof -----+--> Page (plain data) --> JSON --> page.html + look.css + *.js --> report.html
//! what ranks saw --'
//! ```
//!
//! What is drawn is decided by the scripts beside this file; what is said is decided here.

use std::collections::{BTreeMap, BTreeSet};

use quintet_collectives::Axis;
use quintet_kernels::Tag;
use quintet_parallel_layers::pipeline::Action;
use quintet_planner::memory::activations;
use quintet_planner::model::mesh;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::human::utc;
use super::timeline::Timeline;
use super::{EqualityTable, Forecast, StepReport, banner, megatron};
use crate::failure::Failure;
use crate::job::Job;
use crate::spans::{Recording, What};
use crate::verify::{predicted_memory, predicted_ranks, wire_types};

mod drawn;
mod history;

pub use history::History;

/// What one rank saw of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Its spans, of the steps that were recorded.
    pub recording: Recording,
    /// The most bytes it held in a step, by category, in the order of [`Tag::ALL`].
    pub memory: [u64; 6],
    /// Bytes it sent in training, by group and receiver.
    pub sent: BTreeMap<String, BTreeMap<usize, u64>>,
}

/// A run, as its page shows it.
#[derive(Debug, Serialize)]
struct Page {
    facts: Vec<(&'static str, String)>,
    /// Each rank's place on the mesh.
    places: Vec<String>,
    steps: Vec<Value>,
    held_out: Vec<(u64, f64)>,
    unigram_entropy: Option<f64>,
    /// Whether stages can idle.
    bubble: bool,
    proof: Option<Value>,
    timeline: Option<drawn::Drawn>,
    memory: Option<Memory>,
    traffic: Option<Traffic>,
    experts: Option<Experts>,
}

#[derive(Debug, Serialize)]
struct Memory {
    categories: Vec<&'static str>,
    /// By rank and category.
    counted: Vec<Vec<u64>>,
    predicted: Vec<Vec<Option<u64>>>,
    /// Whether activations depend on the routing, so that those predicted are no bound.
    estimate: bool,
}

#[derive(Debug, Serialize)]
struct Traffic {
    steps: u64,
    groups: Vec<String>,
    /// Group, from, to, bytes.
    cells: Vec<(usize, usize, usize, u64)>,
    /// By rank and group, over all steps.
    predicted: Vec<Vec<u64>>,
    /// Groups in which the router decides how much is sent.
    routed: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
struct Experts {
    layers: Vec<usize>,
    load: Vec<Vec<u64>>,
    series: Vec<Value>,
}

/// The page of a run: what was forecast, how its steps went, what its ranks saw in the `done` steps
/// of training that they did, and the proof where there is one.
///
/// # Errors
/// Where the layout cannot be; exit 3 where JSON refuses a number.
pub fn page(
    job: &Job,
    forecast: &Forecast,
    history: &History,
    (seen, done): (&[Seen], u64),
    proof: Option<&EqualityTable>,
) -> Result<String, Failure> {
    let page = Page {
        facts: banner::lines(job, forecast),
        places: places(job)?,
        steps: history.steps().map(step).collect(),
        held_out: history.held_out().to_vec(),
        unigram_entropy: forecast.unigram_entropy,
        bubble: job.layout.pp > 1,
        proof: proof.map(told),
        timeline: timeline(job, seen),
        memory: memory(job, seen)?,
        traffic: traffic(job, seen, done)?,
        experts: experts(history),
    };
    let title = format!("{}: {}", job.model_name, banner::degrees(job));
    let lede = format!(
        "A training run of {} steps, {}.",
        history.last(),
        forecast.data
    );
    let script = [SCRIPT[0], SCRIPT[1], SCRIPT[2]].concat();
    written(&title, &lede, &page, &script)
}

const SCRIPT: [&str; 3] = [
    include_str!("page/kit.js"),
    include_str!("page/timeline.js"),
    include_str!("page/run.js"),
];

/// The page of a plan, from the object that `quintet plan --json` prints.
///
/// # Errors
/// Exit 3 where JSON refuses a number.
pub(crate) fn plan_page(title: &str, lede: &str, plan: &Value) -> Result<String, Failure> {
    let script = [SCRIPT[0], include_str!("page/plan.js")].concat();
    written(title, lede, plan, &script)
}

/// A page with its data, style and script in it.
fn written(
    title: &str,
    lede: &str,
    data: &impl Serialize,
    script: &str,
) -> Result<String, Failure> {
    let data = serde_json::to_string(data)
        .map_err(|e| Failure::data(format!("the page's numbers cannot be written: {e}")))?;
    // Within a script element nothing ends it but its end tag, nor opens a comment.
    let data = data.replace('<', "\\u003c");
    let made = utc(megatron::now());
    let parts = [
        ("VERSION", env!("CARGO_PKG_VERSION")),
        ("TITLE", &escaped(title)),
        ("LEDE", &escaped(lede)),
        ("STYLE", include_str!("page/look.css")),
        ("MADE", &made),
        ("DATA", &data),
        ("SCRIPT", script),
    ];
    Ok(filled(include_str!("page/page.html"), &parts))
}

/// The template with each `@NAME@` replaced; what is put in is not looked at again.
fn filled(template: &str, parts: &[(&str, &str)]) -> String {
    let mut text =
        String::with_capacity(template.len() + parts.iter().map(|(_, p)| p.len()).sum::<usize>());
    for (i, piece) in template.split('@').enumerate() {
        match parts.iter().find(|(name, _)| i % 2 == 1 && *name == piece) {
            Some((_, part)) => text += part,
            None => text += piece,
        }
    }
    text
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// `pp 1 dp 0 tp 1` of each rank: the axes that are cut, outermost first.
pub(crate) fn places(job: &Job) -> Result<Vec<String>, Failure> {
    let (mesh, layout) = (mesh(&job.layout)?, &job.layout);
    let axes = [
        (Axis::Pp, layout.pp),
        (Axis::Dp, layout.dp),
        (Axis::Cp, layout.cp),
        (Axis::Tp, layout.tp),
        (Axis::Ep, layout.ep),
        (Axis::Etp, layout.etp),
    ];
    let of = |rank| {
        let cut = axes.iter().filter(|(_, degree)| *degree > 1);
        let words = cut.map(|(axis, _)| format!("{} {}", axis.name(), mesh.index(rank, *axis)));
        words.collect::<Vec<_>>().join(" ")
    };
    Ok((0..mesh.world()).map(of).collect())
}

/// Number in the step of the first microbatch of each rank's replica.
pub(crate) fn first_microbatches(job: &Job) -> Result<Vec<usize>, Failure> {
    let mesh = mesh(&job.layout)?;
    let each = job.batch.microbatches() / job.layout.dp.max(1);
    let first = |rank| mesh.index(rank, Axis::Dp) * each;
    Ok((0..mesh.world()).map(first).collect())
}

fn step(report: &StepReport) -> Value {
    serde_json::json!({
        "step": report.step,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "tokens_per_s": report.tokens_per_s.round(),
        "step_ms": short(report.step_ms),
        "bubble": short(report.bubble),
        "wait": report.comm_wait_ms.iter().map(|(axis, ms)| (axis.clone(), short(*ms).into())).collect::<serde_json::Map<_, Value>>(),
    })
}

/// Three digits behind the point are all that a page shows of a time.
fn short(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

fn told(table: &EqualityTable) -> Value {
    let rows = table.rows.iter().map(|row| {
        serde_json::json!({
            "step": row.step, "quantity": row.quantity, "difference": row.difference,
            "bound": row.bound, "verdict": row.verdict(),
        })
    });
    serde_json::json!({
        "holds": table.holds(),
        "losses": table.losses,
        "rows": rows.collect::<Vec<_>>(),
    })
}

fn timeline(job: &Job, seen: &[Seen]) -> Option<drawn::Drawn> {
    let mut recordings: Vec<Recording> = seen.iter().map(|seen| seen.recording.clone()).collect();
    if job.layout.zero_stage < 3 {
        // What is whole all the time is neither gathered nor released.
        let idle = |what| {
            matches!(
                what,
                What::Action(Action::Gather { .. } | Action::Release { .. })
            )
        };
        for recording in &mut recordings {
            recording.spans.retain(|span| !idle(span.what));
        }
    }
    let timeline = Timeline::new(&recordings);
    let first = first_microbatches(job).ok()?;
    (!timeline.is_empty()).then(|| drawn::draw(&timeline, &first, drawn::MOST))
}

fn memory(job: &Job, seen: &[Seen]) -> Result<Option<Memory>, Failure> {
    if seen.is_empty() {
        return Ok(None);
    }
    let exact = predicted_memory(job)?;
    let kept = activations(&job.model, &job.layout, &job.batch, wire_types(job))?;
    let of = |(exact, kept): (&quintet_planner::states::Memory, &_)| {
        let quintet_planner::memory::Activations { saved, work } = kept;
        let tag = |tag: &Tag| match tag {
            Tag::Activation => Some(saved + work),
            tag => exact.get(tag.name()).map(|bytes| bytes.peak),
        };
        Tag::ALL.iter().map(tag).collect()
    };
    Ok(Some(Memory {
        categories: Tag::ALL.iter().map(|tag| tag.name()).collect(),
        counted: seen.iter().map(|seen| seen.memory.to_vec()).collect(),
        predicted: exact.iter().zip(&kept).map(of).collect(),
        estimate: job.model.moe.is_some(),
    }))
}

fn traffic(job: &Job, seen: &[Seen], steps: u64) -> Result<Option<Traffic>, Failure> {
    if seen.len() < 2 || steps == 0 {
        return Ok(None);
    }
    let ranks = predicted_ranks(job)?;
    let predicted = ranks.iter().flat_map(BTreeMap::keys).cloned();
    let measured = seen.iter().flat_map(|seen| seen.sent.keys());
    let groups: BTreeSet<String> = measured
        .map(|name| (*name).to_string())
        .chain(predicted)
        .collect();
    let any = |name: &String| {
        let sent = seen.iter().filter_map(|seen| seen.sent.get(name.as_str()));
        let planned = ranks.iter().filter_map(|rank| rank.get(name));
        sent.flat_map(BTreeMap::values)
            .chain(planned)
            .any(|bytes| *bytes > 0)
    };
    let groups: Vec<String> = groups.into_iter().filter(any).collect();
    let mut cells = Vec::new();
    for (from, seen) in seen.iter().enumerate() {
        for (group, name) in groups.iter().enumerate() {
            let to = seen.sent.get(name.as_str()).into_iter().flatten();
            let sent = to.filter(|(_, bytes)| **bytes > 0);
            cells.extend(sent.map(|(to, bytes)| (group, from, *to, *bytes)));
        }
    }
    let of = |rank: &BTreeMap<String, u64>| {
        let planned = groups
            .iter()
            .map(|name| rank.get(name).copied().unwrap_or(0) * steps);
        planned.collect()
    };
    let routed = if job.model.moe.is_some() {
        vec!["ep", "etp"]
    } else {
        Vec::new()
    };
    Ok(Some(Traffic {
        steps,
        predicted: ranks.iter().map(of).collect(),
        routed,
        cells,
        groups,
    }))
}

fn experts(history: &History) -> Option<Experts> {
    let load = history.load();
    let layers: Vec<usize> = (0..load.len())
        .filter(|&layer| load[layer].iter().any(|n| *n > 0))
        .collect();
    if layers.is_empty() {
        return None;
    }
    let series = history.steps().filter_map(|report| {
        let experts = report.experts.as_ref()?;
        Some(serde_json::json!({
            "step": report.step, "imbalance": short(experts.imbalance), "dropped": short(experts.dropped),
        }))
    });
    Some(Experts {
        load: layers.iter().map(|&layer| load[layer].clone()).collect(),
        series: series.collect(),
        layers,
    })
}

#[cfg(test)]
mod tests;
