//! Messages between two ranks: `send`, `recv`, `sendrecv`.
//!
//! ```text
//! rank 0   send(x, 1, tag 7)  send(y, 1, tag 9)
//! rank 1   recv(y, 0, tag 9)  recv(x, 0, tag 7)      tags keep streams apart; one stream is in order
//! ```

use super::{
    Communicator,
    act::{Both, Receiving, Sending},
};
use crate::{Element, Error, Result, transport::Transport};

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Sends `data` to rank `to`. Returns once the transport holds a copy, which needs no
    /// receiver while its buffer has room; with no room it waits for one.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the peer, [`Error::PeerLost`], [`Error::Layout`] where `to` is no
    /// rank.
    #[track_caller]
    pub fn send<E: Element>(&self, data: &[E], to: usize, tag: u64) -> Result<()> {
        self.peer(to)?;
        if self.core.idle() {
            return self
                .core
                .drive(&mut Sending::<E, _>::new(to, tag, data), self.deadline);
        }
        self.start_send::<E, _>(data.to_vec(), to, tag, ())?
            .wait()
            .map(drop)
    }

    /// Receives from rank `from` the next message of this tag, which must fill `buffer`.
    ///
    /// # Errors
    /// Those of [`Communicator::send`], and [`Error::Message`] for another length or type.
    #[track_caller]
    pub fn recv<E: Element>(&self, buffer: &mut [E], from: usize, tag: u64) -> Result<()> {
        self.peer(from)?;
        if self.core.idle() {
            return self.core.drive(
                &mut Receiving::<E, _>::new(from, tag, buffer),
                self.deadline,
            );
        }
        let received = self
            .start_recv::<E, _>(buffer.to_vec(), from, tag, ())?
            .wait()?;
        buffer.copy_from_slice(&received);
        Ok(())
    }

    /// Sends `data` to rank `to` and receives `buffer` from rank `from`, neither waiting for the
    /// other: a ring of these moves where a ring of blocking sends may not.
    ///
    /// # Errors
    /// Those of [`Communicator::recv`].
    #[track_caller]
    pub fn sendrecv<E: Element>(
        &self,
        data: &[E],
        to: usize,
        buffer: &mut [E],
        from: usize,
        tag: u64,
    ) -> Result<()> {
        self.peer(to)?;
        self.peer(from)?;
        if self.core.idle() {
            let one = Sending::<E, _>::new(to, tag, data);
            let two = Receiving::<E, _>::new(from, tag, buffer);
            return self.core.drive(&mut Both { one, two }, self.deadline);
        }
        let sent = self.start_send::<E, _>(data.to_vec(), to, tag, ())?;
        let received = self
            .start_recv::<E, _>(buffer.to_vec(), from, tag, ())?
            .wait()?;
        buffer.copy_from_slice(&received);
        sent.wait().map(drop)
    }

    pub(super) fn peer(&self, rank: usize) -> Result<()> {
        if rank < self.world() {
            return Ok(());
        }
        Err(Error::Layout(std::format!(
            "rank {rank} is no rank of group {} of {}",
            self.name(),
            self.world()
        )))
    }
}
