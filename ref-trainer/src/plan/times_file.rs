//! What a machine was measured to do, and how another trainer goes about a step, in a TOML file.
//!
//! ```toml
//! [efficiency]                  # shares of the peaks; what is left out stays as it is
//! gemm = 0.62                   # of wide products
//! half_width = 128.0            # a product whose narrowest side is so wide runs at half of that
//! attention = 0.35
//! memory = 0.6
//! link = 0.75
//! hidden = 0.8                  # of work, what experts' rows travel behind under dualpipe-v
//!
//! [links]                       # as quintet bench --calibrate --constants FILE wrote them
//! constants = "constants.txt"   # beside this file
//! inside = "shm"                # transports of that file
//! between = "tcp"               # may be left out on one node
//!
//! [practice]                    # another trainer's; bytes and memory stay this one's
//! fp8 = true                    # products of blocks in 8 bits
//! dispatch_bytes = 1            # of an element on its way to an expert
//! dispatch_nodes = 4            # a token goes to so many nodes at most, once to each
//! communication_share = 0.15    # of a GPU's units, those that do nothing but communicate
//!
//! [[gemm]]                      # kernels that were timed; shares are fitted to them
//! m = 4096
//! n = 4096
//! k = 4096
//! us = 222.0
//!
//! [[attention]]                 # causal, forward
//! sequences = 1
//! tokens = 8192
//! heads = 16
//! head_dim = 128
//! us = 800.0
//!
//! [[memory]]                    # bytes read and written by an element-wise pass
//! bytes = 1073741824
//! us = 520.0
//! ```
//!
//! `quintet bench kernels` prints the last three for the machine it runs on.

use std::path::Path;

use quintet_collectives::cost::{Constants, parse};
use quintet_planner::cluster::Link;
use quintet_planner::search::Request;
use quintet_planner::time::{Measured, Practice};
use serde::Deserialize;

use super::cluster_file::toml_error;
use crate::failure::Failure;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    efficiency: Shares,
    links: Option<Links>,
    #[serde(default)]
    practice: Habits,
    #[serde(default)]
    gemm: Vec<Product>,
    #[serde(default)]
    attention: Vec<Attended>,
    #[serde(default)]
    memory: Vec<Pass>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shares {
    gemm: Option<f64>,
    half_width: Option<f64>,
    attention: Option<f64>,
    memory: Option<f64>,
    link: Option<f64>,
    hidden: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Links {
    constants: String,
    inside: String,
    between: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Habits {
    #[serde(default)]
    fp8: bool,
    dispatch_bytes: Option<usize>,
    dispatch_nodes: Option<usize>,
    #[serde(default)]
    communication_share: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    us: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Attended {
    sequences: usize,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    us: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pass {
    bytes: u64,
    us: f64,
}

/// Changes a request as the file says.
///
/// # Errors
/// Exit 2, naming the file and the key.
pub fn read_times(path: &Path, request: &mut Request) -> Result<(), Failure> {
    let shown = path.display();
    let said = |what: String| Failure::usage(format!("times {shown}: {what}"));
    let text = std::fs::read_to_string(path).map_err(|e| said(format!("cannot be read ({e})")))?;
    let file: File = toml::from_str(&text).map_err(|e| said(toml_error(&text, &e)))?;
    let peak = request.job.peak(&request.cluster);
    let measured = file.measured();
    if let Some(links) = &file.links {
        links.apply(path, request).map_err(said)?;
    }
    let e = &mut request.efficiency;
    *e = e
        .measured(&request.cluster, peak, &measured)
        .map_err(|invalid| said(invalid.0))?;
    for (name, given, share, most) in [
        ("gemm", file.efficiency.gemm, &mut e.gemm, 1.0),
        (
            "half_width",
            file.efficiency.half_width,
            &mut e.half_width,
            f64::MAX,
        ),
        (
            "attention",
            file.efficiency.attention,
            &mut e.attention,
            1.0,
        ),
        ("memory", file.efficiency.memory, &mut e.memory, 1.0),
        ("link", file.efficiency.link, &mut e.link, 1.0),
        ("hidden", file.efficiency.hidden, &mut e.hidden, 1.0),
    ] {
        let Some(given) = given else { continue };
        // Nothing hidden and no width of half are shares that can be.
        let may_be_0 = matches!(name, "hidden" | "half_width");
        if !(given.is_finite() && given <= most && (given > 0.0 || may_be_0 && given == 0.0)) {
            let range = if most == 1.0 {
                "a share from 0 to 1"
            } else {
                "a width of 0 or more"
            };
            return Err(said(format!("{name} is {given}; it must be {range}")));
        }
        *share = given;
    }
    request.practice = Practice {
        fp8: file.practice.fp8,
        dispatch_bytes: file.practice.dispatch_bytes,
        dispatch_nodes: file.practice.dispatch_nodes,
        communication_share: file.practice.communication_share,
    };
    let practice = request.practice.validate(&request.cluster);
    practice.map_err(|invalid| said(invalid.0))
}

impl File {
    fn measured(&self) -> Measured {
        let seconds = |us: f64| us * 1e-6;
        let product = |p: &Product| ([p.m, p.n, p.k], seconds(p.us));
        let attention = |a: &Attended| {
            let square = a.tokens as f64 * a.tokens as f64 * a.sequences as f64;
            // Two products of half a square.
            let operations = 2.0 * square * a.heads as f64 * a.head_dim as f64;
            (operations, seconds(a.us))
        };
        Measured {
            products: self.gemm.iter().map(product).collect(),
            attention: self.attention.iter().map(attention).collect(),
            memory: self
                .memory
                .iter()
                .map(|m| (m.bytes as f64, seconds(m.us)))
                .collect(),
        }
    }
}

impl Links {
    /// The links of the cluster as they were measured, of which all is then reached.
    fn apply(&self, times: &Path, request: &mut Request) -> Result<(), String> {
        let path = times
            .parent()
            .unwrap_or(Path::new(""))
            .join(&self.constants);
        let shown = path.display();
        let text = std::fs::read_to_string(&path)
            .map_err(|e| format!("constants {shown} cannot be read ({e})"))?;
        let all = parse(&text).map_err(|e| format!("constants {shown}: {e}"))?;
        let of = |name: &String| {
            let found = all.iter().find(|(n, _)| n == name);
            let found = found.map(|(_, constants)| link(constants));
            found.ok_or_else(|| {
                let names: Vec<&str> = all.iter().map(|(n, _)| n.as_str()).collect();
                format!(
                    "constants {shown} have no transport {name:?}; there are {}",
                    names.join(", ")
                )
            })
        };
        let cluster = &mut request.cluster;
        cluster.inside = of(&self.inside)?;
        match &self.between {
            Some(name) => cluster.between = of(name)?,
            None if cluster.nodes() > 1 => {
                return Err(format!(
                    "between is missing among the links of a cluster of {} nodes",
                    cluster.nodes()
                ));
            }
            None => {}
        }
        request.efficiency.link = 1.0;
        Ok(())
    }
}

/// What a transport does with long messages.
fn link(constants: &Constants) -> Link {
    Link {
        bandwidth: 1.0 / constants.send.at(u64::MAX),
        latency: constants.latency + constants.overhead,
    }
}
