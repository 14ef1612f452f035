//! Runs whose ranks are threads of this process, connected by sockets.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use quintet_collectives::store::FileStore;
use quintet_collectives::transport::socket::{Join, Kind, Seat};

/// A folder that goes with the value.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("quintet-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All ranks of a run, in rank order.
pub fn join(kind: Kind, world: usize, change: impl Fn(&mut Join) + Sync) -> Vec<Seat> {
    let folder = Folder::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (folder, change) = (&folder, &change);
                scope.spawn(move || {
                    let mut join = Join {
                        kind,
                        timeout: Duration::from_secs(20),
                        ..Join::new(rank, world, "test")
                    };
                    change(&mut join);
                    join.over(&FileStore::new(&folder.0).unwrap()).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
