//! The work that streams do.

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
        rows: Rows,
        bytes: Arc<[u8]>,
    },
    /// Read when it runs, whatever was there at the call.
    Copy {
        rows: Rows,
        /// Whether the target and the source are pageable memory, which is used within the call that names it.
        is_pageable: [bool; 2],
    },
    Launch {
        kernel: &'static Kernel,
        /// Aligned as any parameter may need it.
        params: Arc<[u128]>,
        grid: [u32; 2],
    },
}

/// Rows of bytes that are copied, with the bytes from one to the next in the target and in the source.
#[derive(Clone, Copy)]
pub struct Rows {
    pub target: usize,
    pub source: usize,
    pub pitches: [usize; 2],
    pub width: usize,
    pub height: usize,
}

impl Rows {
    /// Bytes from the first to the last of the target (0) or of the source (1), if so many can be.
    pub fn span(&self, side: usize) -> Option<usize> {
        let between = self.height.checked_sub(1)?.checked_mul(self.pitches[side])?;
        between.checked_add(self.width)
    }

    /// Copies them, from `source` on.
    fn copy(&self, source: *const u8) {
        for row in 0..self.height {
            let target = (self.target + row * self.pitches[0]) as *mut u8;
            let source = source.wrapping_add(row * self.pitches[1]);
            // SAFETY: both spans were checked by the caller just now, or the source is ours.
            unsafe { std::ptr::copy(source, target, self.width) };
        }
    }
}

/// Does work, with the device memory open that it may touch: for a kernel all, for a copy the blocks it names.
pub struct Executor<'a> {
    memory: &'a Memory,
    /// Addresses in the blocks that copies have opened.
    opened: Vec<usize>,
    all_open: bool,
}

impl<'a> Executor<'a> {
    pub fn new(memory: &'a Memory) -> Self {
        Self { memory, opened: Vec::new(), all_open: false }
    }

    pub fn execute(&mut self, work: &Work) {
        match *work {
            Work::Fill { target, value, len } => {
                self.check("fills", target, len, false);
                self.open(target);
                self.memory.fill(target, value, len);
            }
            Work::Bytes { rows, ref bytes } => {
                self.check("copies to", rows.target, rows.span(0).unwrap_or(0), false);
                self.open(rows.target);
                rows.copy(bytes.as_ptr());
            }
            Work::Copy { rows, is_pageable } => {
                self.check("copies from", rows.source, rows.span(1).unwrap_or(0), is_pageable[1]);
                self.check("copies to", rows.target, rows.span(0).unwrap_or(0), is_pageable[0]);
                self.open(rows.source);
                self.open(rows.target);
                rows.copy(rows.source as *const u8);
            }
            Work::Launch { kernel, ref params, grid } => {
                self.check_params(kernel, params);
                if !self.all_open {
                    self.memory.open(true);
                    self.all_open = true;
                }
                kernel.run(params, grid);
            }
        }
    }

    /// Opens the device block that an address lies in, if there is one.
    fn open(&mut self, address: usize) {
        if !self.all_open && !self.opened.contains(&address) && self.memory.open_block(address, true) {
            self.opened.push(address);
        }
    }

    /// Ends the process if a range is not out any more: a device would read or write somebody else's memory.
    fn check(&self, does: &str, start: usize, len: usize, is_pageable: bool) {
        let is_out = match self.memory.place(start, len) {
            Place::Nowhere => false,
            Place::Pageable => is_pageable,
            Place::Device(_) | Place::Locked => true,
        };
        if !is_out {
            fatal(&format!("late work {does} {start:#x} ({len} bytes), which was given back before it ran"));
        }
    }

    /// Checks the same for the addresses that a kernel is given, as far as its parameter holds them itself.
    fn check_params(&self, kernel: &Kernel, params: &[u128]) {
        let name = kernel.name();
        if let Some(word) = kernel.addresses(params).find(|&word| self.memory.is_gone(word)) {
            fatal(&format!("late work launches {name} with {word:#x}, which was given back before it ran"));
        }
    }
}

impl Drop for Executor<'_> {
    fn drop(&mut self) {
        if self.all_open {
            self.memory.open(false);
        } else {
            for &address in &self.opened {
                self.memory.open_block(address, false);
            }
        }
    }
}
