//! Waiting costs nothing: alone in its file, since it reads the time of the whole process.

use std::time::Duration;

use quintet_collectives::World;

/// Milliseconds of processor time this process has used, from the kernel's table; none elsewhere.
fn cpu_ms() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // Fields 14 and 15, user and system time, in ticks of 10 ms.
    Some((fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?) * 10)
}

#[test]
fn sixteen_idle_ranks_use_no_processor() {
    World::run(16, |comm| {
        comm.barrier()?;
        let before = cpu_ms();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_secs(1));
        }
        comm.barrier()?;
        if let (0, Some(before), Some(after)) = (comm.rank(), before, cpu_ms()) {
            assert!(after - before <= 50, "{} ms", after - before);
        }
        Ok(())
    })
    .unwrap();
}
