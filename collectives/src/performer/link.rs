//! A transport with what this side keeps beside it.

use alloc::{collections::BTreeMap, format, string::ToString, vec::Vec};

use crate::{
    Element, Error, Result,
    transport::{Message, Sent, Tag, Transport},
};

/// A transport with what this side keeps beside it: spare storage and counts.
#[derive(Debug)]
pub struct Link<T> {
    /// The endpoint.
    pub transport: T,
    /// Payload bytes handed over so far.
    pub bytes: u64,
    /// Messages handed over so far.
    pub messages: u64,
    /// Payload bytes by receiver: few of a large group, so no table over all.
    sent_to: BTreeMap<usize, u64>,
    spare: Vec<Vec<u64>>,
}

impl<T: Transport> Link<T> {
    /// A link with nothing sent yet.
    pub fn new(transport: T) -> Self {
        Self {
            transport,
            bytes: 0,
            messages: 0,
            sent_to: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// Hands over `message`, counted, or gives it back.
    ///
    /// # Errors
    /// Those of [`Transport::try_send`].
    pub fn try_send(&mut self, to: usize, message: Message) -> Result<Option<Message>> {
        let bytes = message.bytes() as u64;
        let refused = self.transport.try_send(to, message)?;
        if refused.is_none() {
            self.count(to, bytes, 1);
        }
        Ok(refused)
    }

    /// Sends `elements` from where they lie, counted, if the transport can.
    ///
    /// # Errors
    /// Those of [`Transport::send_bytes`].
    pub fn send_from<E: Element>(&mut self, to: usize, tag: Tag, elements: &[E]) -> Result<bool> {
        let bytes = bytemuck::cast_slice(elements);
        let sent = self.transport.send_bytes(to, tag, E::DTYPE, bytes)?;
        if sent {
            self.count(to, bytes.len() as u64, 1);
        }
        Ok(sent)
    }

    /// Sends `elements` along, counted once all are sent, if the transport can; see [`Transport::send_along`].
    ///
    /// # Errors
    /// Those of [`Transport::send_along`].
    pub fn send_along<E: Element>(&mut self, to: usize, tag: Tag, elements: &[E]) -> Result<Sent> {
        let bytes = bytemuck::cast_slice(elements);
        let sent = self.transport.send_along(to, tag, E::DTYPE, bytes)?;
        if sent == Sent::All {
            self.count(to, bytes.len() as u64, 1);
        }
        Ok(sent)
    }

    /// What was begun goes on alone, counted.
    pub fn send_alone<E: Element>(&mut self, to: usize, elements: &[E]) {
        let bytes = bytemuck::cast_slice(elements);
        self.transport.send_alone(to, bytes);
        self.count(to, bytes.len() as u64, 1);
    }

    /// Payload bytes handed over so far, by place of the receiver.
    pub fn sent_to(&self) -> &BTreeMap<usize, u64> {
        &self.sent_to
    }

    /// Counts what went to a receiver.
    pub(crate) fn count(&mut self, to: usize, bytes: u64, messages: u64) {
        self.bytes += bytes;
        self.messages += messages;
        *self.sent_to.entry(to).or_default() += bytes;
    }

    /// A message from `from` that must hold `len` elements of `E`.
    ///
    /// # Errors
    /// Those of [`Transport::try_recv`], and [`Error::Message`] for another length or type.
    pub fn try_recv<E: Element>(
        &mut self,
        from: usize,
        tag: Tag,
        len: usize,
        op: &'static str,
    ) -> Result<Option<Message>> {
        let Some(message) = self.transport.try_recv(from, tag)? else {
            return Ok(None);
        };
        if message.dtype == E::DTYPE && message.len() == len {
            return Ok(Some(message));
        }
        Err(Error::Message {
            group: self.transport.name().to_string(),
            rank: self.transport.global(self.transport.rank()),
            peer: self.transport.global(from),
            op,
            expected: format!("{} x {len}", E::DTYPE),
            got: format!("{} x {}", message.dtype, message.len()),
        })
    }

    /// The smallest storage of an earlier message that holds `bytes`, or a new one.
    pub fn storage(&mut self, bytes: usize) -> Vec<u64> {
        let words = bytes.div_ceil(8);
        let fits = self
            .spare
            .iter()
            .enumerate()
            .filter(|(_, spare)| spare.capacity() >= words);
        match fits
            .min_by_key(|(_, spare)| spare.capacity())
            .map(|(at, _)| at)
        {
            Some(at) => self.spare.swap_remove(at),
            // Growing a small one would copy what nobody wants.
            None => Vec::new(),
        }
    }

    /// Keeps the storage of a finished message; of too many the smallest goes.
    pub fn recycle(&mut self, message: Message) {
        let Some(storage) = self.transport.recycle(message.into_storage()) else {
            return;
        };
        self.spare.push(storage);
        if self.spare.len() > SPARE {
            let sizes = self.spare.iter().enumerate();
            let smallest = sizes
                .min_by_key(|(_, spare)| spare.capacity())
                .map(|(at, _)| at);
            smallest.map(|at| self.spare.swap_remove(at));
        }
    }
}

/// Storages kept for reuse; more than the messages of one round of a world of this size.
const SPARE: usize = 32;
