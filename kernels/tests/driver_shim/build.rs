//! Links the kernels of the emulator's tests, which are compiled with quintet-kernels: the intrinsics
//! are run by the launcher too.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(folder) = std::env::var("DEP_QUINTET_KERNELS_PLANTED") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-lib=static=quintet_planted");
    }
}
