//! A device on `Vec` and a group on channels, where a send is over only when its receiver has
//! taken it: the harshest transport a schedule may meet.

use std::any::Any;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quintet_collectives::{Error as WireError, ReduceOp};
use quintet_kernels::{Backend, Collectives, Data, Error, Meter, Pending, Queue, Tag, Wire};

const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Default)]
pub struct Host(Meter);

/// Elements counted while they live.
pub struct Held<T: Data> {
    data: Vec<T>,
    tag: Tag,
    meter: Meter,
}

impl<T: Data> Drop for Held<T> {
    fn drop(&mut self) {
        self.meter.sub(self.tag, size_of_val(&self.data[..]));
    }
}

impl Host {
    fn hold<T: Data>(&self, tag: Tag, data: Vec<T>) -> Held<T> {
        self.0.add(tag, size_of_val(&data[..]));
        let meter = self.0.clone();
        Held { data, tag, meter }
    }
}

impl Backend for Host {
    type Buf<T: Data> = Held<T>;
    type Ref<'a, T: Data> = &'a [T];
    type Mut<'a, T: Data> = &'a mut [T];
    type Event = ();

    fn zeros<T: Data>(&self, tag: Tag, len: usize) -> Result<Held<T>, Error> {
        Ok(self.hold(tag, vec![T::zeroed(); len]))
    }
    fn upload<T: Data>(&self, tag: Tag, host: &[T]) -> Result<Held<T>, Error> {
        Ok(self.hold(tag, host.to_vec()))
    }
    fn download<T: Data>(&self, src: &[T], host: &mut [T]) -> Result<(), Error> {
        host.copy_from_slice(src);
        Ok(())
    }
    fn copy<T: Data>(&self, src: &[T], dst: &mut [T]) -> Result<(), Error> {
        dst.copy_from_slice(src);
        Ok(())
    }
    fn len<T: Data>(view: &[T]) -> usize {
        view.len()
    }
    fn whole<T: Data>(buf: &Held<T>) -> &[T] {
        &buf.data
    }
    fn whole_mut<T: Data>(buf: &mut Held<T>) -> &mut [T] {
        &mut buf.data
    }
    fn slice<'a, T: Data>(view: Self::Ref<'a, T>, range: Range<usize>) -> Self::Ref<'a, T> {
        &view[range]
    }
    fn split_mut<'a, T: Data>(
        view: Self::Mut<'a, T>,
        at: usize,
    ) -> (Self::Mut<'a, T>, Self::Mut<'a, T>) {
        view.split_at_mut(at)
    }
    fn reborrow<'a, T: Data>(view: &'a mut &mut [T]) -> &'a mut [T] {
        view
    }
    fn as_ref<'a, T: Data>(view: &'a &mut [T]) -> &'a [T] {
        view
    }
    fn record(&self, _: Queue) {}
    fn wait(&self, _: Queue, (): &()) {}
    fn meter(&self) -> &Meter {
        &self.0
    }
}

pub struct Parcel {
    tag: u64,
    data: Box<dyn Any + Send>,
    taken: Sender<()>,
}

/// One rank of a group of channels: one for activations and one for gradients to each peer. Each
/// hands out what it holds in order, and nothing out of it.
pub struct Channels {
    rank: usize,
    to: Vec<[Mutex<Sender<Parcel>>; 2]>,
    from: Vec<[Arc<Mutex<Receiver<Parcel>>>; 2]>,
}

/// A group of `world` ranks.
pub fn group(world: usize) -> Vec<Channels> {
    let mut ranks: Vec<_> = (0..world)
        .map(|rank| Channels {
            rank,
            to: Vec::new(),
            from: Vec::new(),
        })
        .collect();
    for from in 0..world {
        for to in 0..world {
            let ((s0, r0), (s1, r1)) = (channel(), channel());
            ranks[from].to.push([s0, s1].map(Mutex::new));
            ranks[to]
                .from
                .push([r0, r1].map(|r| Arc::new(Mutex::new(r))));
        }
    }
    ranks
}

/// The direction that a tag ends with.
fn lane(tag: u64) -> usize {
    (tag & 1) as usize
}

pub enum Started<T: Data> {
    Send(Held<T>, Receiver<()>),
    Recv(Held<T>, u64, Arc<Mutex<Receiver<Parcel>>>),
}

fn lost(what: &str) -> WireError {
    WireError::Layout(format!("fake group: {what}"))
}

impl<T: Data> Pending<Host, T> for Started<T> {
    fn event(&self) {}
    fn wait_on(self, _: &Host, _: Queue) -> Result<Held<T>, WireError> {
        self.wait_host()
    }
    fn wait_host(self) -> Result<Held<T>, WireError> {
        match self {
            Started::Send(buf, taken) => match taken.recv_timeout(PATIENCE) {
                Ok(()) => Ok(buf),
                Err(_) => Err(lost("nobody took a message")),
            },
            Started::Recv(mut buf, tag, lane) => {
                let parcel = lane.lock().unwrap().recv_timeout(PATIENCE);
                let parcel = parcel.map_err(|_| lost("no message came"))?;
                let data = parcel.data.downcast::<Vec<T>>();
                let data = data.map_err(|_| lost("a message of another type"))?;
                if parcel.tag != tag || data.len() != buf.data.len() {
                    return Err(lost("a message of another tag or length"));
                }
                buf.data.copy_from_slice(&data);
                let _ = parcel.taken.send(());
                Ok(buf)
            }
        }
    }
}

impl Collectives<Host> for Channels {
    type Pending<T: Wire> = Started<T>;

    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.to.len()
    }
    fn start_send<T: Wire>(
        &self,
        to: usize,
        tag: u64,
        buf: Held<T>,
        (): (),
    ) -> Result<Started<T>, WireError> {
        let (taken, is_taken) = channel();
        let data = Box::new(buf.data.clone());
        let sender = self.to[to][lane(tag)].lock().unwrap();
        let parcel = Parcel { tag, data, taken };
        sender.send(parcel).map_err(|_| lost("the peer is gone"))?;
        Ok(Started::Send(buf, is_taken))
    }
    fn start_recv<T: Wire>(
        &self,
        from: usize,
        tag: u64,
        buf: Held<T>,
    ) -> Result<Started<T>, WireError> {
        let lane = self.from[from][lane(tag)].clone();
        Ok(Started::Recv(buf, tag, lane))
    }

    // A stage only sends and receives.
    fn all_reduce<T: Wire>(&self, _: &mut [T], _: ReduceOp) -> Result<(), WireError> {
        Err(lost("all_reduce"))
    }
    fn all_gather<T: Wire>(&self, _: &[T], _: &[usize], _: &mut [T]) -> Result<(), WireError> {
        Err(lost("all_gather"))
    }
    fn reduce_scatter<T: Wire>(
        &self,
        _: &[T],
        _: &[usize],
        _: &mut [T],
        _: ReduceOp,
    ) -> Result<(), WireError> {
        Err(lost("reduce_scatter"))
    }
    fn all_to_all<T: Wire>(
        &self,
        _: &[T],
        _: &[usize],
        _: &mut [T],
        _: &[usize],
    ) -> Result<(), WireError> {
        Err(lost("all_to_all"))
    }
    fn broadcast<T: Wire>(&self, _: &mut [T], _: usize) -> Result<(), WireError> {
        Err(lost("broadcast"))
    }
    fn start_all_reduce<T: Wire>(
        &self,
        _: Held<T>,
        _: ReduceOp,
        (): (),
    ) -> Result<Started<T>, WireError> {
        Err(lost("start_all_reduce"))
    }
    fn start_reduce_scatter<T: Wire>(
        &self,
        _: Held<T>,
        _: &[usize],
        _: ReduceOp,
        (): (),
    ) -> Result<Started<T>, WireError> {
        Err(lost("start_reduce_scatter"))
    }
    fn start_all_gather<T: Wire>(
        &self,
        _: Held<T>,
        _: &[usize],
        (): (),
    ) -> Result<Started<T>, WireError> {
        Err(lost("start_all_gather"))
    }
}
