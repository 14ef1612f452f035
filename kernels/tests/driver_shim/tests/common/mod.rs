//! What these tests run over: the stand-ins beside the program, or a GPU.

use std::env;
use std::path::PathBuf;

/// A library that cargo has put beside this test program.
pub fn beside(name: &str) -> PathBuf {
    let library = env::current_exe().unwrap().with_file_name(name);
    assert!(library.exists(), "{} is not there", library.display());
    library
}

/// The driver that is not there.
pub fn driver() -> PathBuf {
    beside("libquintet_driver_shim.so")
}

/// With `QUINTET_ON_A_GPU=1` the tests run on the machine's own driver (benches/gpu-check).
pub fn on_a_gpu() -> bool {
    env::var_os("QUINTET_ON_A_GPU").is_some_and(|v| v == "1")
}
