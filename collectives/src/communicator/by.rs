//! Folds that a caller brings along.

use super::Communicator;
use crate::{Element, Result, chunk::chunk_lens, transport::Transport};

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Every rank's `buffer` becomes the left fold of all in rank order by `fold`, which combines its
    /// first argument with a later rank's element; it need be neither commutative nor associative.
    ///
    /// Each rank is sent its chunk by all others, folds it, and gives it to all: the bytes of a direct
    /// all-reduce. Ranks must bring the same `fold`; nobody can compare that.
    ///
    /// ```
    /// use quintet_collectives::World;
    /// // The largest magnitude, with its sign; of equals the lowest rank's.
    /// let largest = World::run(3, |comm| {
    ///     let mut x = [[-3.0f32, 1.0], [2.0, -1.0], [3.0, 0.5]][comm.rank()];
    ///     comm.all_reduce_by(&mut x, |a, b| if b.abs() > a.abs() { b } else { a })?;
    ///     Ok(x)
    /// })?;
    /// assert_eq!(largest, [[-3.0, 1.0]; 3]);
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Communicator::all_to_all_v`].
    #[track_caller]
    pub fn all_reduce_by<E: Element>(
        &self,
        buffer: &mut [E],
        fold: impl Fn(E, E) -> E,
    ) -> Result<()> {
        let world = self.world();
        let counts: alloc::vec::Vec<usize> = chunk_lens(buffer.len(), world).collect();
        let mine = counts[self.rank()];
        let zero = <E as bytemuck::Zeroable>::zeroed();
        let mut parts = alloc::vec![zero; mine * world];
        self.all_to_all_v(buffer, &counts, &mut parts, &alloc::vec![mine; world])?;
        let (first, later) = parts.split_at_mut(mine);
        for part in later.chunks_exact(mine.max(1)) {
            let pairs = first.iter_mut().zip(part);
            pairs.for_each(|(acc, x)| *acc = fold(*acc, *x));
        }
        self.all_gather_v(first, buffer, &counts)
    }
}
