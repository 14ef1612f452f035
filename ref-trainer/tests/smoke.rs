//! A few layouts by hand.
use quintet_ref_trainer::data::{Corpus, Samples};
use quintet_ref_trainer::job::{Dtype, Job};
use quintet_ref_trainer::verify::verify;

#[test]
fn layouts() {
    for (dp, tp, pp, sp, zero, dtype) in [
        (1, 1, 1, false, 0, Dtype::F64),
        (2, 1, 1, false, 0, Dtype::F64),
        (1, 2, 1, false, 0, Dtype::F64),
        (1, 1, 2, false, 0, Dtype::F64),
        (2, 2, 2, false, 0, Dtype::F64),
        (1, 4, 1, true, 1, Dtype::F64),
        (8, 1, 1, false, 1, Dtype::F64),
        (2, 2, 2, true, 1, Dtype::F64),
        (2, 2, 2, true, 1, Dtype::F32),
    ] {
        let mut job = Job::verify();
        job.dtype = dtype;
        job.layout.dp = dp;
        job.layout.tp = tp;
        job.layout.pp = pp;
        job.layout.sequence_parallel = sp;
        job.layout.zero_stage = zero;
        let samples = Samples::new(Corpus::built_in(), job.seed, job.batch.seq).unwrap();
        let start = std::time::Instant::now();
        let v = verify(&job, &samples).unwrap();
        println!(
            "{dp} {tp} {pp} sp {sp} zero {zero} {dtype:?} {:?}: {v:?}",
            start.elapsed()
        );
    }
}
