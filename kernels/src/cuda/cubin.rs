//! What a cubin says of its kernels: their parameters, shared memory and most threads.
//!
//! A cubin is a 64-bit ELF file. Section `.nv.info.<kernel>` is a list of attributes
//!
//! ```text
//! format u8, attribute u8, value u16        (formats 1, 2 and 3)
//! format u8, attribute u8, bytes u16, ...   (format 4)
//! ```
//!
//! of which two are read: 0x17 (index u32, ordinal u16, offset u16, then a word whose upper 14 bits
//! are the bytes) describes a parameter, 0x05 (x, y, z) is the most threads of a block. Their
//! numbers are in no manual; `cuobjdump --dump-elf` names them EIATTR_KPARAM_INFO and
//! EIATTR_MAX_THREADS. The driver shim (tests/driver_shim) compares each launched kernel's with
//! what a C++ compiler makes of the same source.

use std::borrow::ToOwned;
use std::string::String;
use std::vec::Vec;

/// A kernel as its cubin describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelInfo {
    /// Its name.
    pub name: String,
    /// Bytes of each parameter, in order.
    pub params: Vec<u32>,
    /// Where each begins in the parameter block.
    pub offsets: Vec<u32>,
    /// The most threads of a block; 1,024 where the cubin does not say.
    pub max_threads: u32,
    /// Bytes of static shared memory.
    pub shared: u64,
}

const PARAM: u8 = 0x17;
const MAX_THREADS: u8 = 0x05;

/// The kernels of a cubin, in the order of its sections; `None` where it is no such file.
#[must_use]
pub fn kernels(cubin: &[u8]) -> Option<Vec<KernelInfo>> {
    let sections = sections(cubin)?;
    let mut kernels = Vec::new();
    for (name, _, _) in &sections {
        let Some(kernel) = name.strip_prefix(".text.") else {
            continue;
        };
        let mut info = KernelInfo {
            name: kernel.to_owned(),
            max_threads: 1024,
            ..KernelInfo::default()
        };
        for (other, bytes, len) in &sections {
            if other.strip_prefix(".nv.info.") == Some(kernel) {
                attributes(bytes, &mut info)?;
            } else if other.strip_prefix(".nv.shared.") == Some(kernel) {
                info.shared = *len;
            }
        }
        kernels.push(info);
    }
    Some(kernels)
}

/// Name, bytes (none where the file holds none) and length of each section.
fn sections(elf: &[u8]) -> Option<Vec<(&str, &[u8], u64)>> {
    const NO_BITS: u64 = 8;
    // 64 bits, little-endian, machine CUDA (190).
    if elf.get(..6)? != b"\x7fELF\x02\x01" || number(elf, 18, 2)? != 190 {
        return None;
    }
    let (table, bytes) = (number(elf, 40, 8)?, number(elf, 58, 2)?);
    let (count, names) = (number(elf, 60, 2)?, number(elf, 62, 2)?);
    let header = |i: u64| -> Option<(u64, u64, u64, u64)> {
        let at = usize::try_from(table.checked_add(i * bytes)?).ok()?;
        let field = |offset, bytes| number(elf, at.checked_add(offset)?, bytes);
        Some((field(0, 4)?, field(4, 4)?, field(24, 8)?, field(32, 8)?))
    };
    let slice = |start: u64, len: u64| -> Option<&[u8]> {
        let (start, len) = (usize::try_from(start).ok()?, usize::try_from(len).ok()?);
        elf.get(start..start.checked_add(len)?)
    };
    let (_, _, at, len) = header(names)?;
    let names = slice(at, len)?;
    (0..count)
        .map(|i| {
            let (name, kind, at, len) = header(i)?;
            let name = names.get(usize::try_from(name).ok()?..)?;
            let end = name.iter().position(|&b| b == 0)?;
            let name = core::str::from_utf8(&name[..end]).ok()?;
            let bytes = if kind == NO_BITS {
                &[][..]
            } else {
                slice(at, len)?
            };
            Some((name, bytes, len))
        })
        .collect()
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    Some(field.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
}

fn attributes(mut list: &[u8], info: &mut KernelInfo) -> Option<()> {
    let mut params: Vec<(u64, u32, u32)> = Vec::new();
    while list.len() >= 4 {
        let (format, attribute) = (list[0], list[1]);
        let len = if format == 4 {
            number(list, 2, 2)? as usize
        } else {
            0
        };
        let value = list.get(4..4 + len)?;
        list = &list[4 + len..];
        match attribute {
            PARAM => {
                let (ordinal, offset) = (number(value, 4, 2)?, number(value, 6, 2)?);
                params.push((ordinal, offset as u32, (number(value, 8, 4)? >> 18) as u32));
            }
            MAX_THREADS => {
                let of = |d: usize| number(value, 4 * d, 4);
                info.max_threads = (of(0)? * of(1)? * of(2)?) as u32;
            }
            _ => {}
        }
    }
    params.sort_unstable();
    info.params = params.iter().map(|p| p.2).collect();
    info.offsets = params.iter().map(|p| p.1).collect();
    Some(())
}
