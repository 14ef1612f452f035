//! Where the feature `mpi` is off.

use std::{
    string::String,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{conn::Pool, control::Note, frame::Frame, group::Group, mesh::Mesh};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) enum Wires {}

pub(super) fn fits(_: usize) -> Result<()> {
    Ok(())
}

impl Wires {
    pub(super) fn open() -> Result<Self> {
        Err(Error::Rendezvous(String::from(
            "this program was built without MPI: quintet-collectives has it with the feature mpi",
        )))
    }

    pub(super) fn place(&self) -> (usize, usize) {
        match *self {}
    }

    pub(super) fn send(&self, _: usize, _: &Frame, _: Vec<u64>, _: &Pool) -> u64 {
        match *self {}
    }

    pub(super) fn tell(&self, _: usize, _: &Note) {
        match *self {}
    }

    pub(super) fn done(&self, _: usize) -> u64 {
        match *self {}
    }

    pub(super) fn is_out(&self) -> bool {
        match *self {}
    }

    pub(super) fn progress(&self, _: &Mesh) -> bool {
        match *self {}
    }

    pub(super) fn wait(&self, _: &Mesh, _: &Group, _: Duration, _: impl Fn() -> bool) {
        match *self {}
    }

    pub(super) fn drain(&self, _: &Mesh, _: Instant) {
        match *self {}
    }

    pub(super) fn close(&self, _: &Mesh, _: Instant) {
        match *self {}
    }
}
