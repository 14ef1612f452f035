//! Machine code made beforehand, without a driver, and run without a compiler.

use quintet_kernels::cuda::precompile;
use quintet_kernels::launch::Arch;

use crate::{cuda, folder};

#[test]
fn kernels_are_precompiled_for_each_architecture() {
    // For NVRTC's place in the environment.
    cuda();
    let out = folder("precompiled");
    let wanted = |module: &str, kernel: &str| module == "add" && kernel.ends_with("_f32");
    let archs = [Arch(80), Arch(90), Arch(120)];
    let made = precompile(&archs, &out, wanted).unwrap();
    assert_eq!((made.kernels, made.compiled), (6, 6));
    let again = precompile(&archs, &out, wanted).unwrap();
    assert_eq!(
        (again.kernels, again.compiled, again.bytes),
        (6, 0, made.bytes)
    );
    let mut names: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 6, "{names:?}");
    assert!(names[0].starts_with("add_f32-sm_120-"), "{names:?}");
    let unknown = precompile(&[Arch(30)], &out, wanted).unwrap_err();
    assert!(unknown.to_string().contains("sm_30"), "{unknown}");
    let file = out.join("file");
    std::fs::write(&file, "").unwrap();
    let unwritable = precompile(&[Arch(80)], &file, wanted).unwrap_err();
    assert!(
        unwritable.to_string().contains("can not be written"),
        "{unwritable}"
    );
    let _ = std::fs::remove_dir_all(out);
}
