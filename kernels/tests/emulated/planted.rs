//! A fault a detector, and a row of the happens-before table.

use quintet_kernels::Error;
use quintet_kernels::emulated::order::{Meeting, RULES};
use quintet_kernels::emulated::{Fault, FaultKind, FaultKind::*};
use quintet_kernels::launch::{Arg, Call, Launch, Stream};

use crate::{device, seeds};

/// Kernel and kind of fault.
const PLANTED: &[(&str, FaultKind)] = &[
    ("reads_past_the_end", OutOfBounds),
    ("writes_before_the_start", OutOfBounds),
    ("runs_over_a_shared_array", OutOfBounds),
    ("runs_over_dynamic_shared", OutOfBounds),
    ("is_misaligned", Misaligned),
    ("loads_wide_misaligned", Misaligned),
    ("lacks_a_barrier", Race),
    ("writes_over_readers", Race),
    ("overwrites_what_others_read", Race),
    ("lacks_a_syncwarp", Race),
    ("syncwarps_for_two_warps", Race),
    ("orders_by_shuffle", Race),
    ("orders_by_vote", Race),
    ("orders_by_reduction", Race),
    ("orders_by_mma", Race),
    ("orders_by_ldmatrix", Race),
    ("trusts_ldmatrix", Race),
    ("trusts_stmatrix", Race),
    ("takes_arrive_for_sync", Race),
    ("lacks_a_wait", OnItsWay),
    ("lacks_a_commit", OnItsWay),
    ("leaves_the_commit_to_others", OnItsWay),
    ("waits_for_too_few_groups", OnItsWay),
    ("takes_a_wait_for_a_barrier", Race),
    ("refills_too_early", Race),
    ("overwrites_a_source", OnItsWay),
    ("reads_unwritten_shared", Unwritten),
    ("reads_unwritten_global", Unwritten),
    ("blocks_share_a_place", BlockRace),
    ("lacks_part_of_the_block", Divergence),
    ("returns_before_a_barrier", Divergence),
    ("splits_a_warp", Divergence),
    ("shuffles_without_some_lanes", Divergence),
    ("lacks_its_own_lane", Mask),
    ("disagrees_on_the_mask", Mask),
    ("reads_a_lane_outside", Mask),
    ("counts_a_barrier_wrongly", Barrier),
    ("names_no_barrier", Barrier),
    ("comes_twice", Barrier),
    ("arrives_and_nobody_syncs", Divergence),
    ("traps", Trap),
    ("copies_memory_past_the_end", OutOfBounds),
    ("sets_memory_of_others", Race),
    ("takes_too_much_static", OutOfBounds),
    ("takes_a_local_for_global", OutOfBounds),
];

/// Faults whose kind depends on who comes first: the same fault, told from either side.
const EITHER: &[(&str, [FaultKind; 2])] = &[
    ("arrives_too_early", [Race, Unwritten]),
    ("reads_another_block", [BlockRace, Unwritten]),
    ("shuffles_after_a_return", [Mask, Divergence]),
    ("multiplies_with_half_a_warp", [Mask, Divergence]),
];

const BLOCKS: usize = 2;
const THREADS: usize = 128;

fn run(kernel: &str, bad: bool, seed: u64) -> Result<(), Box<Fault>> {
    let (device, stream) = (device(seed), Stream(0));
    let n = BLOCKS * THREADS;
    let host: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let bytes: Vec<u8> = host.iter().flat_map(|x| x.to_le_bytes()).collect();
    let x = device.alloc("x", bytes.len()).unwrap();
    let y = device.alloc("y", bytes.len()).unwrap();
    device.upload(stream, &bytes, x).unwrap();
    let call = Call {
        module: "planted",
        function: kernel,
        grid: [BLOCKS as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared: 4 * THREADS as u32,
        args: &[Arg::Ptr(x), Arg::Ptr(y), Arg::I32(bad.into())],
    };
    device.launch(stream, &call).unwrap();
    let mut out = vec![0; bytes.len()];
    match device.download(stream, y, &mut out) {
        Ok(()) => {
            let got = out
                .chunks(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            let mut got: Vec<f32> = got.collect();
            got.sort_by(f32::total_cmp);
            assert!(bad || got == host, "{kernel}: {got:?}");
            Ok(())
        }
        Err(Error::Fault(fault)) => {
            let again = device.launch(stream, &call).unwrap_err();
            assert_eq!(again, Error::Fault(fault.clone()), "a fault is sticky");
            Err(fault)
        }
        Err(error) => panic!("{kernel}: {error}"),
    }
}

#[test]
fn every_planted_fault_is_found() {
    let one = PLANTED.iter().map(|&(kernel, kind)| (kernel, [kind; 2]));
    let mut wrong = Vec::new();
    for (kernel, kinds) in one.chain(EITHER.iter().copied()) {
        for seed in seeds() {
            match run(kernel, true, seed) {
                Err(fault) if kinds.contains(&fault.kind) && fault.who.op == kernel => {
                    if seed == 0 {
                        println!("{fault}");
                    }
                }
                Err(fault) => wrong.push(format!("{kernel}, seed {seed}: {fault}")),
                Ok(()) => wrong.push(format!("{kernel}, seed {seed}: not found")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn kernels_without_their_fault_are_silent_and_right() {
    let kernels = PLANTED
        .iter()
        .map(|k| k.0)
        .chain(EITHER.iter().map(|k| k.0));
    let mut wrong = Vec::new();
    for kernel in kernels {
        for seed in seeds() {
            if let Err(fault) = run(kernel, false, seed) {
                wrong.push(format!("{kernel}, seed {seed}: {fault}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_report_names_the_line_the_place_and_both_parties() {
    let fault = run("lacks_a_barrier", true, 1).unwrap_err();
    let source = include_str!("kernels/planted.cu");
    let site = fault.who.site.clone().unwrap();
    let line: usize = site.strip_prefix("planted.cu:").unwrap().parse().unwrap();
    let text = source.lines().nth(line - 1).unwrap();
    assert!(
        text.contains("s[127 - t]") || text.contains("s[t] = x"),
        "{text}"
    );
    let (place, other) = (fault.place.clone().unwrap(), fault.other.clone().unwrap());
    assert_eq!((place.allocation.as_str(), place.bytes), ("s", 512));
    assert_eq!(place.offset % 4, 0);
    assert_eq!(fault.who.block, other.block);
    assert_eq!(fault.who.thread + other.thread, 127);
    let text = fault.to_string();
    for part in [
        "race in a block",
        "lacks_a_barrier block",
        &site,
        "of s (512 bytes), against",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_same_seed_gives_the_same_report() {
    for seed in seeds() {
        let one = run("lacks_a_barrier", true, seed);
        assert_eq!(one, run("lacks_a_barrier", true, seed));
    }
}

/// Each row has a planted fault above that trusts it with more, or less, than it gives.
#[test]
fn every_row_of_the_table_is_planted() {
    for rule in &RULES {
        let kernels: &[&str] = match rule.meeting {
            Meeting::BarSync => &["lacks_a_barrier", "writes_over_readers"],
            Meeting::BarArrive => &["takes_arrive_for_sync", "arrives_too_early"],
            Meeting::SyncWarp => &["lacks_a_syncwarp", "syncwarps_for_two_warps"],
            Meeting::Shuffle => &["orders_by_shuffle"],
            Meeting::Vote => &["orders_by_vote"],
            Meeting::Reduce => &["orders_by_reduction"],
            Meeting::LdMatrix => &["orders_by_ldmatrix", "trusts_ldmatrix"],
            Meeting::StMatrix => &["trusts_stmatrix"],
            Meeting::Mma => &["orders_by_mma"],
            Meeting::CpAsyncCommit => &["lacks_a_commit"],
            Meeting::CpAsyncWait => &["lacks_a_wait", "takes_a_wait_for_a_barrier"],
        };
        for kernel in kernels {
            let listed = PLANTED.iter().any(|k| k.0 == *kernel);
            assert!(listed || EITHER.iter().any(|k| k.0 == *kernel), "{kernel}");
        }
    }
}
