//! `quintet precompile`: machine code of the CUDA kernels, with NVRTC alone.

use crate::cli::Precompile;
use crate::failure::Failure;

/// Compiles what is asked for; says how much that was.
///
/// # Errors
/// Exit 2 where the compiler is missing or does not know an architecture, or a name is no file of
/// kernels; exit 3 where the folder can not be written.
#[cfg(feature = "cuda")]
pub fn precompile(asked: &Precompile) -> Result<String, Failure> {
    use quintet_kernels::cuda;
    use quintet_kernels::launch::Arch;
    let known: Vec<&str> = cuda::modules().collect();
    if let Some(name) = asked.modules.iter().find(|m| !known.contains(&m.as_str())) {
        return Err(Failure::usage(format!(
            "--modules: there is no file of kernels {name}; there are {}",
            known.join(", ")
        )));
    }
    let archs: Vec<Arch> = asked.archs.iter().map(|&a| Arch(a)).collect();
    let wanted = |module: &str, _: &str| {
        asked.modules.is_empty() || asked.modules.iter().any(|m| m == module)
    };
    let made = cuda::precompile(&archs, &asked.out, wanted)?;
    Ok(format!(
        "{} kernels in {}, {} of them compiled now, {:.1} MB; QUINTET_CUBINS={} has them found\n",
        made.kernels,
        asked.out.display(),
        made.compiled,
        made.bytes as f64 / 1e6,
        asked.out.display(),
    ))
}

/// As a build without feature `cuda` says it.
///
/// # Errors
/// Exit 2, always.
#[cfg(not(feature = "cuda"))]
pub fn precompile(_: &Precompile) -> Result<String, Failure> {
    Err(no_cuda())
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn no_cuda() -> Failure {
    Failure::usage(
        "this quintet was built without CUDA; cargo build --release -p quintet-ref-trainer --features cuda builds one with it (it needs no toolkit)",
    )
}
