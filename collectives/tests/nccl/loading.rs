//! The library: what cannot be used is one sentence.

use quintet_collectives::Error;
use quintet_collectives::nccl::{HostLane, Library, OLDEST};

use crate::shim::Told;
use crate::{outcomes, step};

#[test]
fn a_library_that_cannot_be_used_is_one_sentence() {
    let told = Told::new("old");
    told.set("version=21304");
    let text = Library::first(&[told.path()]).unwrap_err().to_string();
    assert!(
        text.starts_with("NCCL 2.13.4 at ")
            && text.contains(&format!("too old, {OLDEST} or newer")),
        "{text}"
    );
    told.set("version=21400");
    assert_eq!(told.library().version(), OLDEST);

    // A symbol renamed in a copy.
    let mut bytes = std::fs::read(told.path()).unwrap();
    let name = b"\0ncclGroupEnd\0";
    let found: Vec<usize> = (0..bytes.len() - name.len())
        .filter(|&at| bytes[at..].starts_with(name))
        .collect();
    assert!(!found.is_empty());
    for at in found {
        bytes[at + 1] = b'x';
    }
    let path = told.path().with_file_name("libshort.so");
    std::fs::write(&path, bytes).unwrap();
    let text = Library::first(&[path]).unwrap_err().to_string();
    assert!(
        text.ends_with("is no NCCL that can be used: it has no ncclGroupEnd"),
        "{text}"
    );

    let driver = Told::new("driver");
    driver.set("fail=ncclCommInitRankConfig:1:Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'");
    let lib = driver.library();
    for outcome in outcomes(1, &lib, |comm| step(comm, &lib)) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Library(_)), "{error}");
        assert!(
            error
                .to_string()
                .starts_with("the NVIDIA driver is older than NCCL 2.30.0 at "),
            "{error}"
        );
    }
}

/// The library of `pip install nvidia-nccl-cu13`, which needs no GPU to be asked for its version.
#[test]
fn the_real_library_has_every_symbol() {
    let Ok(path) = std::env::var("QUINTET_REAL_NCCL") else {
        println!("skipped: QUINTET_REAL_NCCL names no libnccl.so.2");
        return;
    };
    let library = Library::first(&[path.into()]).unwrap();
    println!("{library:?}: {} symbols", Library::symbols().len());
    assert!(!library.on_host() && library.version() >= OLDEST);
    assert!(HostLane::new(&library).is_err());
}
