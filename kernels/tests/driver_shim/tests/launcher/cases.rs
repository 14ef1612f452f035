//! What can be missing or go wrong, each in a process of its own: this program again, as one case.

use std::env;
use std::process::Command;

use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::{Arg, Call, Launch, Stream};
use quintet_kernels::{Backend, Error, Gpu, Tag};

use crate::{driver, folder, nvrtc};

const STREAM: Stream = Stream(0);

fn call<'a>(grid: [u32; 3], args: &'a [Arg]) -> Call<'a> {
    Call {
        module: "add",
        function: "add_f32",
        grid,
        block: [256, 1, 1],
        shared: 0,
        args,
    }
}

fn failure<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => "nothing failed".into(),
        Err(error) => error.to_string(),
    }
}

/// Of 300 elements each; the kernel reads `n`.
fn add(device: &Cuda, n: i64) -> Result<(), Error> {
    let (x, y) = (device.alloc("x", 1200)?, device.alloc("y", 1200)?);
    for at in [x, y] {
        device.fill(STREAM, at, 0, 1200)?;
    }
    let args = [Arg::Ptr(x), Arg::Ptr(y), Arg::I64(n)];
    device.launch(STREAM, &call([2, 1, 1], &args))
}

/// Runs one case and says what came of it.
fn case(name: &str) -> String {
    let device = match Cuda::new(0) {
        Ok(device) => device,
        Err(error) => return error.to_string(),
    };
    match name {
        "start" => failure(add(&device, 300)),
        "compiled" => {
            add(&device, 300).unwrap();
            device.synchronize(STREAM).unwrap();
            format!("{} compiled", device.compiled())
        }
        "memory" => failure(Gpu::new(device).and_then(|g| g.zeros::<f32>(Tag::Param, 1 << 20))),
        "no such kernel" => {
            let wrong = Call {
                function: "add_f33",
                ..call([1, 1, 1], &[])
            };
            failure(device.launch(STREAM, &wrong))
        }
        "arguments" => {
            failure(device.launch(STREAM, &call([1, 1, 1], &[Arg::Ptr(0), Arg::I64(0)])))
        }
        "bytes" => {
            let args = [Arg::Ptr(0), Arg::Ptr(0), Arg::I32(0)];
            failure(device.launch(STREAM, &call([1, 1, 1], &args)))
        }
        "grid" => {
            let args = [Arg::Ptr(0), Arg::Ptr(0), Arg::I64(0)];
            failure(device.launch(STREAM, &call([1, 70_000, 1], &args)))
        }
        "fault" | "fault waited for" => {
            let launched = failure(add(&device, 301).and_then(|()| device.synchronize(STREAM)));
            let after = [
                failure(device.alloc("z", 4)),
                failure(device.fill(STREAM, 0, 0, 4)),
                failure(add(&device, 1)),
                failure(device.download(STREAM, 0, &mut [0])),
            ];
            assert!(
                after.iter().all(|a| *a == launched),
                "{launched}\n{after:?}"
            );
            // Clones are the same device; it is freed without a panic.
            drop(Gpu::new(device.clone()));
            launched
        }
        other => panic!("no case {other}"),
    }
}

#[test]
fn child() {
    if let Ok(name) = env::var("QUINTET_CASE") {
        println!("<<{}>>", case(&name));
    }
}

/// What `case` says in a process with these variables; `-` takes one away.
fn run(case: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "cases::child", "--nocapture"])
        .env("QUINTET_CASE", case)
        .env("QUINTET_CUDA_DRIVER", driver())
        .env("QUINTET_NVRTC", nvrtc())
        .env("QUINTET_CUBIN_CACHE", "off");
    for (name, value) in variables {
        match *value {
            "-" => command.env_remove(name),
            value => command.env(name, value),
        };
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{case}: {text}");
    let said = text.split_once("<<").and_then(|(_, t)| t.split_once(">>"));
    said.map(|(t, _)| t.to_string()).unwrap_or(text)
}

#[track_caller]
fn says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
    assert!(!said.contains('\n'), "one sentence: {said:?}");
}

#[test]
fn what_is_missing_is_said_in_one_sentence() {
    let no = "/no/such/library.so";
    says(
        &run("start", &[("QUINTET_CUDA_DRIVER", no)]),
        &["no NVIDIA driver", "install"],
    );
    let nothing = nvrtc();
    let not_a_driver = run(
        "start",
        &[("QUINTET_CUDA_DRIVER", nothing.to_str().unwrap())],
    );
    says(&not_a_driver, &["has no cuInit", "CUDA 11.2"]);
    says(
        &run("start", &[("QUINTET_SHIM_DEVICES", "0")]),
        &["no CUDA device"],
    );
    says(
        &run("start", &[("QUINTET_SHIM_ARCH", "75")]),
        &["an emulated GPU is sm_75", "sm_80 or later"],
    );
    says(
        &run("start", &[("QUINTET_NVRTC", no)]),
        &["NVRTC is not there", "QUINTET_CUBINS"],
    );
    says(
        &run("start", &[("QUINTET_SHIM_ARCH", "210")]),
        &["makes no code for sm_210"],
    );
    says(
        &run("memory", &[("QUINTET_SHIM_MEMORY", "1000000")]),
        &["4194304 bytes for parameters"],
    );
    assert_eq!(run("start", &[]), "nothing failed");
}

#[test]
fn wrong_calls_are_refused_by_name() {
    says(
        &run("no such kernel", &[]),
        &["module add has no kernel add_f33"],
    );
    says(
        &run("arguments", &[]),
        &["add_f32: 2 arguments where the kernel takes 3"],
    );
    says(
        &run("bytes", &[]),
        &["add_f32: 4 bytes in an argument where the kernel takes 8"],
    );
    says(
        &run("grid", &[]),
        &["add_f32: 70000 blocks along y where 1 to 65535"],
    );
}

#[test]
fn a_fault_poisons_the_device() {
    let late = run("fault", &[]);
    says(&late, &["CUDA_ERROR_ILLEGAL_ADDRESS", "out of bounds"]);
    let named = run("fault waited for", &[("QUINTET_CUDA_SYNC", "1")]);
    says(
        &named,
        &[
            "add::add_f32 on 2 x 1 x 1 blocks of 256",
            "I64(301)",
            "out of bounds",
        ],
    );
}

#[test]
fn cubins_are_kept_between_processes() {
    let dir = folder("kept");
    let path = dir.join("cache").to_str().unwrap().to_string();
    let run = |variables: &[(&str, &str)]| run("compiled", variables);
    let kept = ("QUINTET_CUBIN_CACHE", path.as_str());
    assert_eq!(run(&[kept]), "1 compiled");
    assert_eq!(run(&[kept]), "0 compiled");
    // What is kept needs no compiler.
    assert_eq!(
        run(&[kept, ("QUINTET_NVRTC", "/no/such/library.so")]),
        "0 compiled"
    );
    // As a folder of precompile's: nothing is written there, and no compiler is looked for.
    let given = [
        ("QUINTET_CUBINS", path.as_str()),
        ("QUINTET_NVRTC", "/no/such/library.so"),
    ];
    assert_eq!(run(&given), "0 compiled");
    // sm_86 runs the machine code of sm_80; sm_90 does not.
    let newer = ("QUINTET_SHIM_ARCH", "86");
    assert_eq!(run(&[given[0], given[1], newer]), "0 compiled");
    assert_eq!(run(&[kept, ("QUINTET_SHIM_ARCH", "90")]), "1 compiled");
    // A home that takes no files is no failure.
    let file = dir.join("file");
    std::fs::write(&file, "").unwrap();
    let unwritable = file.to_str().unwrap();
    let no_cache = [
        ("QUINTET_CUBIN_CACHE", "-"),
        ("XDG_CACHE_HOME", "-"),
        ("HOME", unwritable),
    ];
    assert_eq!(run(&no_cache), "1 compiled");
    let _ = std::fs::remove_dir_all(dir);
}
