//! An answer as a table, as JSON and as CSV.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use quintet_planner::advice::{advise, remedies};
use quintet_planner::closed::held::on_stages;
use quintet_planner::closed::pipeline::stages;
use quintet_planner::closed::sent::step;
use quintet_planner::links::{lie, split};
use quintet_planner::search::{Candidate, Found, Request};
use quintet_planner::steps::Step;
use quintet_planner::time::Practice;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::report::human;

const GIB: f64 = (1_u64 << 30) as f64;

/// Bytes of a rank's step by group and collective, inside nodes and between them.
struct Sent {
    group: &'static str,
    collective: &'static str,
    calls: u64,
    inside: f64,
    between: f64,
}

/// What the first rank of the fullest stage sends in a step.
fn sent(request: &Request, candidate: &Candidate) -> Vec<Sent> {
    let (shape, l) = (&request.shape, &candidate.layout);
    let all = stages(&shape.config, l, candidate.microbatches()).unwrap_or_default();
    let Some(stage) = all.into_iter().find(|s| s.stage == candidate.stage) else {
        return Vec::new();
    };
    let mut sums: BTreeMap<(&str, &str), Sent> = BTreeMap::new();
    for flow in step(shape, l, &candidate.batch, request.job.types, &stage) {
        let place = flow.group.place(shape, l);
        let lie = lie(place.0, place.1, request.cluster.gpus_per_node);
        let bytes = (flow.bytes * flow.times) as f64;
        let (inside, between) = split(lie, flow.collective, bytes);
        let (group, collective) = (flow.group.name(), flow.collective.name());
        let sum = sums.entry((group, collective)).or_insert(Sent {
            group,
            collective,
            calls: 0,
            inside: 0.0,
            between: 0.0,
        });
        sum.calls += flow.times;
        sum.inside += inside;
        sum.between += between;
    }
    sums.into_values().collect()
}

fn mesh(candidate: &Candidate, experts: bool) -> String {
    let l = &candidate.layout;
    let mut text = format!("tp {} pp {} cp {} dp {}", l.tp, l.pp, l.cp, l.dp);
    if experts {
        let _ = write!(text, " ep {} etp {}", l.ep, l.etp);
    }
    text
}

fn way(candidate: &Candidate) -> String {
    let l = &candidate.layout;
    let mut text = format!("zero {}", l.zero_stage);
    if l.pp > 1 {
        let _ = write!(text, " {}", l.schedule);
        if l.virtual_stages > 1 {
            let _ = write!(text, " x{}", l.virtual_stages);
        }
    }
    if l.cp > 1 {
        let _ = write!(text, " {}", l.cp_comm.name());
        if let Some(inner) = l.ulysses_degree {
            let _ = write!(text, " of ulysses {inner}");
        }
    }
    if l.sequence_parallel {
        text += " sp";
    }
    let _ = write!(
        text,
        " mbs {} recompute {}",
        candidate.batch.micro_batch,
        l.recompute.name()
    );
    text
}

/// Where a step goes, largest first, and which rules of the craft have something to say.
fn reasons(request: &Request, candidate: &Candidate) -> String {
    let total = candidate.time.total();
    let mut shares: Vec<(&str, f64)> = candidate.time.named().into_iter().collect();
    shares.retain(|(_, seconds)| *seconds > 0.005 * total);
    shares.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shares: Vec<String> = shares
        .into_iter()
        .map(|(name, seconds)| format!("{name} {:.0} %", 100.0 * seconds / total))
        .collect();
    let advice = advise(request, candidate);
    let rules: Vec<&str> = advice.iter().map(|a| a.rule).collect();
    let mut text = shares.join(", ");
    if !rules.is_empty() {
        let _ = write!(text, "; {}", rules.join(", "));
    }
    text
}

/// What a person reads in a minute.
pub(super) fn table(request: &Request, found: &Found) -> String {
    let (cluster, job) = (&request.cluster, &request.job);
    let experts = request.shape.config.moe.is_some();
    let mut text = format!(
        "{}: {:.1}B parameters, {} sequences of {} tokens a step\n{}: {} GPUs in nodes of {}, {:.1} GiB each to a model\n{} layouts looked at, {} fit, of {} meshes\n\n",
        request.shape.name,
        request.shape.parameters() as f64 / 1e9,
        human::thousands(job.global_batch as u64),
        human::thousands(job.seq as u64),
        cluster.name,
        human::thousands(cluster.gpus as u64),
        cluster.gpus_per_node,
        cluster.usable() as f64 / GIB,
        human::thousands(found.considered),
        human::thousands(found.fitting),
        found.meshes
    );
    let _ = writeln!(
        text,
        "{:>2}  {:<34} {:>5} {:>9} {:>7} {:>6} {:>8} {:>8}  how",
        "", "mesh", "MFU", "tok/s/GPU", "GiB", "bubble", "NVLink", "network"
    );
    for (at, candidate) in (1..).zip(&found.best) {
        let sent = sent(request, candidate);
        let inside: f64 = sent.iter().map(|s| s.inside).sum();
        let between: f64 = sent.iter().map(|s| s.between).sum();
        let _ = writeln!(
            text,
            "{at:>2}  {:<34} {:>4.1}% {:>9} {:>7.1} {:>5.1}% {:>8} {:>8}  {}",
            mesh(candidate, experts),
            100.0 * candidate.mfu(request, &found.flops),
            human::thousands((candidate.tokens_per_second() / cluster.gpus as f64) as u64),
            candidate.held.total() as f64 / GIB,
            100.0 * candidate.bubble(),
            human::bytes(inside as u64),
            human::bytes(between as u64),
            way(candidate)
        );
        let _ = writeln!(text, "      {}", reasons(request, candidate));
    }
    let e = &request.efficiency;
    let _ = writeln!(
        text,
        "\nGiB on the fullest rank; bytes a rank sends in a step, inside nodes and between them; bubble is a share of the whole step; below each mesh where its step goes, and the rules that --explain spells out\nMFU: {}\ntime is a model: products at {:.0} % of the peak (half of that at width {}), attention {:.0} %, memory {:.0} %, links {:.0} %; within {:.0} % of published runs\nworld = tp x pp x cp x dp; ep and etp fold into tp x cp x dp",
        found.flops.formula,
        100.0 * e.gemm,
        e.half_width,
        100.0 * e.attention,
        100.0 * e.memory,
        100.0 * e.link,
        100.0 * quintet_planner::time::Efficiency::ERROR
    );
    if request.practice != Practice::default() {
        text += &format!(
            "seconds are of another trainer's habits ({}); bytes and memory are this one's\n",
            habits(&request.practice)
        );
    }
    text
}

/// What another trainer does otherwise, in words.
fn habits(practice: &Practice) -> String {
    let mut all = Vec::new();
    if practice.fp8 {
        all.push(String::from("products in 8 bits"));
    }
    if let Some(bytes) = practice.dispatch_bytes {
        all.push(format!("{bytes} bytes an element to experts"));
    }
    if let Some(nodes) = practice.dispatch_nodes {
        all.push(format!("a token once to each of at most {nodes} nodes"));
    }
    if practice.communication_share > 0.0 {
        let share = 100.0 * practice.communication_share;
        all.push(format!("{share:.0} % of a GPU communicates"));
    }
    all.join(", ")
}

/// Rules, and why the others do not go.
pub(super) fn explain(request: &Request, found: &Found) -> String {
    let mut text = String::from("\nof the first:\n");
    if let Some(best) = found.best.first() {
        for (name, bytes) in best.held.named() {
            let _ = writeln!(text, "  {name:<12} {:>8.2} GiB", bytes as f64 / GIB);
        }
        for s in sent(request, best) {
            let _ = writeln!(
                text,
                "  {:<4} {:<15} {:>8} calls, {:>8} inside nodes, {:>8} between",
                s.group,
                s.collective,
                human::thousands(s.calls),
                human::bytes(s.inside as u64),
                human::bytes(s.between as u64)
            );
        }
        for (name, seconds) in best.time.named() {
            let _ = writeln!(text, "  {name:<12} {seconds:>8.3} s");
        }
    }
    let experts = request.shape.config.moe.is_some();
    for (at, candidate) in (1..).zip(&found.best) {
        for advice in advise(request, candidate) {
            let _ = writeln!(
                text,
                "  {at:>2} {}: {}: {}",
                mesh(candidate, experts),
                advice.rule,
                advice.text
            );
        }
    }
    text += "\nwhy others do not go:\n";
    for rule in &found.rejected {
        let _ = writeln!(
            text,
            "  {:>10} x {}\n               {}",
            human::thousands(rule.count),
            rule.rule,
            rule.example
        );
    }
    if let Some(tightest) = &found.tightest {
        let _ = writeln!(
            text,
            "  the nearest to fitting takes {:.1} of {:.1} GiB: tp {} pp {} cp {} dp {}, zero {}, {}",
            tightest.held.total() as f64 / GIB,
            request.cluster.usable() as f64 / GIB,
            tightest.layout.tp,
            tightest.layout.pp,
            tightest.layout.cp,
            tightest.layout.dp,
            tightest.layout.zero_stage,
            tightest.layout.schedule
        );
        for (change, bytes) in remedies(request, &tightest.layout, &tightest.batch) {
            let _ = writeln!(text, "    with {change}: {:.1} GiB", bytes as f64 / GIB);
        }
    }
    text
}

/// Decision by decision.
pub(super) fn steps(steps: &[Step]) -> String {
    let mut text = String::new();
    for (at, step) in (1..).zip(steps) {
        let _ = writeln!(text, "{at}. {}", step.title);
        for line in &step.lines {
            let _ = writeln!(text, "   {line}");
        }
    }
    text
}

/// The keys are documented in `docs/plan.md`.
pub(super) fn json(request: &Request, found: &Found) -> Result<String, Failure> {
    let layouts: Vec<Value> = found
        .best
        .iter()
        .map(|c| layout(request, found, c))
        .collect();
    let rejected: Vec<Value> = found
        .rejected
        .iter()
        .map(|r| json!({ "rule": r.rule, "count": r.count, "example": r.example }))
        .collect();
    let cluster = &request.cluster;
    let whole = json!({
        "model": {
            "name": request.shape.name,
            "parameters": request.shape.parameters().to_string(),
            "active_parameters": request.shape.active().to_string(),
        },
        "cluster": {
            "name": cluster.name,
            "gpus": cluster.gpus,
            "gpus_per_node": cluster.gpus_per_node,
            "usable_bytes": cluster.usable(),
        },
        "job": { "seq_length": request.job.seq, "global_batch_size": request.job.global_batch },
        "time_model": time_model(request),
        "flops": { "per_token": found.flops.per_token(), "formula": found.flops.formula },
        "considered": found.considered,
        "fitting": found.fitting,
        "meshes": found.meshes,
        "layouts": layouts,
        "rejected": rejected,
    });
    let text = serde_json::to_string_pretty(&whole);
    text.map(|text| text + "\n")
        .map_err(|e| Failure::data(format!("the plan cannot be written as JSON: {e}")))
}

fn time_model(request: &Request) -> Value {
    let (e, practice) = (&request.efficiency, &request.practice);
    json!({
        "gemm": e.gemm,
        "half_width": e.half_width,
        "attention": e.attention,
        "memory": e.memory,
        "link": e.link,
        "hidden": e.hidden,
        "fp8": practice.fp8,
        "dispatch_bytes": practice.dispatch_bytes,
        "dispatch_nodes": practice.dispatch_nodes,
        "communication_share": practice.communication_share,
    })
}

fn layout(request: &Request, found: &Found, c: &Candidate) -> Value {
    let l = &c.layout;
    let memory: BTreeMap<&str, u64> = c.held.named().into_iter().collect();
    let time: BTreeMap<&str, f64> = c.time.named().into_iter().collect();
    let traffic: Vec<Value> = sent(request, c)
        .into_iter()
        .map(|s| {
            json!({
                "group": s.group,
                "collective": s.collective,
                "calls": s.calls,
                "bytes_inside_nodes": s.inside.round() as u64,
                "bytes_between_nodes": s.between.round() as u64,
            })
        })
        .collect();
    let advice: Vec<Value> = advise(request, c)
        .into_iter()
        .map(|a| json!({ "rule": a.rule, "text": a.text }))
        .collect();
    json!({
        "tp": l.tp, "pp": l.pp, "cp": l.cp, "dp": l.dp, "ep": l.ep, "etp": l.etp,
        "sequence_parallel": l.sequence_parallel,
        "schedule": l.schedule.to_string(),
        "virtual_stages": l.virtual_stages,
        "cp_comm": l.cp_comm.name(),
        "ulysses_degree": l.ulysses(),
        "zero_stage": l.zero_stage,
        "recompute": l.recompute.name(),
        "micro_batch_size": c.batch.micro_batch,
        "microbatches": c.microbatches(),
        "fullest_stage": c.stage,
        "memory_bytes": memory,
        "stages": stage_memory(request, c),
        "memory_bytes_total": c.held.total(),
        "traffic": traffic,
        "seconds": time,
        "step_seconds": c.time.total(),
        "bubble": c.bubble(),
        "tokens_per_second": c.tokens_per_second(),
        "mfu": c.mfu(request, &found.flops),
        "advice": advice,
    })
}

/// What the first rank of each stage holds; the others of the stage hold the same, or an element less
/// of what does not divide.
fn stage_memory(request: &Request, c: &Candidate) -> Vec<Value> {
    let (shape, job) = (&request.shape, &request.job);
    let all = stages(&shape.config, &c.layout, c.microbatches()).unwrap_or_default();
    let types = (job.types, job.moments);
    let held = on_stages(shape, &c.layout, &c.batch, types, &all);
    let named = held.iter().map(|held| {
        let memory: BTreeMap<&str, u64> = held.named().into_iter().collect();
        json!(memory)
    });
    named.collect()
}

/// A line for each layout.
pub(super) fn csv(request: &Request, found: &Found) -> String {
    let mut text = String::from(
        "tp,pp,cp,dp,ep,etp,sequence_parallel,schedule,virtual_stages,cp_comm,ulysses_degree,zero_stage,recompute,micro_batch_size,memory_bytes,bytes_inside_nodes,bytes_between_nodes,bubble,step_seconds,tokens_per_second,mfu\n",
    );
    for c in &found.best {
        let l = &c.layout;
        let sent = sent(request, c);
        let inside: f64 = sent.iter().map(|s| s.inside).sum();
        let between: f64 = sent.iter().map(|s| s.between).sum();
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{inside:.0},{between:.0},{:.4},{:.4},{:.1},{:.4}",
            l.tp,
            l.pp,
            l.cp,
            l.dp,
            l.ep,
            l.etp,
            l.sequence_parallel,
            l.schedule,
            l.virtual_stages,
            l.cp_comm.name(),
            l.ulysses(),
            l.zero_stage,
            l.recompute.name(),
            c.batch.micro_batch,
            c.held.total(),
            c.bubble(),
            c.time.total(),
            c.tokens_per_second(),
            c.mfu(request, &found.flops)
        );
    }
    text
}
