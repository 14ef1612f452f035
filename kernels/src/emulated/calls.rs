//! The functions that compiled kernels call: declared in cuda/host.cuh and cuda/host.cc.
//!
//! Each finds the [`Run`] of its OS thread, asks it, and pauses the fiber where the answer says so.
//! None may panic: their callers are C++ frames.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};

use corosensei::Yielder;

use super::block::{Next, Run, Site};
use super::warp::{In, Instr};

std::thread_local! {
    static RUN: Cell<*mut Run<'static>> = const { Cell::new(core::ptr::null_mut()) };
    static FIBER: Cell<*const Yielder<(), ()>> = const { Cell::new(core::ptr::null()) };
}

/// Makes `run` the one that calls of this OS thread reach, until the guard is dropped.
pub(super) struct Entered;

impl Entered {
    pub(super) fn new(run: *mut Run<'_>) -> Self {
        RUN.set(run.cast());
        Self
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        RUN.set(core::ptr::null_mut());
    }
}

/// Makes `fiber` the one that pauses.
pub(super) fn resume_as(fiber: *const Yielder<(), ()>) {
    FIBER.set(fiber);
}

/// Asks the run; `None` outside of one.
fn ask<T>(question: impl FnOnce(&mut Run<'static>) -> T) -> Option<T> {
    // SAFETY: RUN points to the run that `Entered` was made for, which outlives its fibers; calls
    // come from the one fiber that runs, and the scheduler holds no reference meanwhile.
    unsafe { RUN.get().as_mut() }.map(question)
}

fn obey(next: Option<Next>) {
    match next {
        None | Some(Next::Go) => {}
        Some(Next::Pause) => pause(),
        Some(Next::Stop) => loop {
            pause();
        },
    }
}

fn pause() {
    let fiber = FIBER.get();
    // SAFETY: the yielder lives in its fiber's first frame, which is below this one.
    if let Some(fiber) = unsafe { fiber.as_ref() } {
        fiber.suspend(());
        // Others have run since.
        FIBER.set(fiber);
    }
}

fn access(at: usize, bytes: usize, write: bool, align: usize, site: Site) {
    let asked = ask(|run| match run.pauses(at) {
        true => None,
        false => Some(run.access(at, bytes, write, align, site)),
    });
    match asked {
        Some(None) => {
            pause();
            obey(ask(|run| run.access(at, bytes, write, align, site)));
        }
        Some(next) => obey(next),
        None => {}
    }
}

#[unsafe(no_mangle)]
extern "C" fn emu_access(at: usize, bytes: usize, write: i32, align: i32, pc: usize) {
    access(at, bytes, write != 0, align as usize, Site::pc(pc));
}

/// A wide load: `bytes` from `p` to the caller's own memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn emu_load(
    to: *mut u8,
    p: *const u8,
    bytes: u32,
    file: *const c_char,
    line: i32,
) {
    access(
        p as usize,
        bytes as usize,
        false,
        bytes as usize,
        Site::line(file, line),
    );
    // SAFETY: `p` was checked; `to` is a local of the caller (ptx.cuh).
    unsafe { core::ptr::copy_nonoverlapping(p, to, bytes as usize) };
}

/// A wide store, as [`emu_load`].
#[unsafe(no_mangle)]
unsafe extern "C" fn emu_store(
    p: *mut u8,
    from: *const u8,
    bytes: u32,
    file: *const c_char,
    line: i32,
) {
    access(
        p as usize,
        bytes as usize,
        true,
        bytes as usize,
        Site::line(file, line),
    );
    // SAFETY: as in emu_load.
    unsafe { core::ptr::copy_nonoverlapping(from, p, bytes as usize) };
}

/// A triple of CUDA's built-in variables.
#[repr(C)]
struct Uint3([u32; 3]);

#[unsafe(no_mangle)]
extern "C" fn emu_place(which: i32) -> Uint3 {
    Uint3(ask(|run| run.triple(which)).unwrap_or([0; 3]))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn emu_shared(
    name: *const c_char,
    bytes: u32,
    align: u32,
    file: *const c_char,
    line: i32,
) -> *mut c_void {
    // SAFETY: a string literal of the kernel's file (SHARED), which lives as long as the program.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_str().unwrap_or("shared memory");
    let key = (file as usize, line, bytes, align);
    loop {
        match ask(|run| run.static_shared(key, name, Site::line(file, line))) {
            Some(Ok(at)) => return at as *mut c_void,
            Some(Err(next)) => obey(Some(next)),
            None => return core::ptr::null_mut(),
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn emu_dynamic_shared() -> *mut c_void {
    ask(|run| run.dynamic_shared()).unwrap_or(0) as *mut c_void
}

#[unsafe(no_mangle)]
extern "C" fn emu_barrier(
    call: i32,
    id: i32,
    threads: i32,
    value: i32,
    file: *const c_char,
    line: i32,
) -> i32 {
    obey(ask(|run| {
        run.barrier((call, id, threads), value, Site::line(file, line))
    }));
    ask(|run| run.answer()).unwrap_or(0)
}

/// Runs a warp instruction; `n` results go to `out`.
unsafe fn warp(call: i32, mask: u32, input: In, out: *mut u32, n: usize, site: Site) {
    let Some(instr) = Instr::from_call(call) else {
        return;
    };
    obey(ask(|run| run.warp(instr, mask, input, site)));
    let result = ask(|run| run.output()).unwrap_or([0; 4]);
    if n > 0 {
        // SAFETY: `out` is a local of the caller with room for `n` registers.
        unsafe { core::ptr::copy_nonoverlapping(result.as_ptr(), out, n.min(4)) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn emu_warp(
    call: i32,
    mask: u32,
    values: *const u32,
    out: *mut u32,
    file: *const c_char,
    line: i32,
) {
    let mut input = [0; 10];
    let (ins, outs) = match Instr::from_call(call) {
        Some(Instr::SyncWarp) | None => (0, 0),
        Some(Instr::ShflIdx | Instr::ShflUp | Instr::ShflDown | Instr::ShflXor) => (3, 1),
        Some(_) => (1, 1),
    };
    // SAFETY: host.cuh passes as many words as the instruction takes.
    unsafe {
        core::ptr::copy_nonoverlapping(values, input.as_mut_ptr(), ins);
        warp(call, mask, input, out, outs, Site::line(file, line));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn emu_matrix(
    call: i32,
    n: i32,
    row: *mut c_void,
    regs: *mut u32,
    file: *const c_char,
    line: i32,
) {
    let store = matches!(
        Instr::from_call(call),
        Some(Instr::StMatrix | Instr::StMatrixT)
    );
    let n = n as usize;
    let mut input = [0; 10];
    let at = row as u64;
    (input[0], input[1], input[2]) = (at as u32, (at >> 32) as u32, n as u32);
    // SAFETY: `regs` holds `n` registers of the caller.
    unsafe {
        if store {
            core::ptr::copy_nonoverlapping(regs, input[3..].as_mut_ptr(), n.min(4));
        }
        let outs = if store { 0 } else { n };
        warp(call, u32::MAX, input, regs, outs, Site::line(file, line));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn emu_mma(
    call: i32,
    d: *mut u32,
    a: *const u32,
    b: *const u32,
    c: *const u32,
    file: *const c_char,
    line: i32,
) {
    let mut input = [0; 10];
    // SAFETY: fragments of 4, 2 and 4 registers, locals of the caller (ptx.cuh).
    unsafe {
        core::ptr::copy_nonoverlapping(a, input.as_mut_ptr(), 4);
        core::ptr::copy_nonoverlapping(b, input[4..].as_mut_ptr(), 2);
        core::ptr::copy_nonoverlapping(c, input[6..].as_mut_ptr(), 4);
        warp(call, u32::MAX, input, d, 4, Site::line(file, line));
    }
}

#[unsafe(no_mangle)]
extern "C" fn emu_cp_async(
    to: usize,
    from: usize,
    bytes: u32,
    from_bytes: i32,
    file: *const c_char,
    line: i32,
) {
    if ask(|run| run.pauses(to)) == Some(true) {
        pause();
    }
    let site = Site::line(file, line);
    obey(ask(|run| {
        run.copy(to, from, bytes as usize, from_bytes, site)
    }));
}

#[unsafe(no_mangle)]
extern "C" fn emu_cp_commit() {
    ask(|run| run.commit());
}

#[unsafe(no_mangle)]
extern "C" fn emu_cp_wait(groups: u32) {
    obey(ask(|run| run.wait(groups)));
}

#[unsafe(no_mangle)]
extern "C" fn emu_trap(file: *const c_char, line: i32) {
    obey(ask(|run| run.trap(Site::line(file, line))));
}
