//! Messages: by tag, both ways at once, in rings.

use quintet_collectives::nccl::HostLane;

use crate::all_well;
use crate::shim::{library, span};

#[test]
fn messages_meet_by_tag_in_whatever_order_they_are_asked_for() {
    all_well(2, |comm| {
        let (lib, other) = (library(), 1 - comm.rank());
        let lane = || HostLane::new(&lib);
        let sent: Vec<Vec<f32>> = (0..4)
            .map(|tag| vec![(10 * comm.rank() + tag) as f32; 100])
            .collect();
        let room: Vec<Vec<f32>> = vec![vec![0.0; 100]; 4];
        // Sends in one order, receives in the other, both ways at once.
        let mut going = Vec::new();
        for (tag, x) in sent.into_iter().enumerate() {
            let span = span(&x);
            going.push(comm.start_send_on_device(x, span, (other, tag as u64), lane()?)?);
        }
        let mut coming = Vec::new();
        for (tag, x) in room.into_iter().enumerate().rev() {
            let span = span(&x);
            coming.push((
                tag,
                comm.start_recv_on_device(x, span, (other, tag as u64), lane()?)?,
            ));
        }
        for (tag, pending) in coming {
            assert_eq!(pending.wait()?, vec![(10 * other + tag) as f32; 100]);
        }
        for pending in going {
            pending.wait()?;
        }
        assert_eq!(comm.stats().bytes, 4 * 400);
        // An empty one, and one that is not what it should be.
        let empty: [f32; 0] = [];
        let (go, come) = match comm.rank() {
            0 => (
                Some(comm.start_send_on_device((), span(&empty), (1, 7), lane()?)?),
                None,
            ),
            _ => (
                None,
                Some(comm.start_recv_on_device((), span(&empty), (0, 7), lane()?)?),
            ),
        };
        for pending in [go, come].into_iter().flatten() {
            pending.wait()?;
        }
        let (four, five) = ([1i32; 4], [0f32; 5]);
        match comm.rank() {
            0 => comm
                .start_send_on_device((), span(&four), (1, 8), lane()?)?
                .wait()?,
            _ => {
                let error = comm
                    .start_recv_on_device((), span(&five), (0, 8), lane()?)?
                    .wait()
                    .unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "group world: rank 1 expects f32 x 5 from rank 0 in recv, which sent i32 x 4"
                );
            }
        }
        comm.barrier()
    });
}

#[test]
fn a_ring_of_messages_on_one_lane_each_moves() {
    all_well(4, |comm| {
        let (me, lib) = (comm.rank(), library());
        let (right, left) = ((me + 1) % 4, (me + 3) % 4);
        // A lane each way, as a device has: a kernel that sends waits for the one that receives.
        let (out, inn) = (HostLane::new(&lib)?, HostLane::new(&lib)?);
        let mut x = vec![me as f64; 1000];
        for _ in 0..3 {
            let room = vec![0.0; 1000];
            let (from, to) = (span(&x), span(&room));
            let go = comm.start_send_on_device(x, from, (right, 0), out.clone())?;
            let come = comm.start_recv_on_device(room, to, (left, 0), inn.clone())?;
            x = come.wait()?;
            go.wait()?;
        }
        assert_eq!(x[999], ((me + 1) % 4) as f64);
        Ok(())
    });
}
