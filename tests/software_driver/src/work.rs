//! What streams do.

use std::sync::Arc;

use crate::arena::fatal;
use crate::kernels::Kernel;
use crate::memory::{Memory, Place};

/// Copies of it are cheap, since graphs enqueue theirs again and again.
#[derive(Clone)]
pub enum Work {
    Fill {
        target: usize,
        value: u8,
        len: usize,
    },
    /// The bytes of pageable memory, as they were at the call.
    Bytes {
        target: usize,
        bytes: Arc<[u8]>,
    },
    /// Read when it runs, whatever was there at the call.
    Copy {
        target: usize,
        source: usize,
        len: usize,
    },
    Launch {
        kernel: &'static Kernel,
        /// Aligned as any parameter may need it.
        params: Arc<[u128]>,
        grid: [u32; 2],
    },
}

/// Does work, with device memory open from the first of it on.
pub struct Executor<'a> {
    memory: &'a Memory,
    is_open: bool,
}

impl<'a> Executor<'a> {
    pub fn new(memory: &'a Memory) -> Self {
        Self { memory, is_open: false }
    }

    pub fn execute(&mut self, work: &Work) {
        if !self.is_open {
            self.memory.open(true);
            self.is_open = true;
        }
        match *work {
            Work::Fill { target, value, len } => {
                self.check("fills", target, len);
                self.memory.fill(target, value, len);
            }
            Work::Bytes { target, ref bytes } => {
                self.check("copies to", target, bytes.len());
                // SAFETY: the target was checked just now, and the bytes are ours.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target as *mut u8, bytes.len()) };
            }
            Work::Copy { target, source, len } => {
                self.check("copies from", source, len);
                self.check("copies to", target, len);
                // SAFETY: both were checked just now. A pageable side is used within the call that names it.
                unsafe { std::ptr::copy(source as *const u8, target as *mut u8, len) };
            }
            Work::Launch { kernel, ref params, grid } => kernel.run(params, grid),
        }
    }

    /// Ends the process if a range is not out any more: a device would read or write somebody else's memory.
    fn check(&self, does: &str, start: usize, len: usize) {
        if self.memory.place(start, len) == Place::Nowhere {
            fatal(&format!("late work {does} {start:#x} ({len} bytes), which was given back before it ran"));
        }
    }
}

impl Drop for Executor<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.memory.open(false);
        }
    }
}
