//! A rank's parameters, gradients and optimizer state over all its chunks, beside the traffic of
//! training.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quintet_kernels::{Collectives, Scalar};
use quintet_zero::checkpoint::{About, Saved, Target, load, save};
use quintet_zero::{Entry, Full, gather_grads, gather_master, gather_params, gather_state};

use super::{Chunk, Rank, rounded};
use crate::failure::Failure;
use crate::groups::{Aside, Counted};
use crate::model::Device;

impl<B: Device, C: Collectives<B> + Counted, E: Scalar> Rank<'_, B, C, E> {
    /// Sets every parameter of every chunk, and its master weight where there is one:
    /// `value(entry, logical index)`.
    ///
    /// # Errors
    /// Where the device has no memory.
    pub fn fill_with(
        &mut self,
        mut value: impl FnMut(&Entry, usize) -> f64,
    ) -> Result<(), Failure> {
        for chunk in &mut self.chunks {
            let fill = |entry: &Entry, index| rounded(value(entry, index));
            chunk.params.fill_with(fill)?;
            chunk.optimizer.fill_master(&mut value)?;
        }
        Ok(())
    }

    /// The whole model's parameters, on every rank, beside the traffic of training.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn full_params(&self) -> Result<Full, Failure> {
        let stores: Vec<_> = self.chunks.iter().map(|c| &c.params).collect();
        Ok(gather_params(&self.device, &stores, &Aside(&self.groups))?)
    }

    /// The whole model's weights as steps are taken on them, as [`Rank::full_params`]: master
    /// weights where there are any, else the parameters.
    ///
    /// # Errors
    /// As there.
    pub fn full_weights(&self) -> Result<Full, Failure> {
        let optimizers: Vec<_> = self.chunks.iter().map(|c| &c.optimizer).collect();
        match gather_master(&self.device, &optimizers, &Aside(&self.groups))? {
            Some(masters) => Ok(masters),
            None => self.full_params(),
        }
    }

    /// The whole model's reduced gradients, as [`Rank::full_params`].
    ///
    /// # Errors
    /// As there.
    pub fn full_grads(&self) -> Result<Full, Failure> {
        let syncs = self.grads();
        Ok(gather_grads(&self.device, &syncs, &Aside(&self.groups))?)
    }

    /// The whole optimizer state by kind, as [`Rank::full_params`].
    ///
    /// # Errors
    /// As there.
    pub fn full_state(&self) -> Result<BTreeMap<String, Full>, Failure> {
        let optimizers: Vec<_> = self.chunks.iter().map(|c| &c.optimizer).collect();
        let state = gather_state(&self.device, &optimizers, &Aside(&self.groups))?;
        let named = |(kind, full): (&str, Full)| (kind.to_string(), full);
        Ok(state.into_iter().map(named).collect())
    }

    /// Loads the newest checkpoint of `root` into all chunks, on all ranks together.
    ///
    /// # Errors
    /// Where it is torn, foreign or of another model; nothing is changed then.
    pub fn load(&mut self, root: &Path, optimizer: bool) -> Result<(), Failure> {
        let mut targets = Vec::new();
        for chunk in &mut self.chunks {
            targets.push(Target {
                params: &mut chunk.params,
                optimizer: optimizer.then_some(&mut chunk.optimizer),
            });
        }
        load(root, &self.device, &Aside(&self.groups), &mut targets)?;
        Ok(())
    }

    /// Saves the chunks of all ranks under `root`; the folder.
    ///
    /// # Errors
    /// Where it cannot be written; what was there before is then still there.
    pub fn save(&self, root: &Path, about: &About) -> Result<PathBuf, Failure> {
        let mut chunks = Vec::new();
        for Chunk {
            params, optimizer, ..
        } in &self.chunks
        {
            chunks.push(Saved { params, optimizer });
        }
        let aside = Aside(&self.groups);
        Ok(save(root, &self.device, &aside, &chunks, about)?)
    }
}
