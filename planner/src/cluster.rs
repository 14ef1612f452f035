//! What a model is trained on: GPUs in nodes, and what their links carry.
//!
//! ```text
//! node 0                              node 1
//! gpu 0 -- gpu 1 -- .. -- gpu 7       gpu 8 -- ..          inside: each GPU's own link to the others
//!   |        |              |           |                  between: each GPU's share of the network
//!   '--------'------ .. ----'-----------'---------
//! ```

use alloc::format;
use alloc::string::String;

use crate::Invalid;

/// What one GPU sends over one kind of link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second of one GPU, one way.
    pub bandwidth: f64,
    /// Seconds until a message is there, beside its bytes.
    pub latency: f64,
}

/// Operations a second of dense products, by the type of their operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// 8-bit floats; 0 where there are none.
    pub fp8: f64,
    /// bf16.
    pub bf16: f64,
    /// f32, on the units that compute it as it is.
    pub f32: f64,
    /// f64.
    pub f64: f64,
}

/// GPUs and their links.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// What it is called.
    pub name: String,
    /// GPUs in all.
    pub gpus: usize,
    /// GPUs of a node, which reach each other by the links inside.
    pub gpus_per_node: usize,
    /// Bytes of one GPU's memory.
    pub memory: u64,
    /// Bytes of it that a model cannot have: context, communication buffers, fragments.
    pub reserved: u64,
    /// Bytes a second that one GPU reads or writes in its memory.
    pub memory_bandwidth: f64,
    /// Operations a second.
    pub peak: Peaks,
    /// Between GPUs of one node.
    pub inside: Link,
    /// Between nodes.
    pub between: Link,
}

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// Kinds of GPU by name.
pub const PRESETS: [&str; 4] = ["a100", "h100", "h200", "b200"];

impl Cluster {
    /// More GPUs than that are not planned for.
    pub const MOST: usize = 1 << 22;

    /// `gpus` of a kind in nodes of 8, with the sources of its figures:
    ///
    /// | | memory, as the driver reports it | memory bandwidth | bf16 dense | NVLink, one way | network a GPU |
    /// |-|-|-|-|-|-|
    /// | a100 | 81,920 MiB (A100 80 GB SXM) | 2.039 TB/s | 312 TFLOP/s | 300 GB/s | 25 GB/s (DGX A100, HDR) |
    /// | h100 | 81,559 MiB (H100 SXM) | 3.35 TB/s | 989.4 TFLOP/s | 450 GB/s | 50 GB/s (DGX H100, NDR) |
    /// | h200 | 143,771 MiB (H200 SXM) | 4.8 TB/s | 989.4 TFLOP/s | 450 GB/s | 50 GB/s |
    /// | b200 | 183,359 MiB (HGX B200) | 8 TB/s | 2,250 TFLOP/s | 900 GB/s | 50 GB/s (ConnectX-7) |
    ///
    /// Bandwidths and peaks are the vendor's data sheets, dense; latencies (5 us inside, 10 us
    /// between) are round figures. 4 GiB are reserved.
    ///
    /// ```
    /// use quintet_planner::cluster::Cluster;
    /// let cluster = Cluster::preset("h100", 16_384).unwrap();
    /// assert_eq!(cluster.nodes(), 2_048);
    /// ```
    #[must_use]
    pub fn preset(name: &str, gpus: usize) -> Option<Self> {
        let (memory, bandwidth, fp8, bf16, f32, f64, inside, between) = match name {
            "a100" => (81_920, 2.039e12, 0.0, 312e12, 19.5e12, 19.5e12, 300e9, 25e9),
            "h100" => (
                81_559, 3.35e12, 1978.9e12, 989.4e12, 66.9e12, 66.9e12, 450e9, 50e9,
            ),
            "h200" => (
                143_771, 4.8e12, 1978.9e12, 989.4e12, 66.9e12, 66.9e12, 450e9, 50e9,
            ),
            "b200" => (183_359, 8e12, 4500e12, 2250e12, 75e12, 37e12, 900e9, 50e9),
            _ => return None,
        };
        Some(Self {
            name: String::from(name),
            gpus,
            gpus_per_node: 8,
            memory: memory * MIB,
            reserved: 4 * GIB,
            memory_bandwidth: bandwidth,
            peak: Peaks {
                fp8,
                bf16,
                f32,
                f64,
            },
            inside: Link {
                bandwidth: inside,
                latency: 5e-6,
            },
            between: Link {
                bandwidth: between,
                latency: 10e-6,
            },
        })
    }

    /// Bytes of one GPU that a model may have.
    #[must_use]
    pub fn usable(&self) -> u64 {
        self.memory.saturating_sub(self.reserved)
    }

    /// Nodes, the last perhaps not full.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.gpus.div_ceil(self.gpus_per_node.max(1))
    }

    /// Whether there is anything to plan for.
    ///
    /// # Errors
    /// The first figure that cannot be.
    pub fn validate(&self) -> Result<(), Invalid> {
        let no = |text: String| Err(Invalid(text));
        if self.gpus == 0 {
            return no(String::from(
                "a cluster of 0 GPUs trains nothing; give at least 1",
            ));
        }
        if self.gpus_per_node == 0 {
            return no(String::from(
                "a node of 0 GPUs; give gpus_per_node of at least 1",
            ));
        }
        for (name, value) in [("GPUs", self.gpus), ("GPUs a node", self.gpus_per_node)] {
            if value > Self::MOST {
                return no(format!(
                    "{value} {name} are more than is planned for; the most is {}",
                    Self::MOST
                ));
            }
        }
        if self.gpus > self.gpus_per_node && !self.gpus.is_multiple_of(self.gpus_per_node) {
            let below = self.gpus / self.gpus_per_node * self.gpus_per_node;
            return no(format!(
                "{} GPUs do not fill nodes of {}; nearest: {below} or {}",
                self.gpus,
                self.gpus_per_node,
                below + self.gpus_per_node
            ));
        }
        if self.usable() == 0 {
            return no(format!(
                "{} bytes of memory, of which {} are reserved, leave nothing to a model",
                self.memory, self.reserved
            ));
        }
        for (name, value) in [
            ("memory_bandwidth", self.memory_bandwidth),
            ("peak bf16", self.peak.bf16),
            ("bandwidth inside", self.inside.bandwidth),
            ("bandwidth between", self.between.bandwidth),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return no(format!("{name} is {value}; it must be above 0"));
            }
        }
        for (name, value) in [
            ("peak fp8", self.peak.fp8),
            ("peak f32", self.peak.f32),
            ("peak f64", self.peak.f64),
            ("latency inside", self.inside.latency),
            ("latency between", self.between.latency),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return no(format!("{name} is {value}; it must be 0 or more"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn presets_are_whole_and_others_say_what_they_lack() {
        for name in PRESETS {
            let cluster = Cluster::preset(name, 64).unwrap();
            assert_eq!(cluster.validate(), Ok(()));
            assert!(cluster.usable() < cluster.memory);
        }
        assert_eq!(Cluster::preset("v100", 8), None);
        let of = |change: &dyn Fn(&mut Cluster)| {
            let mut cluster = Cluster::preset("h100", 64).unwrap();
            change(&mut cluster);
            cluster.validate().unwrap_err().0
        };
        let said: Vec<String> = [
            of(&|c| c.gpus = 0),
            of(&|c| c.gpus_per_node = 0),
            of(&|c| c.gpus = usize::MAX),
            of(&|c| c.gpus = 12),
            of(&|c| c.reserved = c.memory),
            of(&|c| c.peak.bf16 = f64::NAN),
            of(&|c| c.between.latency = -1.0),
        ]
        .into();
        let expected = [
            "0 GPUs",
            "node of 0",
            "the most is 4194304",
            "8 or 16",
            "leave nothing",
            "above 0",
            "0 or more",
        ];
        for (said, expected) in said.iter().zip(expected) {
            assert!(said.contains(expected), "{said}");
        }
        // A part of one node is a cluster.
        let few = Cluster::preset("h100", 3).unwrap();
        assert_eq!((few.validate(), few.nodes()), (Ok(()), 1));
    }
}
