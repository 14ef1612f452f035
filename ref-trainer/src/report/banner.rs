//! What will run, in six lines, before the first message.

use quintet_collectives::mesh::{Degrees, DeviceMesh};
use quintet_parallel_layers::Recompute;
use quintet_planner::CpComm;

use super::Forecast;
use super::human::{bytes, count, percent, shares, thousands};
use crate::job::{Job, Ranks};

/// (heading, text) of each line.
pub(super) fn lines(job: &Job, forecast: &Forecast) -> Vec<(&'static str, String)> {
    let mut lines = vec![("layout", layout(job, forecast))];
    if let Some(map) = rank_map(job) {
        lines.push(("ranks", map));
    }
    lines.push(("model", model(job, forecast)));
    lines.push(("data", data(job, forecast)));
    if !forecast.memory.is_empty() {
        let all = forecast.memory.values().sum();
        let on = if job.layout.world() > 1 {
            " on the fullest rank"
        } else {
            ""
        };
        lines.push((
            "memory",
            format!("{}{on}: {}", bytes(all), shares(&forecast.memory)),
        ));
    }
    let all: u64 = forecast.traffic.values().sum();
    if all > 0 {
        let rows = forecast.row_bytes.map_or(String::new(), |each| {
            format!(
                "; and {} for each token and expert on another rank",
                bytes(each)
            )
        });
        lines.push((
            "traffic",
            format!("{} a step: {}{rows}", bytes(all), shares(&forecast.traffic)),
        ));
    }
    lines
}

/// `dp 2 x tp 2 = 4 ranks`.
pub(super) fn degrees(job: &Job) -> String {
    let l = &job.layout;
    let axes = [("dp", l.dp), ("tp", l.tp), ("pp", l.pp), ("cp", l.cp)];
    let cut: Vec<String> = axes
        .iter()
        .filter(|(_, degree)| *degree > 1)
        .map(|(name, degree)| format!("{name} {degree}"))
        .collect();
    match l.world() {
        1 => "one rank".to_string(),
        world => format!("{} = {world} ranks", cut.join(" x ")),
    }
}

/// The schedule, and how it cuts a stage.
fn schedule(job: &Job) -> String {
    let l = &job.layout;
    match l.chunks() {
        1 => l.schedule.to_string(),
        chunks => format!("{} of {chunks} chunks a stage", l.schedule),
    }
}

fn layout(job: &Job, forecast: &Forecast) -> String {
    let l = &job.layout;
    let ranks = match job.ranks {
        Ranks::Processes(over) => format!(" as processes over {}", over.name()),
        Ranks::Threads if l.world() > 1 => String::from(" as threads"),
        Ranks::Threads => String::new(),
    };
    let mut text = format!("{}{ranks} on cpu", degrees(job));
    let each = job.batch.microbatches() / l.dp.max(1);
    let many = if each == 1 { "" } else { "es" };
    if l.pp > 1 {
        text += &format!("; {}, {each} microbatch{many} a pipeline", schedule(job));
    } else {
        text += &format!("; {each} microbatch{many} a replica");
    }
    if let Some(bubble) = forecast.bubble.filter(|_| l.pp > 1) {
        text += &format!(", bubble {}", percent(bubble));
    }
    if let Some(held) = forecast.held.filter(|_| l.pp > 1) {
        let of = if l.chunks() == 1 { "" } else { " of a chunk" };
        text += &format!(", activations of {held} microbatches{of} at most");
    }
    if l.ep * l.etp > 1 {
        text += &format!("; experts over ep {}", l.ep);
        if l.etp > 1 {
            text += &format!(" x etp {}", l.etp);
        }
    }
    if l.sequence_parallel && l.tp > 1 {
        text += "; sequence parallel";
    }
    if l.cp > 1 {
        let mixed = l.ulysses() > 1 && l.cp_outer() > 1;
        let outer = match l.cp_comm {
            CpComm::Ulysses if mixed => CpComm::Ring,
            comm => comm,
        };
        text += &format!("; {} over cp", outer.name());
        if mixed {
            text += &format!(", ulysses {} within", l.ulysses());
        }
    }
    if l.zero_stage > 0 {
        text += &format!("; ZeRO {}", l.zero_stage);
        if let Some(within) = l.hybrid_shard_size {
            text += &format!(" within {within} replicas");
        }
    }
    if l.recompute != Recompute::None {
        text += &format!("; recompute {}", l.recompute.name());
    }
    if job.threads_per_rank > 1 {
        text += &format!("; {} threads a rank", job.threads_per_rank);
    }
    text
}

fn rank_map(job: &Job) -> Option<String> {
    const WIDE: usize = 100;
    let l = &job.layout;
    let degrees = Degrees {
        pp: l.pp,
        dp: l.dp,
        cp: l.cp,
        tp: l.tp,
        ep: l.ep,
        etp: l.etp,
    };
    if l.world() == 1 {
        return None;
    }
    let map = DeviceMesh::new(degrees).ok()?.to_string();
    if map.chars().count() <= WIDE {
        return Some(map);
    }
    let cut: String = map.chars().take(WIDE - 4).collect();
    Some(cut + " ...")
}

fn model(job: &Job, forecast: &Forecast) -> String {
    let m = &job.model;
    let experts = m.moe.as_ref().map_or(String::new(), |moe| {
        let shared = match moe.shared_ffn {
            0 => String::new(),
            width => format!(" and shared {width}"),
        };
        format!(
            ", {} of {} experts of {}{shared}",
            moe.topk, moe.experts, moe.ffn
        )
    });
    format!(
        "{}: {} parameters in {} ({} layers, hidden {}, {} heads, {} KV, ffn {}{experts}, vocab {}{})",
        job.model_name,
        count(forecast.parameters),
        job.dtype.name(),
        m.layers,
        m.hidden,
        m.heads,
        m.kv_heads,
        m.ffn,
        m.vocab,
        if m.tied { ", tied" } else { "" },
    )
}

fn data(job: &Job, forecast: &Forecast) -> String {
    let b = job.batch;
    let tokens = b.global_batch as u64 * b.seq as u64;
    let mut masked = String::new();
    if job.mask_fraction > 0.0 {
        masked = format!(", {} of them masked", percent(job.mask_fraction));
    }
    if let Some(samples) = job.mask_samples.filter(|share| *share > 0.0) {
        masked += &format!(", {} of the samples masked", percent(samples));
    }
    let entropy = forecast.unigram_entropy;
    let entropy = entropy.map_or(String::new(), |nats| format!(", unigram entropy {nats:.2}"));
    format!(
        "{}{entropy}; {} samples x {} = {} tokens a step{masked}, {} steps",
        forecast.data,
        b.global_batch,
        b.seq,
        thousands(tokens),
        thousands(job.steps),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed() {
        let forecast = Forecast {
            parameters: 203_456,
            data: "embedded: Hamlet, 189 kB".into(),
            memory: [("parameters", 400_000), ("activations", 6_700_000)]
                .map(|(k, v)| (k.to_string(), v))
                .into(),
            traffic: [("tp".to_string(), 3_000_000), ("dp".to_string(), 200_000)].into(),
            bubble: Some(0.2),
            held: Some(2),
            ..Forecast::default()
        };
        let text: Vec<String> = lines(&Job::demo(), &forecast)
            .into_iter()
            .map(|(name, line)| format!("{name:<8} {line}"))
            .collect();
        let golden = [
            "layout   dp 2 x tp 2 x pp 2 x cp 2 = 16 ranks as threads on cpu; 1f1b, 4 microbatches a pipeline, bubble 20%, activations of 2 microbatches at most; experts over ep 4; ring over cp",
            "ranks    dp0[pp0: 0 1 2 3 | pp1: 8 9 10 11]  dp1[pp0: 4 5 6 7 | pp1: 12 13 14 15]",
            "model    tiny-moe: 203k parameters in f32 (4 layers, hidden 64, 4 heads, 2 KV, ffn 176, 2 of 8 experts of 88, vocab 256, tied)",
            "data     embedded: Hamlet, 189 kB; 16 samples x 64 = 1,024 tokens a step, 300 steps",
            "memory   7.1 MB on the fullest rank: activations 6.7 MB, parameters 400 kB",
            "traffic  3.2 MB a step: tp 3.0 MB, dp 200 kB",
        ];
        assert_eq!(text, golden);
        let single = lines(&Job::default(), &Forecast::default());
        assert_eq!(single[0].1, "one rank on cpu; 8 microbatches a replica");
        assert_eq!(single.len(), 3);
    }

    #[test]
    fn a_large_map_is_cut() {
        let mut job = Job::default();
        job.layout.dp = 64;
        let map = rank_map(&job).unwrap();
        assert!(map.ends_with(" ...") && map.chars().count() <= 100);
    }
}
