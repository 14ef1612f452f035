//! A cluster in a TOML file.
//!
//! ```toml
//! name = "mine"
//! gpus = 64
//! gpus_per_node = 8
//! memory_gib = 80.0
//! reserved_gib = 4.0            # may be left out: 4
//! memory_GBps = 3350.0
//! fp8_tflops = 1979.0           # may be left out: 0
//! bf16_tflops = 989.4
//! f32_tflops = 66.9             # may be left out: 0
//! f64_tflops = 66.9             # may be left out: 0
//! inside = { GBps = 450.0, latency_us = 5.0 }
//! between = { GBps = 50.0, latency_us = 10.0 }
//! ```

use std::path::Path;

use quintet_planner::cluster::{Cluster, Link, Peaks};
use serde::Deserialize;

use crate::failure::Failure;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    gpus: usize,
    gpus_per_node: usize,
    memory_gib: f64,
    #[serde(default = "four")]
    reserved_gib: f64,
    #[serde(rename = "memory_GBps")]
    memory_gbps: f64,
    #[serde(default)]
    fp8_tflops: f64,
    bf16_tflops: f64,
    #[serde(default)]
    f32_tflops: f64,
    #[serde(default)]
    f64_tflops: f64,
    inside: FileLink,
    between: FileLink,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    #[serde(rename = "GBps")]
    gbps: f64,
    latency_us: f64,
}

/// What is wrong in a TOML text, in one line, with the number of the line it is in.
pub(super) fn toml_error(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line = before.map_or(String::new(), |before| {
        format!(" (line {})", before.matches('\n').count() + 1)
    });
    let said: Vec<&str> = error.message().lines().map(str::trim).collect();
    format!("{}{line}", said.join("; "))
}

fn four() -> f64 {
    4.0
}

/// The cluster that a file describes.
///
/// # Errors
/// Exit 2, naming the file and the key.
pub fn read_cluster(path: &Path) -> Result<Cluster, Failure> {
    let shown = path.display();
    let said = |what: String| Failure::usage(format!("cluster {shown}: {what}"));
    let text = std::fs::read_to_string(path).map_err(|e| said(format!("cannot be read ({e})")))?;
    let file: File = toml::from_str(&text).map_err(|e| said(toml_error(&text, &e)))?;
    let link = |link: FileLink| Link {
        bandwidth: link.gbps * 1e9,
        latency: link.latency_us * 1e-6,
    };
    let gib = |gib: f64| (gib.max(0.0) * (1_u64 << 30) as f64) as u64;
    let cluster = Cluster {
        name: file.name.unwrap_or_else(|| shown.to_string()),
        gpus: file.gpus,
        gpus_per_node: file.gpus_per_node,
        memory: gib(file.memory_gib),
        reserved: gib(file.reserved_gib),
        memory_bandwidth: file.memory_gbps * 1e9,
        peak: Peaks {
            fp8: file.fp8_tflops * 1e12,
            bf16: file.bf16_tflops * 1e12,
            f32: file.f32_tflops * 1e12,
            f64: file.f64_tflops * 1e12,
        },
        inside: link(file.inside),
        between: link(file.between),
    };
    cluster.validate().map_err(|invalid| said(invalid.0))?;
    Ok(cluster)
}
