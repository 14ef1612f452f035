//! What is compiled: one kernel of one file, for one architecture.
//!
//! ```text
//! prelude.cuh, ptx.cuh   handed over in memory: no include path, no toolkit
//! module.cu              with ONE_KERNEL and the kernel's name (prelude.cuh)
//! key                    SHA-256 of all that, the options and the architecture
//! ```

use std::borrow::Cow;
use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

use sha2::{Digest, Sha256};

/// A file that kernels include.
pub(super) struct Header {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

impl Header {
    pub(super) const ALL: [Self; 2] = [
        Self {
            name: "prelude.cuh",
            text: include_str!("../../cuda/prelude.cuh"),
        },
        Self {
            name: "ptx.cuh",
            text: include_str!("../../cuda/ptx.cuh"),
        },
    ];
}

/// Name and text of a file of kernels.
pub type CudaModule = (&'static str, &'static str);

macro_rules! modules {
    ($($name:literal),* $(,)?) => {
        /// Name and text of each file of kernels.
        const MODULES: &[CudaModule] = &[$(($name, include_str!(concat!("../../cuda/", $name, ".cu")))),*];
    };
}

modules!(
    "add",
    "attention_mma",
    "attention_simt",
    "cast",
    "cross_entropy",
    "dropout",
    "embedding",
    "fold",
    "gelu",
    "gemm_mma",
    "gemm_simt",
    "gemm_tf32",
    "layer_norm",
    "optimizer",
    "permute",
    "rms_norm",
    "rope",
    "router",
    "swiglu",
);

/// The files of kernels, by name.
pub fn modules() -> impl Iterator<Item = &'static str> {
    MODULES.iter().map(|m| m.0)
}

/// What is to be compiled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) module: &'a str,
    /// The one kernel; of none, only the names of all are compiled.
    pub(super) kernel: Option<&'a str>,
    /// The compute capability.
    pub(super) arch: u32,
    text: &'a str,
}

impl<'a> Source<'a> {
    /// `None` where there is no such module, here or among `more`.
    pub(super) fn of(
        module: &'a str,
        kernel: Option<&'a str>,
        arch: u32,
        more: &[CudaModule],
    ) -> Option<Self> {
        let text = MODULES.iter().chain(more).find(|m| m.0 == module)?.1;
        Some(Self {
            module,
            kernel,
            arch,
            text,
        })
    }

    /// The text, its lines numbered as in its file.
    pub(super) fn text(&self) -> &str {
        self.text
    }

    pub(super) fn options(&self) -> Vec<String> {
        let mut options = std::vec![
            format!("--gpu-architecture=sm_{}", self.arch),
            "--std=c++17".to_string(),
            "--pre-include=prelude.cuh".to_string()
        ];
        match self.kernel {
            Some(kernel) => options.extend([
                "-DONE_KERNEL".to_string(),
                format!("-DWANT_{kernel}=~, KERNEL_EMIT"),
            ]),
            None => options.push("-DNAME_KERNELS".to_string()),
        }
        options
    }

    /// What the result depends on, but for the compiler.
    pub(super) fn key(&self) -> String {
        let mut hash = Sha256::new();
        let mut add = |text: Cow<'_, str>| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        for header in &Header::ALL {
            add(header.name.into());
            add(header.text.into());
        }
        add(self.module.into());
        add(self.text.into());
        self.options().into_iter().for_each(|o| add(o.into()));
        hex(&hash.finalize())
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_kernels_is_embedded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|e| {
                let name = e.unwrap().file_name().into_string().unwrap();
                name.strip_suffix(".cu").map(str::to_string)
            })
            .collect();
        files.sort();
        assert_eq!(files, modules().collect::<Vec<_>>());
    }

    #[test]
    fn a_key_depends_on_module_kernel_and_architecture() {
        let key = |module, kernel, arch| Source::of(module, kernel, arch, &[]).unwrap().key();
        let of = [
            key("add", Some("add_f32"), 80),
            key("add", Some("add_f64"), 80),
            key("add", Some("add_f32"), 90),
            key("gelu", Some("add_f32"), 80),
            key("add", None, 80),
        ];
        for (i, x) in of.iter().enumerate() {
            assert!(of[..i].iter().all(|y| x != y));
        }
        assert_eq!(of[0], key("add", Some("add_f32"), 80));
        assert!(Source::of("none", None, 80, &[]).is_none());
        assert!(Source::of("none", None, 80, &[("none", "")]).is_some());
    }
}
