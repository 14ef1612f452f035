//! Transports that wrap another (`std`): what they leave to it is written once, here.

/// The methods of a [`Transport`](crate::Transport) that do what those of the transport in a field do.
///
/// Of `group` are those that say who the ranks are and who is lost, of `calls` those that compare calls, of `messages` those
/// that move elements. A wrapper writes the rest: `park`, `subgroup` and what it is there for.
///
/// ```
/// use quintet_collectives::transport::{Message, Tag, Transport, Wait, local::Local};
/// use quintet_collectives::{Communicator, ReduceOp, Result, World, forward_transport};
/// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
/// use std::time::Duration;
///
/// struct Counting<T>(T, Arc<AtomicUsize>);
///
/// impl<T: Transport> Transport for Counting<T> {
///     forward_transport!(0: group, calls);
///
///     fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
///         self.1.fetch_add(1, Ordering::Relaxed);
///         self.0.try_send(to, message)
///     }
///
///     fn try_recv(&mut self, from: usize, tag: Tag) -> Result<Option<Message>> {
///         self.0.try_recv(from, tag)
///     }
///
///     fn park(&mut self, wait: &Wait, timeout: Duration) {
///         self.0.park(wait, timeout);
///     }
///
///     fn subgroup(&self, members: &[usize], name: &str) -> Result<Self> {
///         Ok(Self(self.0.subgroup(members, name)?, Arc::clone(&self.1)))
///     }
/// }
///
/// let sent = Arc::new(AtomicUsize::new(0));
/// std::thread::scope(|scope| {
///     for seat in World::new(2).unwrap().seats() {
///         let counting = Counting(seat.endpoint(), Arc::clone(&sent));
///         scope.spawn(move || {
///             let mut x = [1.0f32];
///             Communicator::new(counting).all_reduce(&mut x, ReduceOp::Sum).unwrap();
///             assert_eq!(x, [2.0]);
///             seat.finish(Ok(()));
///         });
///     }
/// });
/// assert_eq!(sent.load(Ordering::Relaxed), 2);
/// ```
#[macro_export]
macro_rules! forward_transport {
    ($inner:tt: $($methods:ident),*) => {
        $($crate::forward_transport!(@$methods $inner);)*
    };
    (@group $inner:tt) => {
        fn rank(&self) -> usize {
            self.$inner.rank()
        }

        fn world(&self) -> usize {
            self.$inner.world()
        }

        fn global(&self, rank: usize) -> usize {
            self.$inner.global(rank)
        }

        fn name(&self) -> &str {
            self.$inner.name()
        }

        fn healthy(&mut self) -> $crate::Result<()> {
            self.$inner.healthy()
        }

        fn absent(&self, sequence: u64) -> Option<usize> {
            self.$inner.absent(sequence)
        }

        fn control(&self) -> ::std::sync::Arc<dyn $crate::transport::Control> {
            self.$inner.control()
        }
    };
    (@calls $inner:tt) => {
        fn announce(&mut self, call: &$crate::transport::Call) -> $crate::Result<()> {
            self.$inner.announce(call)
        }

        fn confirmed(&mut self, sequence: u64) -> $crate::Result<bool> {
            self.$inner.confirmed(sequence)
        }
    };
    (@messages $inner:tt) => {
        fn try_send(
            &mut self,
            to: usize,
            message: $crate::transport::Message,
        ) -> $crate::Result<Option<$crate::transport::Message>> {
            self.$inner.try_send(to, message)
        }

        fn send_bytes(
            &mut self,
            to: usize,
            tag: $crate::transport::Tag,
            dtype: $crate::DType,
            bytes: &[u8],
        ) -> $crate::Result<bool> {
            self.$inner.send_bytes(to, tag, dtype, bytes)
        }

        fn send_along(
            &mut self,
            to: usize,
            tag: $crate::transport::Tag,
            dtype: $crate::DType,
            bytes: &[u8],
        ) -> $crate::Result<$crate::transport::Sent> {
            self.$inner.send_along(to, tag, dtype, bytes)
        }

        fn send_alone(&mut self, to: usize, bytes: &[u8]) {
            self.$inner.send_alone(to, bytes);
        }

        fn recv_along(
            &mut self,
            from: usize,
            tag: $crate::transport::Tag,
            of: ($crate::DType, usize),
            room: &mut [u8],
        ) -> $crate::Result<Option<usize>> {
            self.$inner.recv_along(from, tag, of, room)
        }

        fn recycle(&mut self, storage: ::std::vec::Vec<u64>) -> Option<::std::vec::Vec<u64>> {
            self.$inner.recycle(storage)
        }

        fn try_recv(
            &mut self,
            from: usize,
            tag: $crate::transport::Tag,
        ) -> $crate::Result<Option<$crate::transport::Message>> {
            self.$inner.try_recv(from, tag)
        }

        fn direct(&mut self) -> $crate::transport::direct::Sharing<'_> {
            self.$inner.direct()
        }

        fn allocate<E: $crate::Element>(
            &self,
            len: usize,
        ) -> $crate::Result<$crate::transport::buffer::Buffer<E>> {
            self.$inner.allocate(len)
        }
    };
}
