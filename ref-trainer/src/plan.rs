//! `quintet plan`: which layout, why, at what cost; before any rank exists.
//!
//! ```text
//! model  (name | config.json)  \
//! cluster (preset | file.toml)   > Request -> quintet_planner::search -> table | JSON | CSV
//! job    (flags)               /                \-> toy: the best layout's shape, run on the CPU
//! ```

use std::path::PathBuf;

use quintet_planner::search::{Found, Request, search, smallest};
use quintet_planner::steps::steps;
use serde_json::Value;

use crate::failure::Failure;
use crate::report::human::thousands;
use crate::report::page::plan_page;
use crate::report::{probe, write_named};

mod cluster_file;
mod shape_file;
mod show;
mod times_file;
mod toy;

pub use cluster_file::read_cluster;
pub use shape_file::read_shape;
pub use times_file::read_times;

/// What is to be planned, and how it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The question.
    pub request: Request,
    /// The form of the answer.
    pub form: Form,
    /// A page to write beside the answer.
    pub html: Option<PathBuf>,
    /// Say why the other layouts do not go, and what the rules say of those that do.
    pub explain: bool,
    /// Decide step by step.
    pub steps: bool,
    /// Run the best layout's shape at toy scale.
    pub run: bool,
}

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Table,
    /// One object.
    Json,
    /// A line for each layout.
    Csv,
}

/// Plans, and says what was found.
///
/// # Errors
/// Exit 2 where nothing fits or the request cannot be; what a toy run fails with.
pub fn plan(plan: &Plan) -> Result<String, Failure> {
    let request = &plan.request;
    if plan.steps {
        let (steps, layout) = steps(request)?;
        if layout.is_none() {
            let found = search(request)?;
            if found.best.is_empty() {
                return Err(nothing(request, &found));
            }
        }
        return Ok(show::steps(&steps));
    }
    let found = search(request)?;
    if found.best.is_empty() {
        return Err(nothing(request, &found));
    }
    let mut text = match plan.form {
        Form::Json => show::json(request, &found)?,
        Form::Csv => show::csv(request, &found),
        Form::Table => show::table(request, &found),
    };
    if let Some(path) = &plan.html {
        probe(path)?;
        write_named(path, &page(request, &found)?)?;
    }
    if plan.explain && plan.form == Form::Table {
        text += &show::explain(request, &found);
    }
    if plan.run {
        text += &toy::run(request, &found.best[0])?;
    }
    Ok(text)
}

/// The page of a plan: the object that `--json` prints, and what draws it.
fn page(request: &Request, found: &Found) -> Result<String, Failure> {
    let data: Value = serde_json::from_str(&show::json(request, found)?)
        .map_err(|e| Failure::data(format!("the plan cannot be read back: {e}")))?;
    let cluster = &request.cluster;
    let gpus = thousands(cluster.gpus as u64);
    let title = format!("{} on {gpus} {}", request.shape.name, cluster.name);
    plan_page(&title, "Which layout, why, at what cost.", &data)
}

/// Which of what was asked for leaves no layout to look at.
fn no_mesh(request: &Request) -> String {
    let (gpus, pins) = (request.cluster.gpus, &request.pins);
    let degrees = [
        ("tp", pins.tp),
        ("pp", pins.pp),
        ("cp", pins.cp),
        ("dp", pins.dp),
    ];
    let asked = degrees
        .iter()
        .filter_map(|(name, pin)| pin.map(|n| (*name, n)));
    for (name, n) in asked.clone() {
        if n == 0 || !gpus.is_multiple_of(n) {
            return format!("{name}={n} does not divide them");
        }
    }
    let product = asked
        .clone()
        .try_fold(1, |all: usize, (_, n)| all.checked_mul(n));
    let all = degrees.iter().all(|(_, pin)| pin.is_some());
    if product.is_none_or(|n| !gpus.is_multiple_of(n) || all && n != gpus) {
        let words: Vec<String> = asked.map(|(name, n)| format!("{name}={n}")).collect();
        return format!("{} do not multiply to a part of them", words.join(" x "));
    }
    let each = request.job.global_batch / pins.dp.unwrap_or(1);
    if let Some(n) = pins
        .micro_batch
        .filter(|&n| n == 0 || !each.is_multiple_of(n))
    {
        return format!(
            "micro-batch-size {n} does not divide the {each} sequences of a replica's step"
        );
    }
    let layers = request.shape.config.layers;
    let chunks = layers / pins.pp.unwrap_or(2).max(1);
    match (pins.schedule, pins.virtual_stages) {
        (Some(kind), None | Some(1)) if pins.pp == Some(1) => {
            format!("with one stage there is 1f1b alone, not {kind}")
        }
        (_, Some(n)) => format!(
            "{n} chunks a stage take --schedule interleaved where they are more than 1, stages (pp of 2 or more), and layers for all of them: of {layers} layers at most {chunks} chunks a stage"
        ),
        _ => String::from(
            "nothing goes with all that was asked for together; leave something to be searched",
        ),
    }
}

/// Why there is no layout, and on what there would be one.
fn nothing(request: &Request, found: &Found) -> Failure {
    let (cluster, gib) = (&request.cluster, (1_u64 << 30) as f64);
    let Some(tightest) = &found.tightest else {
        // Not memory but a degree or a way that was asked for.
        let why = match found.rejected.first() {
            Some(rule) => rule.example.clone(),
            None => no_mesh(request),
        };
        return Failure::usage(format!(
            "{} does not go on {} GPUs: {why}",
            request.shape.name, cluster.gpus
        ));
    };
    let enough = match smallest(request) {
        Some(gpus) if gpus <= cluster.gpus => format!(
            "{gpus} GPUs of this kind would do were nothing decided beforehand; leave something to be searched"
        ),
        Some(gpus) => format!("the smallest cluster of this kind that would do has {gpus} GPUs"),
        None => String::from(
            "no cluster of this kind would do, for a single layer is too much; take GPUs with more memory",
        ),
    };
    Failure::usage(format!(
        "{} does not go on {} GPUs: the layout that needs least takes {:.1} GiB on its fullest rank, of {:.1} that {} leaves to a model; {enough}",
        request.shape.name,
        cluster.gpus,
        tightest.held.total() as f64 / gib,
        cluster.usable() as f64 / gib,
        cluster.name
    ))
}
